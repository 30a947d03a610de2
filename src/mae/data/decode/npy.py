"""NPY: an array in NumPy's file format as an image; only plain numbers are read, nothing is ever unpickled.

NumPy reads the header; the values are a view of the bytes, since from memory `np.load` takes eight times as long.
"""

import io
from functools import lru_cache
from math import prod

import numpy as np
from numpy.lib import format as npy

from mae.data.decode.limits import ImageInfo, UnreadableImage, check_size

MAGIC = b"\x93NUMPY"

_MAX_HEADER = 10_000  # characters; NumPy's own limit
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def info(data: bytes, *, name: str) -> ImageInfo:
    """What `read` would give, from the header alone.

    Raises:
        UnreadableImage: see `read`.
    """
    return _header(data, name)[0]


def read(data: bytes, *, name: str, stored: bool = False) -> np.ndarray:
    """The pixels `[H, W, C]`, uint8, uint16 or float32 (signed, wider and floating-point numbers).

    An array of two axes has one channel. Of three axes the channels are the first or the last: the one that differs
    where the other two are equal, as in a square image; else the shorter one; the last on a tie.

    Args:
        data: the file's content.
        name: the file's name for messages.
        stored: whether true is 1, as in a mask; otherwise it is white, 255.

    Raises:
        UnreadableImage: another dtype or number of axes, a size over the limits, or a file that ends early.
    """
    described, shape, is_fortran, dtype, start = _header(data, name)
    count = prod(shape)
    needed = count * dtype.itemsize
    if len(data) - start < needed:
        raise UnreadableImage(f"{name} is not a whole NPY image: {len(data) - start:,} of {needed:,} bytes are present")
    values = np.frombuffer(data, dtype, count=count, offset=start)
    values = values.reshape(shape, order="F" if is_fortran else "C")
    if len(shape) == 2:
        values = values[..., None]
    elif _channels_first(shape):
        values = np.moveaxis(values, 0, 2)
    if dtype.kind == "b":
        values = values.astype(np.uint8) * np.uint8(1 if stored else 255)
    if values.dtype != described.dtype:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused as such
            values = values.astype(described.dtype)
    return np.ascontiguousarray(values)


def _header(data: bytes, name: str) -> tuple[ImageInfo, tuple[int, ...], bool, np.dtype, int]:
    """What the image is, the array's shape, order and dtype, and the offset of its values."""
    version = npy.read_magic(io.BytesIO(data[: npy.MAGIC_LEN]))
    if version not in _HEADERS:  # 3.0 is for named fields
        raise UnreadableImage(f"{name} is NPY of version {version[0]}.{version[1]}; expected 1.0 or 2.0")
    lengths_end = npy.MAGIC_LEN + 2 * version[0]
    start = lengths_end + int.from_bytes(data[npy.MAGIC_LEN : lengths_end], "little")
    shape, is_fortran, dtype = _parsed(version, data[npy.MAGIC_LEN : min(start, _MAX_HEADER + 64)])
    if dtype.kind not in "buif":
        raise UnreadableImage(f"{name} holds {dtype} values; expected real numbers")
    if len(shape) not in (2, 3) or min(shape) < 1:
        raise UnreadableImage(
            f"{name} is an array of shape {list(shape)}; expected [height, width], or channels as a third axis; "
            "remove it if it is not an image"
        )
    height, width, channels = _as_image(shape)
    narrow = dtype.kind in "bu" and dtype.itemsize <= 2
    kind = np.dtype(("u1", "u2")[dtype.itemsize - 1] if narrow else "f4")
    described = ImageInfo(height=height, width=width, channels=channels, dtype=kind)
    check_size(described, name=name)
    return described, shape, is_fortran, dtype, start


@lru_cache(maxsize=64)  # the images of a pack have few headers, and reading one takes longer than a small image
def _parsed(version: tuple[int, int], header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype by a header, from its length on."""
    return _HEADERS[version](io.BytesIO(header), max_header_size=_MAX_HEADER)


def _as_image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Height, width and channels."""
    if len(shape) == 2:
        return shape[0], shape[1], 1
    return (shape[1], shape[2], shape[0]) if _channels_first(shape) else (shape[0], shape[1], shape[2])


def _channels_first(shape: tuple[int, ...]) -> bool:
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return middle == last
    return first < last
