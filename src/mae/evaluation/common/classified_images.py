"""Images with a class each, as a training takes them: cropped, changed, normalised."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from mae.data.loading.loader import TrainingLoader, default_workers, normalise
from mae.evaluation.common.supervised import TrainingBatches, seeded_forward
from mae.evaluation.common.task import LabelledTask
from mae.modalities.images.crop import Augmentation


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledBatch:
    """A process's share of a micro-batch.

    Attributes:
        images: normalised, on the task's device.
        labels: their classes, there too.
        keys: of each sample.
        first_key: of the micro-batch's first sample, for what is drawn once for all of it.
    """

    images: Float32[Tensor, "B C H W"]
    labels: Int64[Tensor, " B"]
    keys: Int64[Tensor, " B"]
    first_key: Int64[Tensor, " 1"]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassifiedImages(TrainingBatches):
    """The training images of a task and their classes; see `TrainingBatches`.

    Attributes:
        task: whose images.
        batch_size: images of an optimizer step.
        accumulate: micro-batches per step.
        augmentation: how they are cropped and changed.
        prepare: makes what the module's forward takes; what it draws at random from PyTorch's generators depends on the
            batch alone.
    """

    task: LabelledTask
    batch_size: int
    accumulate: int
    augmentation: Augmentation
    prepare: Callable[[LabelledBatch], Mapping[str, Any]]

    @property
    def steps_per_epoch(self) -> int:
        """See `TrainingBatches`; a batch that cannot be made is refused."""
        return len(self.loader.images.readable) // self.batch_size

    @property
    def identity(self) -> Mapping[str, Any]:
        """See `TrainingBatches`."""
        return {"augmentation": vars(self.augmentation)}

    @cached_property
    def loader(self) -> TrainingLoader:
        """What reads them."""
        task, images = self.task, self.task.images("train")
        return TrainingLoader(
            images=images,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            img_size=task.extractor.preprocessing.img_size,
            seed=task.seed,
            workers=default_workers(task.device.type, images.in_memory, processes=task.world.local_size),
            pin_memory=task.device.type == "cuda",
            augmentation=self.augmentation,
            numbers=images.readable,
            rank=task.world.rank,
            world=task.world.size,
        )

    def batches(self, step: int) -> Generator[Mapping[str, Any], None, None]:
        """See `TrainingBatches`."""
        task = self.task
        preprocessing, class_of = task.extractor.preprocessing, task.class_of("train")
        mean, std = (torch.tensor(values, device=task.device) for values in (preprocessing.mean, preprocessing.std))
        with closing(self.loader.iterate(step)) as batches:
            for raw in batches:
                images = normalise(raw.images.to(task.device, non_blocking=True), mean, std)
                labels = class_of[raw.shown].to(task.device, non_blocking=True)
                first_key = seeded_forward(raw.keys, task.world)
                yield self.prepare(LabelledBatch(images=images, labels=labels, keys=raw.keys, first_key=first_key))
