"""Images that come with installed packages: they need neither a network nor files of the user's.

`builtin:photos` is made of photographs in the wheels of scikit-image and scikit-learn, found as files so that neither
package is imported. Each photograph is cut once, so that both splits show its subject: squares from the left (upper)
three fifths are for training, from the right (lower) two for testing, and no pixel is in both. Neighbouring squares
overlap.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import numpy as np

from mae.data.decode.image import conform, decode
from mae.data.items import fingerprint_of, pixel_digest
from mae.data.sources.labels import hold_out
from mae.data.sources.memory import ArraySource, whole_array
from mae.data.sources.source import Source
from mae.errors import MAEError

TRAINING_SIDE = 200
"""Side in pixels of the squares for pre-training: large enough to show objects, not only texture."""

LABELLED_SIDE = 152
"""Side of the squares for classification: the smallest test split is 154 pixels wide."""

_TRAINING_SHARE = 0.6
_TRAINING_GRID = (16, 16)
_TEST_GRID = (8, 6)
_BELOW, _BESIDE = 0, 1  # where the test split is: the axis along which the photograph is cut
# Photographs with content everywhere; left out are plain textures (masked patches cannot be inferred), text, drawings,
# instrument images, near-blank ones and the second half of the stereo pair.
_PHOTOS = {
    "skimage/data/astronaut.png": _BESIDE,
    "skimage/data/camera.png": _BESIDE,
    "skimage/data/chelsea.png": _BESIDE,
    "sklearn/datasets/images/china.jpg": _BESIDE,
    "skimage/data/coffee.png": _BELOW,
    "skimage/data/coins.png": _BESIDE,
    "sklearn/datasets/images/flower.jpg": _BELOW,
    "skimage/data/motorcycle_left.png": _BESIDE,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TileSource(Source):
    """Overlapping squares of some photographs, the same grid of them from each.

    Attributes:
        photo_names: the photographs' names.
        photos: their parts that squares are taken from, `[h, w, 3]`.
        side: side of a square in pixels.
        grid: rows and columns of squares over each part.
        numbers: of the squares, photograph by photograph and row by row.
    """

    photo_names: tuple[str, ...]
    photos: tuple[np.ndarray, ...]
    side: int
    grid: tuple[int, int]
    numbers: np.ndarray

    def __post_init__(self) -> None:
        """Refuses photographs that are smaller than a square.

        Raises:
            MAEError: one is smaller than `side`.
        """
        for name, photo in zip(self.photo_names, self.photos, strict=True):
            height, width = photo.shape[:2]
            if min(height, width) < self.side:
                raise MAEError(
                    f"{self.name}: the part of {name} is {width} x {height} pixels; expected at least "
                    f"{self.side} x {self.side}"
                )

    def __len__(self) -> int:
        return len(self.numbers)

    def item_name(self, index: int) -> str:
        """The photograph and the square's number, for messages."""
        photo, cell = self._place(index)
        return f"{self.name}/{self.photo_names[photo]}[{cell}]"

    def read(self, index: int) -> np.ndarray:
        """The square `[side, side, 3]`, a view."""
        number, cell = self._place(index)
        photo, (row, column) = self.photos[number], divmod(cell, self.grid[1])
        top = round((photo.shape[0] - self.side) * row / (self.grid[0] - 1))
        left = round((photo.shape[1] - self.side) * column / (self.grid[1] - 1))
        return photo[top : top + self.side, left : left + self.side]

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the photograph, and of the square in it."""
        photo, cell = divmod(int(self.numbers[index]), self.grid[0] * self.grid[1])
        return photo, cell

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        names = (self.item_name(index) for index in range(len(self)))
        return fingerprint_of(names, np.full(len(self), self.side**2 * 3))

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the square."""
        return pixel_digest([self.read(index)]).hex()

    def version(self) -> str:
        """16 hexadecimal digits of the fingerprint and the photographs' pixels."""
        return pixel_digest(self.photos, start=self.fingerprint()).hex()

    def labels(self) -> np.ndarray:
        """Which photograph each square is of, `[n]`."""
        return self.numbers // (self.grid[0] * self.grid[1])

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the squares at `indices` only."""
        return replace(self, numbers=self.numbers[indices], note=note)


def photo_tiles() -> TileSource:
    """The squares to pre-train on, from the training splits of the photographs.

    Raises:
        MAEError: a photograph is missing from its package, or too small.
    """
    train, _ = _photo_parts()
    return _tiles("builtin:photos", "first three fifths", train, side=TRAINING_SIDE, grid=_TRAINING_GRID)


def labelled_photo_tiles() -> tuple[TileSource, TileSource]:
    """Squares of one size from the training and test splits of the photographs.

    Raises:
        MAEError: a photograph is missing from its package, or too small.
    """
    train, test = _photo_parts()
    return (
        _tiles("builtin:photos train", "first three fifths", train, side=LABELLED_SIDE, grid=_TRAINING_GRID),
        _tiles("builtin:photos test", "other two fifths", test, side=LABELLED_SIDE, grid=_TEST_GRID),
    )


def _tiles(name: str, part: str, photos: tuple[np.ndarray, ...], *, side: int, grid: tuple[int, int]) -> TileSource:
    number = len(photos) * grid[0] * grid[1]
    return TileSource(
        name=name,
        note=f"{number:,} overlapping squares from the {part} of {len(photos)} photographs",
        photo_names=tuple(Path(file).stem for file in _PHOTOS),
        photos=photos,
        side=side,
        grid=grid,
        numbers=np.arange(number),
    )


def _photo_parts() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """The training and the test split of each photograph."""
    parts = [_cut(_photo(file), axis) for file, axis in _PHOTOS.items()]
    return tuple(train for train, _ in parts), tuple(test for _, test in parts)


def _cut(photo: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    train, test = np.split(photo, [round(photo.shape[axis] * _TRAINING_SHARE)], axis=axis)
    return train, test


def _photo(file: str) -> np.ndarray:
    package, inside = file.split("/", 1)
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise MAEError(f"builtin:photos needs the package {package}, which is not installed")
    path = Path(spec.origin).parent / inside
    if not path.is_file():
        raise MAEError(f"builtin:photos needs {path}, which this version of {package} does not include")
    photo = decode(path.read_bytes(), name=str(path))
    return conform(photo, channels=3, dtype=np.dtype(np.uint8), name=str(path))


def digits() -> tuple[ArraySource, ArraySource, np.ndarray, np.ndarray]:
    """scikit-learn's scans of digits, 8 x 8, grey: training and test source, training and test labels `[n]`."""
    from sklearn.datasets import load_digits  # takes a second to import, and only this source needs it

    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)[..., None]
    whole = whole_array(images, name="builtin:digits", note="")
    names = [whole.item_name(index) for index in range(len(whole))]
    test = hold_out(names, data.target)
    inside, outside = np.flatnonzero(~test), np.flatnonzero(test)
    return (
        whole.take(inside, f"{len(inside):,} of {len(whole):,} scanned digits, the training split"),
        whole.take(outside, f"{len(outside):,} of {len(whole):,} scanned digits, the test split"),
        data.target[inside],
        data.target[outside],
    )
