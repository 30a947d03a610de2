"""Limits that are checked before anything is allocated, and the error for a file that cannot be used."""

import os
from dataclasses import dataclass

import numpy as np

from mae.errors import MAEError, UsageError

MAX_PIXELS = 64 * 1024 * 1024
MAX_SIDE = 16384
MAX_BYTES = 512 * 1024 * 1024
MAX_ASPECT = 100
"""Longer side over shorter side: panoramas and spectrograms are far below, and crops of a strip would show nothing."""

_WORKERS_A_CORE = 16
_MOST_WORKERS = 64
"""Allowed on any machine: waiting for slow storage takes no core."""


class UnreadableImage(MAEError):
    """One image that cannot be used; the message names the file, what was found and what was expected."""


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """What an image is once decoded, with its EXIF orientation applied.

    Attributes:
        height: in pixels.
        width: in pixels.
        channels: how many.
        dtype: uint8, uint16 or float32.
        names: of the channels in order; None where nothing names them.
        own_names: whether the names are in the file itself, so that another file's may differ.
        nodata: the value that means nodata according to the file, as text; None where it names none.
        alpha: whether one more band is taken as alpha and composited away.
        more_pages: whether the file holds further images of the same size, which are not read.
    """

    height: int
    width: int
    channels: int
    dtype: np.dtype
    names: tuple[str, ...] | None = None
    own_names: bool = False
    nodata: str | None = None
    alpha: bool = False
    more_pages: bool = False

    @property
    def num_bytes(self) -> int:
        """Size of the decoded pixels."""
        return self.height * self.width * self.channels * self.dtype.itemsize


def check_size(info: ImageInfo, *, name: str) -> None:
    """Refuses an image of an implausible size.

    Raises:
        UnreadableImage: an empty image, or a side, aspect ratio, number of pixels or decoded size over the limits.
    """
    size = f"{name} is {info.width} x {info.height} pixels"
    if min(info.height, info.width, info.channels) < 1:
        raise UnreadableImage(f"{size}; expected at least 1 x 1")
    if max(info.height, info.width) > MAX_SIDE:
        raise UnreadableImage(f"{size}; a side may have {MAX_SIDE} at most")
    if max(info.height, info.width) > MAX_ASPECT * min(info.height, info.width):
        raise UnreadableImage(f"{size}; the longer side may be {MAX_ASPECT} times the shorter at most")
    if info.height * info.width > MAX_PIXELS:
        raise UnreadableImage(f"{size}; an image may have {MAX_PIXELS:,} pixels at most")
    if info.num_bytes > MAX_BYTES:
        raise UnreadableImage(
            f"{size} with {info.channels} channels of {info.dtype}, {info.num_bytes >> 20} MiB decoded; "
            f"expected {MAX_BYTES >> 20} MiB at most"
        )


def check_num_bytes(num_bytes: int, *, name: str) -> None:
    """Refuses a file by its size before it is read.

    Raises:
        UnreadableImage: empty, or larger than the limit.
    """
    if num_bytes == 0:
        raise UnreadableImage(f"{name} is empty; expected an image")
    if num_bytes > MAX_BYTES:
        raise UnreadableImage(f"{name} has {num_bytes >> 20} MiB; expected {MAX_BYTES >> 20} MiB at most")


def check_workers(workers: int | None) -> None:
    """Refuses more worker processes than the machine could use: each takes memory.

    Raises:
        UsageError: more than 16 per core and more than 64.
    """
    most = max(_MOST_WORKERS, _WORKERS_A_CORE * (os.cpu_count() or 1))
    if workers is not None and workers > most:
        raise UsageError(
            f"--workers is {workers}; expected {most} at most on this machine: each is a process with its own memory"
        )


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Applies an EXIF or TIFF orientation (1 to 8) to `[H, W, C]` pixels; other values change nothing."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels
