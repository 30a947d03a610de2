"""Images with masks or boxes, as a training takes them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from mae.data.loading.annotated import Annotate, AnnotatedLoader, Transform
from mae.data.loading.loader import default_workers
from mae.evaluation.common.supervised import Task, TrainingBatches, seeded_forward


@dataclass(frozen=True, kw_only=True, eq=False)
class AnnotatedImages(TrainingBatches):
    """The training images of a task and what was drawn on them; see `TrainingBatches`.

    Attributes:
        task: whose images.
        batch_size: images of an optimizer step.
        accumulate: micro-batches per step.
        annotate: the annotation of an image by its number.
        transform: changes image and annotation together; see `AnnotatedLoader`.
        described: what of `transform` and `numbers` the plan does not tell, as JSON values.
        stacked: see `AnnotatedLoader`.
        prepare: makes what the module's forward takes of a micro-batch's samples.
        numbers: the training images, by their numbers; None: all that can be read.
    """

    task: Task
    batch_size: int
    accumulate: int
    annotate: Annotate
    transform: Transform
    described: Mapping[str, Any]
    stacked: bool
    prepare: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    numbers: Int64[Tensor, " n"] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """See `TrainingBatches`; a batch that cannot be made is refused."""
        return self.loader.steps_per_epoch

    @property
    def identity(self) -> Mapping[str, Any]:
        """See `TrainingBatches`."""
        return {"transform": dict(self.described)}

    @cached_property
    def loader(self) -> AnnotatedLoader:
        """What reads them."""
        task, images = self.task, self.task.images("train")
        return AnnotatedLoader(
            images=images,
            annotate=self.annotate,
            transform=self.transform,
            stacked=self.stacked,
            batch_size=self.batch_size,
            accumulate=self.accumulate,
            seed=task.seed,
            workers=default_workers(task.device.type, images.in_memory, processes=task.world.local_size),
            numbers=images.readable if self.numbers is None else self.numbers,
            rank=task.world.rank,
            world=task.world.size,
        )

    def batches(self, step: int) -> Generator[Mapping[str, Any], None, None]:
        """See `TrainingBatches`."""
        with closing(self.loader.iterate(step)) as batches:
            for batch in batches:
                seeded_forward(batch.keys, self.task.world)
                yield self.prepare(batch.samples)
