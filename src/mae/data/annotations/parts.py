"""The part to learn from and the part to be evaluated on: found by the names of folders, or held out."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol, Self, TypeVar

import numpy as np

from mae.data.sources.folder import FileSource, count_of
from mae.data.sources.labels import hold_out
from mae.errors import UsageError

PARTS = (("train", ("train", "training")), ("test", ("val", "valid", "validation", "test", "testing")))
"""The parts, and what their folders may be called; the first that there is counts."""
HELD_OUT = "a fifth held out"


class Annotated(Protocol):
    """Images with what people drew on each."""

    @property
    def source(self) -> FileSource:
        """The images."""

    def take(self, indices: np.ndarray, note: str) -> Self:
        """Those at `indices` only."""


_Split = TypeVar("_Split", bound=Annotated)


def below(folder: Path) -> dict[str, Path]:
    """The folders in one, by their names in lower case.

    Raises:
        UsageError: it cannot be listed.
    """
    try:
        return {entry.name.lower(): entry for entry in sorted(folder.iterdir()) if entry.is_dir()}
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}") from error


def first(folders: dict[str, Path], names: Iterable[str]) -> Path | None:
    """The folder of the first of these names that there is."""
    return next((folders[name] for name in names if name in folders), None)


def check_one_each(folder: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Refuse labels that may be of either of two images.

    Args:
        folder: the images'.
        pairs: each image, and what its labels are called.

    Raises:
        UsageError: two images for the same labels.
    """
    images: dict[str, str] = {}
    for image, labels in pairs:
        if (other := images.setdefault(labels, image)) != image:
            raise UsageError(f"{folder} holds {other} and {image} for {labels}; expected one image for each")


def held_out(whole: _Split, *, name: str, what: str) -> dict[str, _Split]:
    """Both parts of images that come in one: a fifth is for testing, chosen by a hash of the names.

    Raises:
        UsageError: fewer than two images.
    """
    held = hold_out(list(whole.source.names), np.zeros(len(whole.source), dtype=np.int64))
    if held.all() or not held.any():
        raise UsageError(f"{name} holds {count_of(len(held), 'image')} with {what}; expected 2 or more")
    return {
        "train": whole.take(np.flatnonzero(~held), "images to learn from"),
        "test": whole.take(np.flatnonzero(held), "a fifth of the images, held out"),
    }


def without_images(test: _Split, numbers: Collection[int]) -> _Split:
    """A test part without some images.

    Raises:
        UsageError: none is left.
    """
    kept = np.array([number for number in range(len(test.source)) if number not in numbers], dtype=np.int64)
    if not len(kept):
        raise UsageError("every test image is among the training images; put others into the test part")
    return test.take(kept, f"{count_of(len(kept), 'test image')} not among the training images")
