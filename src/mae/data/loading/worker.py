"""The work of a loading process: from the numbers and keys of some samples to their crops."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from mae.data.dataset.images import ImageSet
from mae.data.dataset.reading import WholeSize
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.sampler import Numbers
from mae.errors import MAEError
from mae.modalities.images.crop import (
    Augmentation,
    change_colours,
    colour_changes,
    rand_augment,
    random_crop_boxes,
    reduction,
    resized_crop,
)
from mae.randomness import Stream, seeds, uniform

REPLACEMENTS = 16
"""How many other images are tried for one that cannot be read."""


def none_readable(name: str, unreadable: Sequence[str]) -> MAEError:
    """The error for an image that cannot be read, nor any of its replacements."""
    return MAEError(f"{name}: {REPLACEMENTS + 1} images in a row cannot be used: {unreadable[0]}")


class Piece(NamedTuple):
    """A slice of a micro-batch; see `RawBatch`. `images` is None if no replacement can be read."""

    images: Tensor | None
    keys: Tensor
    ids: Tensor
    shown: Tensor
    unreadable: list[str]


class Found(NamedTuple):
    """The image that is used for a sample, its number, and its size when decoded whole."""

    number: int
    image: Tensor
    whole: WholeSize


class ReplacedImages:
    """The images of samples; for one that cannot be read another, drawn from the sample's key.

    Args:
        images: where images are read from.
        numbers: images that may replace one that cannot be read.
        reduction: how many times smaller an image may be decoded, from the keys of its views, its height and its width;
            None: always whole.
    """

    def __init__(
        self, images: ImageSet, numbers: Numbers, reduction: Callable[[list[int], int, int], int] | None = None
    ) -> None:
        self._images, self._numbers, self._reduction = images, numbers, reduction

    def shown(self, ids: list[int], keys: list[int]) -> tuple[list[int], list[str]]:
        """The numbers of the images used for these samples, and what is wrong with unreadable ones.

        Raises:
            MAEError: no replacement can be read either.
        """
        found, unreadable = self.found(ids, keys)
        loaded = [each for each in found if each is not None]
        if len(loaded) < len(found):
            raise none_readable(self._images.name, unreadable)
        return [each.number for each in loaded], unreadable

    def found(self, ids: list[int], keys: list[int]) -> tuple[list[Found | None], list[str]]:
        """An image for each sample, None where none can be read; and what is wrong with the others."""
        unreadable: list[str] = []
        views: dict[int, list[int]] = {}  # the keys of each image
        for number, key in zip(ids, keys, strict=True):
            views.setdefault(number, []).append(key)
        read = {number: self._readable(number, its_keys, unreadable) for number, its_keys in views.items()}
        return [read[number] for number in ids], unreadable

    def _readable(self, number: int, keys: list[int], unreadable: list[str]) -> Found | None:
        """The image, or the first readable replacement drawn from the key of its first view."""
        for candidate in itertools.chain([number], self._replacements(keys[0])):
            try:
                return Found(candidate, *self._load(candidate, keys))
            except UnreadableImage as error:
                unreadable.append(str(error))
        return None

    def _load(self, number: int, keys: list[int]) -> tuple[Tensor, WholeSize]:
        if self._reduction is not None:
            return self._images.get_reduced(number, partial(self._reduction, keys))
        image = self._images.get(number)
        return image, WholeSize(image.shape[1], image.shape[2], 1)

    def _replacements(self, key: int) -> Iterator[int]:
        # A generator, so that nothing is drawn for an image that can be read.
        drawn = uniform(torch.tensor([key]), REPLACEMENTS, Stream.REPLACEMENT).squeeze(0).double()
        yield from self._numbers[(drawn * len(self._numbers)).long()].tolist()


class CropDataset(ReplacedImages, Dataset[Piece]):
    """Pieces of micro-batches, by the numbers and keys of their samples."""

    def __init__(
        self,
        *,
        images: ImageSet,
        numbers: Numbers,
        img_size: tuple[int, int],
        augmentation: Augmentation,
    ) -> None:
        """Takes its settings.

        Args:
            images: where images are read from.
            numbers: images that may replace one that cannot be read.
            img_size: height and width of the crops in pixels.
            augmentation: how images are cropped and changed.
        """
        super().__init__(images, numbers, self._reduction_for if augmentation.reduced_decoding else None)
        self._img_size, self._augmentation = img_size, augmentation

    def __getitem__(self, batch: tuple[list[int], list[int]]) -> Piece:
        """The piece of these ids and keys."""
        ids, keys = torch.tensor(batch[0]), torch.tensor(batch[1])
        with one_thread():
            found, unreadable = self.found(*batch)
            loaded = [each for each in found if each is not None]
            shown = torch.tensor([each.number for each in loaded])
            crops = self._cropped(loaded, keys) if len(loaded) == len(found) else None
        return Piece(images=crops, keys=keys, ids=ids, shown=shown, unreadable=unreadable)

    def _reduction_for(self, keys: list[int], height: int, width: int) -> int:
        return reduction(torch.tensor(keys), height, width, self._augmentation, self._img_size)

    def _cropped(self, loaded: list[Found], keys: Tensor) -> Tensor:
        sizes = torch.tensor([each.whole[:2] for each in loaded])
        boxes, flips = random_crop_boxes(keys, sizes[:, 0], sizes[:, 1], self._augmentation)
        crops = [
            resized_crop(each.image, tuple(box), flip, self._img_size, reduction=each.whole.reduction)
            for each, box, flip in zip(loaded, boxes.tolist(), flips.tolist(), strict=True)
        ]
        if self._augmentation.changes_colours:
            changes = colour_changes(keys, self._augmentation)
            crops = [change_colours(crop, some) for crop, some in zip(crops, changes, strict=True)]
        if self._augmentation.rand_augment:
            crops = [rand_augment(crop, seed) for crop, seed in zip(crops, seeds(keys, Stream.AUGMENT), strict=True)]
        return torch.stack(crops)


@contextmanager
def one_thread() -> Iterator[None]:
    """One image is too little work to split: with two threads on two busy cores crops took up to 30 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
