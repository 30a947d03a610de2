"""Names and content of a data set's items: many names in little memory, and digests that tell whether they changed."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from mae.data.decode.limits import UnreadableImage


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
    """16 hexadecimal digits for items in order, from their names and some integers of each, such as its size."""
    digest = hashlib.sha256()
    for name, *numbers in zip(names, *(column.tolist() for column in columns), strict=True):
        fields = b" ".join(b"%d" % number for number in numbers)
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0" + fields + b"\n")
    return digest.hexdigest()[:16]


def pixel_digest(images: Iterable[np.ndarray], *, start: str = "") -> bytes:
    """Eight bytes (blake2b) of the shapes, types and values of some images in order, after the text `start`."""
    digest = hashlib.blake2b(start.encode(), digest_size=8)
    for image in images:
        digest.update(f"{image.shape} {image.dtype.str}".encode())
        digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


_WHOLE = 64 << 10  # bytes; larger files are read in parts
_PARTS, _PART = 8, 8 << 10


def digest_of_parts(read: Callable[[int, int], bytes], num_bytes: int) -> str:
    """16 hexadecimal digits (blake2b) of a file's content, of which at most 64 KiB are read.

    A file of up to that size is read whole; of a larger one the first and last 8 KiB and six parts of 8 KiB in between,
    at offsets drawn from its size.

    Args:
        read: reads bytes, given an offset and a length.
        num_bytes: the size of the file.
    """
    parts = [(0, num_bytes)] if num_bytes <= _WHOLE else [(place, _PART) for place in _offsets(num_bytes)]
    digest = hashlib.blake2b(str(num_bytes).encode(), digest_size=8)
    for place, length in parts:
        digest.update(read(place, length))
    return digest.hexdigest()


def _offsets(num_bytes: int) -> list[int]:
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
