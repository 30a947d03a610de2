"""JPEGs by torchcodec, where it is installed: the very pixels that Pillow gives, in three quarters of the time.

Whatever is out of the ordinary is left to Pillow, so that what counts as a whole image does not depend on what is
installed.
"""

import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

import numpy as np
from torch import Tensor

_END = b"\xff\xd9"
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SCAN, _EXIF, _SEQUENTIAL = 0xDA, 0xE1, (0xC0, 0xC1)
_SCAN_MARKER = b"\xff\xda"
_FRAME = struct.Struct(">2xBHHB")  # length, precision, height, width, channels


def plain_size(data: bytes, *, most_scans: int) -> tuple[int, int, int] | None:
    """Width, height and channels of a JPEG with nothing out of the ordinary in its header, nor EXIF; else None.

    Args:
        data: the file.
        most_scans: passes over the pixels that are ordinary.
    """
    segments = list(_segments(data))
    frames = [(kind, at) for kind, at in segments if kind in _FRAMES]
    if len(frames) != 1 or segments[-1][0] != _SCAN or any(kind == _EXIF for kind, _ in segments):
        return None
    (kind, at), scan = frames[0], segments[-1][1]
    precision, height, width, channels = _FRAME.unpack_from(data, at)
    if precision != 8 or channels not in (1, 3):
        return None
    # One that goes over all channels is the only scan of a sequential frame; to count others takes time.
    if (kind not in _SEQUENTIAL or data[scan + 2] != channels) and data.count(_SCAN_MARKER) > most_scans:
        return None
    return width, height, channels


def decode_jpeg(data: bytes, *, channels: int) -> np.ndarray | None:
    """The pixels `[H, W, channels]` of a plain JPEG, uint8; None where they must be decoded by Pillow."""
    decode = _decoder()
    # Pillow refuses a file that ends too early, where the library fills what is missing with grey.
    if decode is None or not data.endswith(_END):
        return None
    try:
        pixels = decode(data, mode="GRAY" if channels == 1 else "RGB")
    except (RuntimeError, ValueError):  # Pillow tells what is wrong with it
        return None
    return pixels.permute(1, 2, 0).numpy()


def has_fast_decoder() -> bool:
    """Whether torchcodec is there and can be used."""
    return _decoder() is not None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Kind of each segment up to the first scan, and where its length stands (ITU-T T.81, annex B)."""
    at = 2
    while (marker := _MARKER.search(data, at)) and marker.end() + _FRAME.size < len(data):
        yield marker[0][1], marker.end()
        if marker[0][1] == _SCAN:
            return
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


@cache
def _decoder() -> Callable[..., Tensor] | None:
    try:
        from torchcodec.decoders import decode_jpeg as decode
    except (ImportError, OSError, RuntimeError):  # not installed, or made for another PyTorch
        return None
    return cast(Callable[..., Tensor], decode)
