"""Images decoded into the format of their set: one by one, or all of them into memory."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np

from mae.contention import num_cores
from mae.data.dataset.channels import ImageFormat
from mae.data.dataset.reading import ImageReader, Reduction, WholeSize
from mae.data.dataset.unreadable import UnreadableFiles
from mae.data.decode.limits import UnreadableImage
from mae.text import listed

_CHUNK = 16

Decoded = tuple[list[tuple[int, ...]], np.ndarray]
"""Shapes of some images `[h, w, C]`, and their values in a row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedImages:
    """Images `[h, w, C]` of any sizes in few arrays, which forked processes share.

    Attributes:
        pieces: the values of `_CHUNK` images each, the last of the rest.
        shapes: of each image; (0, 0, 0) of one that cannot be read.
        offsets: where each begins in its piece.
    """

    pieces: list[np.ndarray]
    shapes: np.ndarray
    offsets: np.ndarray

    def image(self, index: int) -> np.ndarray:
        """The image of a number, a view."""
        shape, start = self.shapes[index].tolist(), self.offsets[index]
        return self.pieces[index // _CHUNK][start : start + prod(shape)].reshape(shape)


def load_image(reader: ImageReader, index: int, image_format: ImageFormat) -> np.ndarray:
    """An image in the format of its set, `[H, W, channels]`, writeable; raises `UnreadableImage`."""
    return _in_format(reader.load(index), reader, index, image_format)


def load_reduced(
    reader: ImageReader, index: int, image_format: ImageFormat, reduction: Reduction
) -> tuple[np.ndarray, WholeSize]:
    """`load_image` of one that is decoded no larger than it needs to be, see `ImageReader.load_reduced`."""
    image, whole = reader.load_reduced(index, reduction)
    return _in_format(image, reader, index, image_format), whole


def _in_format(image: np.ndarray, reader: ImageReader, index: int, image_format: ImageFormat) -> np.ndarray:
    name = reader.source.item_name(index)
    expected = image_format.named
    if expected is not None and image_format.own_names and (names := reader.probe(index).names) != expected:
        found = "no channel names" if names is None else f"the channels {listed(names)}"
        raise UnreadableImage(f"{name} has {found}; the others have {listed(expected)}")
    image = image_format.of(image, name=name)
    return image if image.flags.writeable else image.copy()  # torch warns of arrays it may not write to


def try_image(reader: ImageReader, index: int, image_format: ImageFormat, broken: dict[int, str]) -> np.ndarray | None:
    """The image; None, and a message in `broken`, if it cannot be used."""
    try:
        return load_image(reader, index, image_format)
    except UnreadableImage as error:
        broken[index] = str(error)
        return None


def decode_all(
    reader: ImageReader, image_format: ImageFormat, broken: dict[int, str], unreadable: UnreadableFiles, limit: int
) -> DecodedImages | None:
    """All images; None if they turn out to need more than `limit` bytes.

    Args:
        reader: gives the images.
        image_format: what they are brought to.
        broken: gets a message for each image that cannot be read.
        unreadable: counts these.
        limit: bytes that all images may take.

    Raises:
        MAEError: more unreadable files than allowed.
    """
    nothing = np.empty((0, 0, 0), image_format.dtype)
    total = len(reader.source)
    shapes: list[tuple[int, ...]] = []
    offsets: list[int] = []
    pieces: list[np.ndarray] = []
    num_bytes = 0

    def decoded(numbers: range) -> Decoded:
        results = [try_image(reader, index, image_format, broken) for index in numbers]
        images = [nothing if result is None else result for result in results]
        return [image.shape for image in images], np.concatenate([image.ravel() for image in images])

    with ThreadPoolExecutor(num_threads()) as pool:
        chunks = [range(start, min(start + _CHUNK, total)) for start in range(0, total, _CHUNK)]
        for numbers, (sides, piece) in zip(chunks, _in_order(pool, decoded, chunks), strict=True):
            unreadable.add(broken[number] for number in numbers if number in broken)
            unreadable.check()
            shapes += sides
            offsets += accumulate((prod(shape) for shape in sides[:-1]), initial=0)
            pieces.append(piece)
            num_bytes += piece.nbytes
            if num_bytes > limit:
                return None
    return DecodedImages(pieces=pieces, shapes=np.array(shapes).reshape(-1, 3), offsets=np.array(offsets))


def _in_order(pool: ThreadPoolExecutor, work: Callable[[range], Decoded], chunks: list[range]) -> Iterator[Decoded]:
    """What comes of each chunk, no further ahead than there are threads: what is not taken in time stays in memory."""
    ahead = deque[Future[Decoded]]()
    for chunk in chunks:
        ahead.append(pool.submit(work, chunk))
        if len(ahead) > num_threads():
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


def num_threads() -> int:
    """How many threads decode at a time."""
    return min(num_cores(), 16)
