"""How `mae pack` encodes an image: as a JPEG of a given short side, as its original file, or as decoded pixels."""

import io
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.lib import format as npy_format
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from mae.data.decode import npy
from mae.data.decode.image import HEADER_BYTES, recognise
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.worker import one_thread
from mae.errors import UsageError
from mae.modalities.images.crop import resize

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WebP": "webp", "TIFF": "tif", "BMP": "bmp", "NPY": "npy"}
_ORIENTATION = 274
_UINT8, _UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)


@dataclass(frozen=True, kw_only=True, eq=False)
class Original:
    """An image to be packed.

    Attributes:
        name: for messages.
        image: its pixels `[H, W, C]`, upright.
        data: the content of its file; None where it has none.
        nodata: the value that means nodata in the file, as text.
    """

    name: str
    image: np.ndarray
    data: bytes | None
    nodata: str | None


class Packed(NamedTuple):
    """An image as it goes into a pack: the file, its extension, and the shape of its pixels after orientation."""

    data: bytes
    extension: str
    shape: tuple[int, ...]
    dtype: np.dtype


class PackForm(Protocol):
    """How images are encoded: `ShortSide`, `Kept` or `Raw`."""

    def pack(self, original: Original) -> Packed:
        """Encodes an image; raises `UsageError` if none of its kind fits, `UnreadableImage` if this one does not."""
        ...

    def to_json(self) -> dict[str, str | int]:
        """The options, for `pack.json`."""
        ...


_QUALITY = 90


@dataclass(frozen=True, kw_only=True)
class ShortSide:
    """JPEG (4:2:0) whose shorter side has at most `side` pixels.

    Attributes:
        side: in pixels.
        quality: every image is encoded anew at this quality, 1 to 100; None: an RGB or grey JPEG that is upright and
            small enough keeps its bytes, and the others are encoded at 90.
    """

    side: int = 384
    quality: int | None = None

    def __post_init__(self) -> None:
        """Refuses impossible sizes and qualities.

        Raises:
            UsageError: a side below 1, or a quality outside 1 to 100.
        """
        _check_side("--short-side", self.side)
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UsageError(f"--quality is {self.quality}; expected 1 to 100")

    def to_json(self) -> dict[str, str | int]:
        """See `PackForm`."""
        told: dict[str, str | int] = {"kind": "jpeg", "short_side": self.side, "quality": self.quality or _QUALITY}
        return told if self.quality is None else {**told, "encoded": "all"}

    def pack(self, original: Original) -> Packed:
        """See `PackForm`."""
        image = original.image
        if image.dtype != _UINT8 or image.shape[2] not in (1, 3):
            raise UsageError(
                f"{original.name} has {image.shape[2]} channels of {image.dtype}; a JPEG holds 1 or 3 of uint8: use "
                "--keep for the files as they are, or --raw for their pixels"
            )
        keeps = self.quality is None and min(image.shape[:2]) <= self.side
        if keeps and original.data is not None and _is_plain_jpeg(original.data):
            return Packed(original.data, "jpg", image.shape, image.dtype)
        _check_nodata(original, "JPEG's loss")
        pixels = _scaled(original, self.side)
        stream = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(
            stream, "JPEG", quality=self.quality or _QUALITY
        )
        return Packed(stream.getvalue(), "jpg", pixels.shape, pixels.dtype)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The original file; an image without one becomes PNG, or NPY where PNG could not hold it."""

    def to_json(self) -> dict[str, str | int]:
        """See `PackForm`."""
        return {"kind": "keep"}

    def pack(self, original: Original) -> Packed:
        """See `PackForm`."""
        image, data = original.image, original.data
        if data is not None:
            kind = recognise(data[:HEADER_BYTES], name=original.name)
            return Packed(data, _EXTENSIONS[kind], image.shape, image.dtype)
        if (image.dtype, image.shape[2]) not in ((_UINT8, 1), (_UINT8, 3), (_UINT16, 1)):
            return _as_npy(original, image)
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(image.squeeze(2) if image.shape[2] == 1 else image)).save(stream, "PNG")
        return Packed(stream.getvalue(), "png", image.shape, image.dtype)


@dataclass(frozen=True, kw_only=True)
class Raw:
    """Decoded pixels whose shorter side has at most `side` pixels, as NPY: larger, with nothing to decode."""

    side: int = 256

    def __post_init__(self) -> None:
        """Refuses impossible sizes.

        Raises:
            UsageError: a side below 1.
        """
        _check_side("--raw", self.side)

    def to_json(self) -> dict[str, str | int]:
        """See `PackForm`."""
        return {"kind": "raw", "short_side": self.side}

    def pack(self, original: Original) -> Packed:
        """See `PackForm`."""
        return _as_npy(original, _scaled(original, self.side))


def _check_side(option: str, side: int) -> None:
    if side < 1:
        raise UsageError(f"{option} is {side}; expected 1 or more pixels")


def _is_plain_jpeg(data: bytes) -> bool:
    """Whether the file can be kept without losing or rotating anything."""
    if recognise(data[:HEADER_BYTES], name="") != "JPEG":
        return False
    image = JpegImageFile(io.BytesIO(data))
    try:
        turned = int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        turned = 1  # EXIF is often broken in otherwise sound photographs, which are then not rotated
    return image.mode in ("L", "RGB") and turned not in range(2, 9)


def _scaled(original: Original, side: int) -> np.ndarray:
    """The pixels with the shorter side scaled down to `side`, antialiased bicubic; the type is kept."""
    image: np.ndarray = original.image
    height, width = image.shape[:2]
    short = min(height, width)
    if short <= side:
        return image
    _check_nodata(original, "scaling")
    size = side * height // short, side * width // short
    pixels = torch.from_numpy(np.array(image.astype(np.float32) if image.dtype == _UINT16 else image)).permute(2, 0, 1)
    with one_thread():
        scaled = resize(pixels, size)
    if image.dtype == _UINT16:
        scaled = scaled.round().clamp(0, 65535)
    return np.ascontiguousarray(scaled.permute(1, 2, 0).numpy().astype(image.dtype))


def _check_nodata(original: Original, what: str) -> None:
    if original.nodata is not None:
        raise UsageError(
            f"{original.name} marks {original.nodata} as nodata; {what} would mix it with measurements: use --keep"
        )


def _as_npy(original: Original, image: np.ndarray) -> Packed:
    """`[H, W]` of one channel, else `[H, W, C]` or `[C, H, W]`, whichever reads back unchanged."""
    layouts = [image[..., 0]] if image.shape[2] == 1 else [image, np.moveaxis(image, 2, 0)]
    for layout in layouts:
        stream = io.BytesIO()
        values = np.ascontiguousarray(layout, dtype=image.dtype.newbyteorder("<"))
        npy_format.write_array(stream, values, version=(1, 0), allow_pickle=False)
        info = npy.info(stream.getvalue(), name=original.name)
        if (info.height, info.width, info.channels) == image.shape:
            return Packed(stream.getvalue(), "npy", image.shape, image.dtype)
    height, width, channels = image.shape
    raise UnreadableImage(
        f"{original.name} has {channels} channels of {width} x {height} pixels; in an NPY file they could not be "
        "distinguished from the pixels' axes: use --keep"
    )
