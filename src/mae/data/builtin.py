"""Images that come inside installed packages: they need neither a network nor a file of the user's.

`builtin:photos` is made of photographs in the wheels of scikit-image and scikit-learn, found as files so that
neither package need be imported. Each photograph is cut once, so that both parts show what it is of; squares from
the left (upper) two thirds are for training, from the right (lower) third for testing, so no pixel is in both.
Neighbouring squares overlap.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mae.data.arrays import ArraySource, whole_array
from mae.data.base import fingerprint_of, hold_out
from mae.data.decoding import conform, decode
from mae.data.limits import ImageInfo
from mae.errors import MAEError

TILE = 112
"""Side of a square in pixels: crops of 20 % of its area are 50 pixels wide, enough to train at 64 to 96."""

_TRAINING_SHARE = 2 / 3
_TRAINING_GRID = (16, 16)
_TEST_GRID = (8, 6)
_BELOW, _BESIDE = 0, 1  # where the test part lies: the axis along which the photograph is cut
# Photographs rich in content all over; left out are text, drawings, instruments' pictures, near-blank ones and the
# second half of the stereo pair.
_PHOTOS = {
    "skimage/data/astronaut.png": _BESIDE,
    "skimage/data/brick.png": _BESIDE,
    "skimage/data/camera.png": _BESIDE,
    "skimage/data/chelsea.png": _BESIDE,
    "sklearn/datasets/images/china.jpg": _BESIDE,
    "skimage/data/coffee.png": _BELOW,
    "skimage/data/coins.png": _BESIDE,
    "sklearn/datasets/images/flower.jpg": _BELOW,
    "skimage/data/grass.png": _BESIDE,
    "skimage/data/gravel.png": _BESIDE,
    "skimage/data/motorcycle_left.png": _BESIDE,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class TileSource:
    """Overlapping squares of some photographs, the same grid of them from each."""

    name: str
    note: str
    photo_names: tuple[str, ...]
    photos: tuple[np.ndarray, ...]
    grid: tuple[int, int]

    def __len__(self) -> int:
        return len(self.photos) * self.grid[0] * self.grid[1]

    def item_name(self, index: int) -> str:
        """The photograph and the square's number, for messages."""
        photo, cell = divmod(index, self.grid[0] * self.grid[1])
        return f"{self.name}/{self.photo_names[photo]}[{cell}]"

    def load(self, index: int) -> np.ndarray:
        """The square `[TILE, TILE, 3]`, a view."""
        number, cell = divmod(index, self.grid[0] * self.grid[1])
        photo, (row, column) = self.photos[number], divmod(cell, self.grid[1])
        top = round((photo.shape[0] - TILE) * row / (self.grid[0] - 1))
        left = round((photo.shape[1] - TILE) * column / (self.grid[1] - 1))
        return photo[top : top + TILE, left : left + TILE]

    def probe(self, index: int) -> ImageInfo:
        """What `load` gives."""
        return ImageInfo(height=TILE, width=TILE, channels=3, dtype=np.dtype(np.uint8))

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        names = (self.item_name(index) for index in range(len(self)))
        return fingerprint_of(names, np.full(len(self), TILE * TILE * 3))

    def labels(self) -> np.ndarray:
        """Which photograph each square is of, `[n]`."""
        return np.repeat(np.arange(len(self.photos)), self.grid[0] * self.grid[1])


def photo_tiles() -> tuple[TileSource, TileSource]:
    """The training and the test squares of the photographs.

    Raises:
        MAEError: a photograph is missing from its package.
    """
    names = tuple(Path(file).stem for file in _PHOTOS)
    parts = [_cut(_photo(file), axis) for file, axis in _PHOTOS.items()]
    train = TileSource(
        name="builtin:photos",
        note=_photos_note("two thirds", _TRAINING_GRID),
        photo_names=names,
        photos=tuple(part for part, _ in parts),
        grid=_TRAINING_GRID,
    )
    test = TileSource(
        name="builtin:photos test",
        note=_photos_note("other third", _TEST_GRID),
        photo_names=names,
        photos=tuple(part for _, part in parts),
        grid=_TEST_GRID,
    )
    return train, test


def _photos_note(part: str, grid: tuple[int, int]) -> str:
    number = len(_PHOTOS) * grid[0] * grid[1]
    return f"{number:,} overlapping squares from the {part} of {len(_PHOTOS)} photographs"


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
