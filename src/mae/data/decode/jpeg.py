"""JPEGs decoded by torchcodec where it is installed: the same pixels as Pillow's wheels in three quarters of the time.

Unusual files are left to Pillow, so that what counts as a whole image does not depend on what is installed. For damaged
pixel data the library writes a line to stderr where Pillow is silent.
"""

import re
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

_END = b"\xff\xd9"
_MARKER = re.compile(rb"\xff+([^\x00\xff])")
_SEQUENTIAL, _PROGRESSIVE, _SCAN, _EXIF = (0xC0, 0xC1), 0xC2, 0xDA, 0xE1
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xDA)})
_SHORTEST = {0xE0: 9, 0xEE: 9, 0xE2: 16}
"""Shortest lengths that Pillow accepts: the versions of JFIF and Adobe, the number of a colour profile's chunk."""
_FRAME = struct.Struct(">2xBHHB")  # length, precision, height, width, channels
_MOST_SEGMENTS = 300  # a colour profile may have 255 parts


def plain_size(data: bytes, *, most_scans: int) -> tuple[int, int, int] | None:
    """Width, height and channels of a JPEG with a plain header and no EXIF; else None.

    Args:
        data: the file.
        most_scans: scans that a plain JPEG may have.
    """
    frame: tuple[int, int] | None = None
    for number, (kind, at) in enumerate(_segments(data)):
        if kind == _SCAN:
            return None if frame is None else _size(data, *frame, at, most_scans)
        length = int.from_bytes(data[at : at + 2], "big")
        odd = kind == _EXIF or kind in _WITHOUT_LENGTH or length < _SHORTEST.get(kind, 2)
        if odd or number == _MOST_SEGMENTS or (kind in _FRAMES and frame is not None):
            return None
        if kind in _FRAMES:
            frame = kind, at
    return None


def decode_jpeg(data: bytes, *, channels: int) -> np.ndarray | None:
    """The pixels `[H, W, channels]` of a plain JPEG, uint8; None where Pillow must decode them."""
    decode = _decoder()
    if decode is None or not data.endswith(_END):
        return None
    # Immutable bytes raise a warning, and catching one is not safe in several threads.
    copied = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        pixels = decode(copied, mode="GRAY" if channels == 1 else "RGB")
    except (RuntimeError, ValueError):  # Pillow says what is wrong
        return None
    return pixels.permute(1, 2, 0).numpy()


def has_fast_decoder() -> bool:
    """Whether torchcodec is installed and usable."""
    return _decoder() is not None


def _segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Marker of each segment up to the first scan, and the offset of its length (ITU-T T.81, annex B)."""
    at = 2
    while (marker := _MARKER.match(data, at)) and marker.end() + _FRAME.size < len(data):
        yield marker[1][0], marker.end()
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")


def _size(data: bytes, kind: int, at: int, scan: int, most_scans: int) -> tuple[int, int, int] | None:
    precision, height, width, channels = _FRAME.unpack_from(data, at)
    if precision != 8 or channels not in (1, 3) or kind not in (*_SEQUENTIAL, _PROGRESSIVE):
        return None
    # A scan over all channels is the only one of a sequential frame; searching what follows takes time.
    several = kind == _PROGRESSIVE or data[scan + 2] != channels
    if several and (data.count(b"\xff\xda") > most_scans or data.find(b"\xff\xe1", scan) >= 0):
        return None
    return width, height, channels


@cache
def _decoder() -> Callable[..., Tensor] | None:
    try:
        from torchcodec.decoders import decode_jpeg as decode
    except (ImportError, OSError, RuntimeError):  # not installed, or built for another PyTorch
        return None
    return cast(Callable[..., Tensor], decode)
