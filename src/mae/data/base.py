"""What every source of images offers, and how names and labels are kept."""

import hashlib
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int64
from torch import Tensor

from mae.data.limits import ImageInfo, UnreadableImage
from mae.errors import UsageError

HELD_OUT = 0.2
"""Share of each class that is kept for testing where a source has no test part of its own."""


@runtime_checkable  # so that type checks while testing can tell one
class Source(Protocol):
    """Images in a fixed order, known by number; nothing of a label is read."""

    @property
    def name(self) -> str:
        """What the user called it."""
        ...

    @property
    def note(self) -> str:
        """One line on what it holds and what was left out."""
        ...

    def __len__(self) -> int: ...

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`, uint8, uint16 or float32; raises `UnreadableImage`."""
        ...

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give, without decoding; raises `UnreadableImage`."""
        ...

    def item_name(self, index: int) -> str:
        """The file, member or element, for messages."""
        ...

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the order, names or sizes of the items, and with known checksums.

        No item is read for it; `content` tells of one what this cannot.
        """
        ...

    def content(self, index: int) -> str:
        """Hexadecimal digits that change with what an item holds; at most some images' worth is read.

        Of a large file only parts are read, see `digest_of_parts`; raises `UnreadableImage`.
        """
        ...

    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, and with the place or times of the last change."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledSplit:
    """One part of a labelled data set; `labels[i]` is the class of the source's image i."""

    source: Source
    labels: Int64[Tensor, " n"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledData:
    """A labelled data set; labels are positions in `class_names`."""

    train: LabelledSplit
    test: LabelledSplit
    class_names: tuple[str, ...]
    note: str


class Names(Sequence[str]):
    """Many names in two flat arrays.

    A list of a million strings would be copied into each worker process piece by piece, since Python writes a
    reference count into every string it looks at; arrays stay shared.
    """

    def __init__(self, names: Iterable[str]) -> None:
        # File names may hold bytes that are no text, for which lone surrogates stand; surrogatepass keeps those.
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        self._ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._text = np.frombuffer(b"".join(encoded), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self._ends[index], self._ends[index + 1]
        return self._text[start:end].tobytes().decode("utf-8", "surrogatepass")

    def take(self, indices: np.ndarray) -> "Names":
        """The names at `indices`, in that order."""
        return Names(self[int(index)] for index in indices)


def fingerprint_of(names: Iterable[str], *columns: np.ndarray) -> str:
    """16 hexadecimal digits for items in order, from their names and some whole numbers of each, as its size."""
    digest = hashlib.sha256()
    for name, *numbers in zip(names, *(column.tolist() for column in columns), strict=True):
        told = b" ".join(b"%d" % number for number in numbers)
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + told + b"\n")
    return digest.hexdigest()[:16]


def pixel_digest(images: Iterable[np.ndarray], *, start: str = "") -> bytes:
    """Eight bytes (blake2b) for the shape, type and values of some images in order, after a text."""
    digest = hashlib.blake2b(start.encode(), digest_size=8)
    for image in images:
        digest.update(f"{image.shape} {image.dtype.str}".encode())
        digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


_WHOLE = 64 << 10  # bytes; of larger files parts are read
_PARTS, _PART = 8, 8 << 10


def digest_of_parts(read: Callable[[int, int], bytes], num_bytes: int) -> str:
    """16 hexadecimal digits (blake2b) for the content of a file, of which at most 64 KiB are read.

    Up to that size all of it; of a larger file the first and the last 8 KiB, and six parts as long in between, where
    its size says.

    Args:
        read: gives so many bytes from a place on.
        num_bytes: the size of the file.
    """
    parts = [(0, num_bytes)] if num_bytes <= _WHOLE else [(place, _PART) for place in _places(num_bytes)]
    digest = hashlib.blake2b(str(num_bytes).encode(), digest_size=8)
    for place, length in parts:
        digest.update(read(place, length))
    return digest.hexdigest()


def _places(num_bytes: int) -> list[int]:
    last = num_bytes - _PART
    keyed = (hashlib.blake2b(f"{num_bytes} {number}".encode(), digest_size=8).digest() for number in range(_PARTS - 2))
    return [0, *sorted(int.from_bytes(key) % last for key in keyed), last]


def digest_of_file(path: Path) -> str:
    """`digest_of_parts` of a local file.

    Raises:
        UnreadableImage: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:

            def read(place: int, length: int) -> bytes:
                file.seek(place)
                return file.read(length)

            return digest_of_parts(read, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise UnreadableImage(f"{path} cannot be read: {error.strerror}") from error


def hold_out(names: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """Which items are kept for testing: a fifth of each class, chosen by a hash of the names.

    At least one item of each class of two or more is held out, and none of a class of one.

    Args:
        names: the items' names.
        labels: class numbers `[n]`.

    Returns:
        Booleans `[n]`, True for the test part.
    """
    order = np.array([hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest() for name in names])
    test = np.zeros(len(names), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = max(round(HELD_OUT * len(members)), 1) if len(members) > 1 else 0
        test[members[np.argsort(order[members], kind="stable")][:count]] = True
    return test


def check_classes(class_names: Sequence[str], *, name: str) -> None:
    """Refuses data that cannot be classified.

    Raises:
        UsageError: fewer than two classes.
    """
    if len(class_names) < 2:
        found = f"only the class {class_names[0]!r}" if class_names else "no class folders"
        raise UsageError(
            f"{name} holds {found}; expected a folder for each of two or more classes, as in train/cat/1.jpg"
        )


def check_parts(class_names: Sequence[str], test_classes: Iterable[str], *, name: str) -> None:
    """Refuses parts that do not hold the same classes.

    Args:
        class_names: the classes of the training part.
        test_classes: the class of each test image.
        name: what the user called the test part.

    Raises:
        UsageError: a test class never trained, or a training class without a test image.
    """
    trained, tested = set(class_names), set(test_classes)
    if unknown := sorted(tested - trained):
        raise UsageError(
            f"{name}: the test class {unknown[0]!r} is not among the training classes; "
            + (_misspelt(unknown[0], trained) or "take it out, or add training images of it")
        )
    if untested := sorted(trained - tested):
        raise UsageError(
            f"{name}: the training class {untested[0]!r} has no test image; add some, or take the class out"
        )


def _misspelt(class_name: str, others: Iterable[str]) -> str:
    """What to do where one of the others is the same name in other letters, which may look alike; else empty."""
    alike = sorted(other for other in others if _letters(other) == _letters(class_name))
    if not alike:
        return ""
    return f"{ascii(alike[0])} is, of which {ascii(class_name)} differs in case or Unicode form: name both alike"


def _letters(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def check_divisible(classes: Sequence[str], *, name: str) -> None:
    """Refuses images that cannot be divided into training and test part.

    Args:
        classes: the class of each image.
        name: what the user called them.

    Raises:
        UsageError: a class of one image.
    """
    lonely = sorted(class_name for class_name, number in Counter(classes).items() if number == 1)
    if lonely:
        raise UsageError(
            f"{name}: the class {lonely[0]!r} has one image; at least two are needed, one to train on and one to test "
            f"on: add some, or take the class out"
        )
