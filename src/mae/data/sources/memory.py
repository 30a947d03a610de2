"""Images in memory, and the data sets that torchvision downloads."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from mae.data.items import fingerprint_of, pixel_digest
from mae.data.sources.source import Source
from mae.errors import MAEError


@dataclass(frozen=True, kw_only=True, eq=False)
class ArraySource(Source):
    """Images of one size in an array `[n, H, W, C]`; `numbers [n]` are their numbers in the whole data set."""

    images: np.ndarray
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.images)

    def item_name(self, index: int) -> str:
        """The name and number, for messages."""
        return f"{self.name}[{self.numbers[index]}]"

    def read(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`, a view."""
        image: np.ndarray = self.images[index]
        return image

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        sizes = np.full(len(self), self.images[0].nbytes)
        return fingerprint_of((self.item_name(index) for index in range(len(self))), sizes)

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the image."""
        return pixel_digest([self.images[index]]).hex()

    def version(self) -> str:
        """16 hexadecimal digits of the fingerprint and all pixels."""
        return pixel_digest(self.images, start=self.fingerprint()).hex()

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the images at `indices` only."""
        return replace(self, images=self.images[indices], numbers=self.numbers[indices], note=note)


def whole_array(images: np.ndarray, *, name: str, note: str) -> ArraySource:
    """All images of an array `[n, H, W, C]`, numbered from 0."""
    return ArraySource(name=name, note=note, images=images, numbers=np.arange(len(images)))


def cifar10(data_root: Path, *, train: bool) -> tuple[ArraySource, np.ndarray, tuple[str, ...]]:
    """CIFAR-10's training or test split, its labels `[n]` and class names.

    Raises:
        MAEError: it is not there and cannot be downloaded.
    """
    from torchvision.datasets import CIFAR10  # slow to import, and only this source needs it

    data = _fetched(lambda: CIFAR10(str(data_root), train=train, download=True), "cifar10", data_root)
    part = "train" if train else "test"
    source = whole_array(data.data, name=f"cifar10 {part}", note=f"{part} split, {len(data.data):,} images")
    return source, np.asarray(data.targets), tuple(data.classes)


def stl10(data_root: Path, *, part: str) -> tuple[ArraySource, np.ndarray, tuple[str, ...]]:
    """STL-10's split `unlabeled`, `train` or `test`, its labels `[n]` (-1 for none) and class names.

    Raises:
        MAEError: it is not there and cannot be downloaded.
    """
    from torchvision.datasets import STL10  # slow to import, and only this source needs it

    data = _fetched(lambda: STL10(str(data_root), split=part, download=True), "stl10", data_root)
    images = data.data.transpose(0, 2, 3, 1)
    source = whole_array(images, name=f"stl10 {part}", note=f"{part} split, {len(images):,} images")
    return source, np.asarray(data.labels), tuple(data.classes)


_ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "stl10": "stl10_binary.tar.gz"}


def _fetched(make: Callable[[], Any], name: str, data_root: Path) -> Any:
    try:
        return make()
    # URLError, RuntimeError (checksum), OSError (disk) and tarfile's own: all mean the files are not there.
    except Exception as error:
        raise MAEError(
            f"{name} is not in {data_root} and could not be downloaded ({error}); "
            f"put {_ARCHIVES[name]} into {data_root} and rerun"
        ) from error
