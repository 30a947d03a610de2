"""Training samples of images with what people drew on them: masks, boxes, or both, changed along with the image.

As with crops (`mae.data.loading.loader`), what a step sees is a pure function of the seed and the step.
"""

import math
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors

from mae.data.dataset.images import ImageSet
from mae.data.loading.loader import InPieces, check_micro_batches, loaded_pieces
from mae.data.loading.sampler import AllBut, Numbers, RankOrder, make_shuffle
from mae.data.loading.worker import Found, ReplacedImages, none_readable, one_thread
from mae.errors import MAEError, UsageError
from mae.randomness import Stream, drawing_from, seeds

Sample = Mapping[str, Any]
"""What is known of an image, by name: `image`, and what its annotation holds."""

Annotate = Callable[[int], Sample]
"""From an image's number to tensors and tv_tensors (`Mask`, `BoundingBoxes`) by name."""

Transform = Callable[[Sample], Sample]
"""Changes an image (`tv_tensors.Image`, as of `ImageSet.get`) and its annotation together.

As those of `torchvision.transforms.v2` it draws from PyTorch's generator of the CPU alone.
"""

_PIECE = 16
"""Samples a worker loads at a time; they are whole images, often large ones."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnnotatedBatch:
    """A rank's micro-batch, on the CPU, not normalised.

    Attributes:
        samples: by name, `image` among them, what the transform gave: stacked `[B, ...]`, or a list of B tensors.
        keys: each sample's key in this epoch.
        shown: the number of the image that is used, where that of its id cannot be read.
        unreadable: what is wrong with unreadable files in this batch.
    """

    samples: Mapping[str, Any]
    keys: Int64[Tensor, " B"]
    shown: Int64[Tensor, " B"]
    unreadable: tuple[str, ...]


class _Piece(NamedTuple):
    """A slice of a micro-batch; `samples` is None where no replacement can be read, or an annotation is wrong."""

    samples: Mapping[str, Any] | None
    keys: Tensor
    shown: Tensor
    unreadable: list[str]
    wrong: str | None


@dataclass(frozen=True, kw_only=True, eq=False)
class AnnotatedLoader:
    """Endless training batches of annotated images, in the order and slices of `TrainingLoader`.

    Attributes:
        images: what to draw from.
        annotate: the annotation of an image.
        transform: changes image and annotation together; what it draws is a function of the sample's key.
        stacked: stack the samples, which must then be of one shape; else they are listed, as detectors want them.
        batch_size: images a step, over all ranks and micro-batches.
        accumulate: micro-batches a step.
        seed: the training's seed.
        workers: processes that load; 0 loads in this one.
        numbers: the images to draw from, each once, by their numbers in the set; None takes all.
        rank: this process's number.
        world: number of processes that train together.
    """

    images: ImageSet
    annotate: Annotate
    transform: Transform
    stacked: bool
    batch_size: int
    accumulate: int
    seed: int
    workers: int
    numbers: Numbers | None = None
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        """Refuses batches that cannot be made.

        Raises:
            UsageError: the batch is larger than the set or does not divide.
        """
        if self.batch_size > len(self._chosen):
            raise UsageError(
                f"--batch-size {self.batch_size} is more than the {len(self._chosen)} images of {self.images.name}; "
                f"lower it"
            )
        check_micro_batches(self.batch_size, accumulate=self.accumulate, world=self.world, views=1)

    @cached_property
    def _chosen(self) -> Numbers:
        return AllBut(len(self.images)) if self.numbers is None else self.numbers

    @property
    def steps_per_epoch(self) -> int:
        """Steps of which each shows other images; what is left when no whole batch can be made is dropped."""
        return len(self._chosen) // self.batch_size

    def iterate(self, start_step: int) -> Generator[AnnotatedBatch, None, None]:
        """Micro-batches from a step on, endlessly; closing the iterator stops the worker processes.

        Raises:
            MAEError: a wrong annotation, more unreadable files than allowed, or a worker process that died or hangs.
        """
        shuffle = make_shuffle(self._chosen, self.images.block_sizes, batch_size=self.batch_size, seed=self.seed)
        order = RankOrder(shuffle=shuffle, accumulate=self.accumulate, rank=self.rank, world=self.world)
        num_pieces = math.ceil(self.batch_size // (self.accumulate * self.world) / _PIECE)
        asked = InPieces(order, start_step, self.images, _PIECE)
        with closing(loaded_pieces(_AnnotatedDataset(self), asked, workers=self.workers)) as pieces:
            while True:
                yield self._joined([next(pieces) for _ in range(num_pieces)])

    def _joined(self, pieces: list[_Piece]) -> AnnotatedBatch:
        unreadable = tuple(message for piece in pieces for message in piece.unreadable)
        self.images.report_unreadable(unreadable)
        for piece in pieces:
            if piece.wrong is not None:
                raise MAEError(piece.wrong)
            if piece.samples is None:
                raise none_readable(self.images.name, piece.unreadable)
        found = [piece.samples for piece in pieces if piece.samples is not None]
        join: Callable[[list[Any]], Any] = torch.cat if self.stacked else _chained
        return AnnotatedBatch(
            samples={name: join([samples[name] for samples in found]) for name in found[0]},
            keys=torch.cat([piece.keys for piece in pieces]),
            shown=torch.cat([piece.shown for piece in pieces]),
            unreadable=unreadable,
        )


def _chained(lists: list[list[Tensor]]) -> list[Tensor]:
    return [each for some in lists for each in some]


class _AnnotatedDataset(Dataset[_Piece]):
    """Pieces of micro-batches, by the numbers and keys of their samples."""

    def __init__(self, loader: AnnotatedLoader) -> None:
        self._loader = loader
        self._images = ReplacedImages(loader.images, loader._chosen)

    def __getitem__(self, batch: tuple[list[int], list[int]]) -> _Piece:
        keys = torch.tensor(batch[1])
        samples, wrong = None, None
        with one_thread():
            found, unreadable = self._images.found(*batch)
            loaded = [each for each in found if each is not None]
            if len(loaded) == len(found):
                try:
                    samples = self._samples(loaded, keys)
                except MAEError as error:  # as text: PyTorch would hand on a traceback in its place
                    wrong = str(error)
        shown = torch.tensor([each.number for each in loaded])
        return _Piece(samples=samples, keys=keys, shown=shown, unreadable=unreadable, wrong=wrong)

    def _samples(self, loaded: list[Found], keys: Tensor) -> Mapping[str, Any]:
        changed = []
        for each, seed in zip(loaded, seeds(keys, Stream.CROP), strict=True):
            whole = {"image": tv_tensors.Image(each.image), **self._loader.annotate(each.number)}
            with drawing_from(seed):
                sample = self._loader.transform(whole)
            # Plain tensors: those of a subclass travel from a worker by a slower way.
            changed.append({name: torch.as_tensor(value).as_subclass(Tensor) for name, value in sample.items()})
        by_name = {name: [sample[name] for sample in changed] for name in changed[0]}
        return {name: torch.stack(values) for name, values in by_name.items()} if self._loader.stacked else by_name
