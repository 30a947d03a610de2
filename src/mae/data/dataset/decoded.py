"""Images decoded into the format of their set: one by one, or all of them into memory."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mae.data.dataset.channels import ImageFormat
from mae.data.dataset.reading import ImageReader
from mae.data.dataset.unreadable import UnreadableFiles
from mae.data.decode.limits import UnreadableImage

_CHUNK = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodedImages:
    """Images `[h, w, C]` of any sizes in one array, which forked processes share.

    An image that cannot be read has the shape (0, 0, 0).
    """

    pixels: np.ndarray
    offsets: np.ndarray
    shapes: np.ndarray

    def image(self, index: int) -> np.ndarray:
        """The image of a number, a view."""
        shape = tuple(int(side) for side in self.shapes[index])
        start = int(self.offsets[index])
        return self.pixels[start : start + int(np.prod(shape))].reshape(shape)


def load_image(reader: ImageReader, index: int, image_format: ImageFormat) -> np.ndarray:
    """An image in the format of its set, `[H, W, channels]`, writeable; raises `UnreadableImage`."""
    image, name = reader.load(index), reader.source.item_name(index)
    expected = image_format.named
    if expected is not None and image_format.own_names and (names := reader.probe(index).names) != expected:
        found = "no channel names" if names is None else f"the channels {', '.join(names)}"
        raise UnreadableImage(f"{name} has {found}; the others have {', '.join(expected)}")
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
    pieces: list[np.ndarray] = []
    num_bytes = 0
    with ThreadPoolExecutor(num_threads()) as pool:
        for start in range(0, total, _CHUNK):
            numbers = range(start, min(start + _CHUNK, total))
            results = list(pool.map(lambda index: try_image(reader, index, image_format, broken), numbers))
            unreadable.add(broken[number] for number in numbers if number in broken)
            unreadable.check()
            images = [nothing if result is None else result for result in results]
            shapes += [image.shape for image in images]
            pieces.append(np.concatenate([image.ravel() for image in images]))
            num_bytes += pieces[-1].nbytes
            # Joining the pieces takes the same again for a moment, which a quarter of the free memory allows.
            if num_bytes > limit:
                return None
    sides = np.array(shapes, dtype=np.int64).reshape(-1, 3)
    offsets = np.concatenate([[0], np.cumsum(sides.prod(axis=1))[:-1]])
    return DecodedImages(pixels=np.concatenate(pieces), offsets=offsets, shapes=sides)


def num_threads() -> int:
    """How many threads decode at a time."""
    return min(os.cpu_count() or 1, 16)
