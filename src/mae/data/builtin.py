"""Images that come inside installed packages: they need neither a network nor a file of the user's.

`builtin:photos` is made of photographs in the wheels of scikit-image and scikit-learn, found as files so that
neither package need be imported. Each photograph is cut once, so that both parts show what it is of; squares from
the left (upper) three fifths are for training, from the right (lower) two for testing, so no pixel is in both.
Neighbouring squares overlap.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mae.data.arrays import ArraySource, whole_array
from mae.data.base import fingerprint_of, hold_out, pixel_digest
from mae.data.decoding import conform, decode
from mae.data.limits import ImageInfo
from mae.errors import MAEError

TRAINING_SIDE = 200
"""Side in pixels of the squares that are trained on: large enough to show things, not only their texture."""

LABELLED_SIDE = 152
"""Side of the squares that are told apart: the smallest test part is 154 pixels wide."""

_TRAINING_SHARE = 0.6
_TRAINING_GRID = (16, 16)
_TEST_GRID = (8, 6)
_BELOW, _BESIDE = 0, 1  # where the test part lies: the axis along which the photograph is cut
# Photographs rich in content all over; left out are plain textures (nothing can tell what was hidden), text, drawings,
# instruments' pictures, near-blank ones and the second half of the stereo pair.
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
class TileSource:
    """Overlapping squares of some photographs, the same grid of them from each.

    Attributes:
        name: the source's name.
        note: what it is, for the header.
        photo_names: the photographs' names.
        photos: their parts that squares are taken from, `[h, w, 3]`.
        side: side of a square in pixels.
        grid: rows and columns of squares over each part.
    """

    name: str
    note: str
    photo_names: tuple[str, ...]
    photos: tuple[np.ndarray, ...]
    side: int
    grid: tuple[int, int]

    def __post_init__(self) -> None:
        """Refuses photographs that hold no square.

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
        return len(self.photos) * self.grid[0] * self.grid[1]

    def item_name(self, index: int) -> str:
        """The photograph and the square's number, for messages."""
        photo, cell = divmod(index, self.grid[0] * self.grid[1])
        return f"{self.name}/{self.photo_names[photo]}[{cell}]"

    def load(self, index: int) -> np.ndarray:
        """The square `[side, side, 3]`, a view."""
        number, cell = divmod(index, self.grid[0] * self.grid[1])
        photo, (row, column) = self.photos[number], divmod(cell, self.grid[1])
        top = round((photo.shape[0] - self.side) * row / (self.grid[0] - 1))
        left = round((photo.shape[1] - self.side) * column / (self.grid[1] - 1))
        return photo[top : top + self.side, left : left + self.side]

    def probe(self, index: int) -> ImageInfo:
        """What `load` gives."""
        return ImageInfo(height=self.side, width=self.side, channels=3, dtype=np.dtype(np.uint8))

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        names = (self.item_name(index) for index in range(len(self)))
        return fingerprint_of(names, np.full(len(self), self.side**2 * 3))

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the square."""
        return pixel_digest([self.load(index)]).hex()

    def version(self) -> str:
        """16 hexadecimal digits of the fingerprint and the photographs' pixels."""
        return pixel_digest(self.photos, start=self.fingerprint()).hex()

    def labels(self) -> np.ndarray:
        """Which photograph each square is of, `[n]`."""
        return np.repeat(np.arange(len(self.photos)), self.grid[0] * self.grid[1])


def photo_tiles() -> TileSource:
    """The squares to pre-train on, from the training parts of the photographs.

    Raises:
        MAEError: a photograph is missing from its package, or too small.
    """
    train, _ = _photo_parts()
    return _tiles("builtin:photos", "first three fifths", train, side=TRAINING_SIDE, grid=_TRAINING_GRID)


def labelled_photo_tiles() -> tuple[TileSource, TileSource]:
    """Squares of one size from the training and from the test parts of the photographs.

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
    )


def _photo_parts() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """The training and the test part of each photograph."""
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
        raise MAEError(f"builtin:photos needs {path}, which this version of {package} does not bring")
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
        whole.take(inside, f"{len(inside):,} of {len(whole):,} scanned digits, the training part"),
        whole.take(outside, f"{len(outside):,} of {len(whole):,} scanned digits, the test part"),
        data.target[inside],
        data.target[outside],
    )
