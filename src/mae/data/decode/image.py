"""Decodes image files safely: formats are recognised by content, sizes are checked before decoding.

The format is decided by the first bytes, never by the file's name, and only six formats are ever tried. Pillow's
format classes are called directly rather than through `Image.open`: that only reads the header, so this module's
own limits decide, and Pillow's global limit with its warning is neither needed nor touched.
"""

import io
import re
from collections.abc import Callable
from functools import partial
from math import gcd
from typing import NamedTuple, TypeVar

import numpy as np
from PIL import Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mae.data.decode import npy, png, tiff
from mae.data.decode.jpeg import decode_jpeg, has_fast_decoder, plain_size
from mae.data.decode.limits import ImageInfo, UnreadableImage, check_num_bytes, check_size, upright

HEADER_BYTES = 16
"""How much of a file `recognise` needs to see."""

EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".npy")
"""What names of image files end in; files are listed by these and then recognised by their content."""
UNREAD_EXTENSIONS = (
    ".gif", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".j2k", ".psd", ".exr", ".hdr", ".pgm", ".ppm", ".tga",
    ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".dcm", ".nii", ".czi", ".nd2", ".lif", ".svs",
    ".apng", ".svg", ".npz", ".mp4", ".mov", ".avi", ".mkv", ".webm",
)  # fmt: skip
"""Of images and videos in formats that are not read: a source says how many it leaves out."""

MAX_REDUCTION = 8
"""How many times smaller libjpeg decodes at most: one pixel of each block's 8 x 8."""

_OPENERS: dict[str, type[ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WebP": WebPImageFile,
    "TIFF": TiffImageFile,
    "BMP": BmpImageFile,
}
_TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION = 274
_BAND_PIXELS = 1 << 22  # converted at a time: a whole image would take several times its memory
_GREY = ("1", "L", "LA", "La")  # modes of Pillow's, with alpha and without
_MAX_SCANS = 100  # of a JPEG; ten are usual, and each costs time for all pixels
_MAX_RUN_LENGTHS = 16 << 20  # bytes and pixels of an RLE BMP, which Pillow decodes in Python
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
_T = TypeVar("_T")
_UINT8, _UINT16, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32)


def recognise(head: bytes, *, name: str) -> str:
    """The format of a file that starts with `head`: JPEG, PNG, WebP, TIFF, BMP or NPY.

    Raises:
        UnreadableImage: none of them.
    """
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WebP"
    if head[:4] in _TIFF_MAGIC:
        return "TIFF"
    if head.startswith(b"BM"):
        return "BMP"
    if head.startswith(npy.MAGIC):
        return "NPY"
    raise UnreadableImage(f"{name} starts with {head[:8]!r}; expected a JPEG, PNG, WebP, TIFF, BMP or NPY image")


class Reducible(NamedTuple):
    """An upright image that libjpeg can decode at a reduced scale.

    Attributes:
        height: of the whole image.
        width: of the whole image.
        most: how many times smaller it may be at most: 1, 2, 4 or 8.
    """

    height: int
    width: int
    most: int


def reducible(data: bytes, *, name: str) -> Reducible | None:
    """What is known of a grey or RGB JPEG from its header; None for every other image.

    Raises:
        UnreadableImage: see `probe`.
    """
    return _guarded(_reducible, data, name)


def decode(data: bytes, *, name: str, bands: int | None = None, reduction: int = 1) -> np.ndarray:
    """The pixels of an image file's first frame, `[H, W, C]`, upright.

    C is 1 for grey, 3 for colour (also for palette, CMYK, YCbCr and LAB) and n for a TIFF or NPY of n bands; alpha is
    composited over white. Values are uint8, uint16 (PNG, TIFF and NPY of 16 bits) or float32 (raw values of signed and
    32-bit integers and floats, which may be NaN or infinite).

    Args:
        data: the file's content.
        name: the file's name for messages.
        bands: the number of channels wanted; alpha that makes up this number is kept as a channel, not composited.
            Rasters often label their fourth band alpha.
        reduction: for a `reducible` image up to its `most`: `[ceil(H / reduction), ceil(W / reduction), C]`, each pixel
            for `reduction` x `reduction` of the whole image's, from the low frequencies of its 8 x 8 blocks.

    Raises:
        UnreadableImage: another format, a size over the limits, truncated or broken.
    """
    return _guarded(partial(_decode, bands=bands, reduction=reduction), data, name)


def pixels_of(image: Image.Image, *, bands: int | None = None) -> np.ndarray:
    """The pixels of an image that Pillow has opened, as `decode` gives those of its file.

    Of a PNG of 16 bits Pillow has kept 8 where it has colours or alpha.
    """
    image.load()
    keep_alpha = _keeps_alpha(image, bands)
    # After loading: a PNG of Pillow's may carry its EXIF behind its pixels, and a TIFF is turned upright by then.
    return np.ascontiguousarray(upright(_pixels(image, keep_alpha=keep_alpha), _orientation(image)))


def decode_mask(data: bytes, *, name: str) -> np.ndarray:
    """The values of a segmentation mask as its file has them, upright: numbers `[H, W]`, or colours `[H, W, 3]`.

    Of a palette the numbers are given, not its colours; nothing is scaled or inverted, and alpha is left out. Values
    are uint8 or uint16.

    Args:
        data: the file's content.
        name: the file's name for messages.

    Raises:
        UnreadableImage: see `decode`; compression that changes numbers, as JPEG's; several pages; or values that are no
            such integers.
    """
    return _guarded(_decode_mask, data, name)


def probe(data: bytes, *, name: str, bands: int | None = None) -> ImageInfo:
    """What `decode` would give, from the header alone.

    Raises:
        UnreadableImage: another format, a size over the limits, or a broken header.
    """
    return _guarded(partial(_probe, bands=bands), data, name)


def orientation(data: bytes, *, name: str) -> int:
    """How the EXIF data of an image say to turn it: 1 as it is, 2 to 4 mirrored or upside down, 5 to 8 on its side.

    Raises:
        UnreadableImage: another format, a size over the limits, or a broken header.
    """
    return _guarded(_orientation_of, data, name)


def conform(image: np.ndarray, *, channels: int, dtype: np.dtype, name: str) -> np.ndarray:
    """An image `[H, W, C]` converted to its data set's channels and type, `[H, W, channels]`.

    Grey becomes colour by replication, colour becomes grey by ITU-R 601 luma; uint8 becomes uint16 by 257 (255 is
    65535), uint16 becomes uint8 by its high byte.

    Raises:
        UnreadableImage: another number of channels, or integers mixed with raw float values.
    """
    return _with_dtype(_with_channels(image, channels, name), np.dtype(dtype), name)


def _with_channels(image: np.ndarray, channels: int, name: str) -> np.ndarray:
    found = image.shape[2]
    if found == channels:
        return image
    if (found, channels) == (1, 3):
        return np.repeat(image, 3, axis=2)
    if (found, channels) == (3, 1):
        luma: np.ndarray = image @ np.array([[0.299], [0.587], [0.114]])
        rounded: np.ndarray = luma if image.dtype.kind == "f" else np.rint(luma)
        return rounded.astype(image.dtype)
    raise UnreadableImage(
        f"{name} has {found} channels; expected {channels}, those of the model, of --in-chans or of most files"
    )


def _with_dtype(image: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    if image.dtype == dtype:
        return image
    if (image.dtype, dtype) == (_UINT8, _UINT16):
        return image.astype(np.uint16) * np.uint16(257)
    if (image.dtype, dtype) == (_UINT16, _UINT8):
        return (image >> 8).astype(np.uint8)
    raise UnreadableImage(
        f"{name} is read as {image.dtype}, the data set as {dtype}; raw values, floating-point numbers and signed "
        "integers, have no scale that others could be converted to: use files of one kind"
    )


def _guarded(read: Callable[[bytes, str], _T], data: bytes, name: str) -> _T:
    """Runs a reader and turns whatever its decoder raises into `UnreadableImage`."""
    check_num_bytes(len(data), name=name)
    kind = recognise(data[:HEADER_BYTES], name=name)
    try:
        return read(data, name)
    except UnreadableImage:
        raise
    except MemoryError as error:
        raise UnreadableImage(f"{name} needs more memory to decode than is available") from error
    # Decoders raise OSError, SyntaxError, struct.error, zlib.error and more; every one means a broken file.
    except Exception as error:
        raise UnreadableImage(f"{name} is not a whole {kind} image: {error or type(error).__name__}") from error


def _decode(data: bytes, name: str, *, bands: int | None, reduction: int = 1) -> np.ndarray:
    kind = recognise(data[:HEADER_BYTES], name=name)
    if kind == "JPEG" and reduction == 1 and (pixels := _plain_jpeg(data, name)) is not None:
        return pixels
    if kind == "NPY":
        return npy.read(data, name=name)
    if kind == "TIFF":
        with tiff.first_page(data, name=name) as page:
            if not tiff.pillow_is_faithful(page, bands=bands):
                return tiff.read(page, data=data, name=name, bands=bands)
    if png.deep_channels(data):
        pixels = _read_deep_png(data, name)
        return pixels if pixels.shape[2] in (3, bands) else tiff.over_white(pixels, white=65535, premultiplied=False)
    with _opened(data, name=name, bands=bands) as image:
        _check_work(image, data, name=name)
        if reduction > 1:
            image.draft(None, (image.width // reduction, image.height // reduction))
        return pixels_of(image, bands=bands)


def _read_deep_png(data: bytes, name: str) -> np.ndarray:
    with _opened(data, name=name, bands=None) as image:
        return np.ascontiguousarray(upright(png.read_deep(data), _orientation(image)))


def _decode_mask(data: bytes, name: str) -> np.ndarray:
    kind = recognise(data[:HEADER_BYTES], name=name)
    if kind == "WebP" and _is_lossy_webp(data):
        kind = "lossy WebP"
    if kind in ("JPEG", "lossy WebP"):
        raise UnreadableImage(f"{name} is a {kind}, whose compression changes the numbers of classes; expected a PNG")
    if kind == "NPY":
        pixels = npy.read(data, name=name, stored=True)
    elif kind == "TIFF":
        pixels = _tiff_mask(data, name)
    elif deep := png.deep_channels(data):
        pixels = _read_deep_png(data, name)[:, :, : 1 if deep == 2 else 3]
    else:
        pixels = _stored(data, name, bits=data[png.BITS] if kind == "PNG" else 8)
    if pixels.shape[2] not in (1, 3):
        raise UnreadableImage(
            f"{name} holds {pixels.shape[2]} channels; expected the numbers of classes in one, or colours in three"
        )
    if pixels.dtype.kind in "if":
        with np.errstate(invalid="ignore"):
            whole = pixels.astype(np.uint16)
        if not (pixels == whole).all():
            odd = pixels[pixels != whole]
            raise UnreadableImage(
                f"{name} holds {odd[0]:g}; expected whole numbers of classes from 0 to 65,535: save what is no class "
                "as 255, which does not count"
            )
        pixels = whole
    return np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _tiff_mask(data: bytes, name: str) -> np.ndarray:
    with tiff.first_page(data, name=name) as page:
        if not tiff.is_lossless(page):
            raise UnreadableImage(
                f"{name} is compressed with {tiff.compression_of(page)}, which changes the numbers of classes; save it "
                "without, or as a PNG"
            )
        if tiff.info(page, name=name).more_pages:
            raise UnreadableImage(
                f"{name} holds several pages, as of a page for each class; expected one with the number of each "
                "pixel's class"
            )
        if not tiff.pillow_is_faithful(page, bands=None):
            return tiff.read(page, data=data, name=name, bands=None, stored=True)
        bits, inverted = page.bitspersample, tiff.is_inverted(page)
    pixels = _stored(data, name, bits=bits)
    return np.array((1 << bits) - 1, dtype=np.uint8) - pixels if inverted else pixels  # as Pillow turned them


def _stored(data: bytes, name: str, *, bits: int) -> np.ndarray:
    """The values of a file that Pillow opens, upright: the numbers of a palette, grey, or colours."""
    with _opened(data, name=name, bands=None) as image:
        _check_work(image, data, name=name)
        image.load()
        numbers = image.mode in ("1", "L", "P", "F") or image.mode.startswith("I")
        grey = image.mode in ("LA", "La", "PA")  # of whose bands the first is the number
        pixels = np.array(image if numbers else image.getchannel(0) if grey else image.convert("RGB"))
        pixels = upright(pixels.reshape(*pixels.shape[:2], -1), _orientation(image))
        scaled = tiff.SCALED_BY.get(bits, 1) if image.mode == "L" else 1
    return pixels.astype(np.uint8) if pixels.dtype.kind == "b" else pixels // scaled


def _reducible(data: bytes, name: str) -> Reducible | None:
    if recognise(data[:HEADER_BYTES], name=name) != "JPEG":
        return None
    if (size := plain_size(data, most_scans=_MAX_SCANS)) is not None:
        width, height, _ = size
        return Reducible(height, width, MAX_REDUCTION)
    with _opened(data, name=name, bands=None) as image:
        info, turned = _info(image, None), _orientation(image) > 1
    # Turning may bring to the front the last pixel, which stands for fewer of the whole image's.
    most = gcd(info.height, info.width, MAX_REDUCTION) if turned else MAX_REDUCTION
    return Reducible(info.height, info.width, most) if image.mode in ("L", "RGB") else None


def _plain_jpeg(data: bytes, name: str) -> np.ndarray | None:
    """The pixels by the fast decoder; None where Pillow must decode."""
    if not has_fast_decoder() or (size := plain_size(data, most_scans=_MAX_SCANS)) is None:
        return None
    width, height, channels = size
    check_size(ImageInfo(height=height, width=width, channels=channels, dtype=_UINT8), name=name)
    return decode_jpeg(data, channels=channels)


def _probe(data: bytes, name: str, *, bands: int | None) -> ImageInfo:
    kind = recognise(data[:HEADER_BYTES], name=name)
    if kind == "NPY":
        return npy.info(data, name=name)
    if kind == "TIFF":
        with tiff.first_page(data, name=name) as page:
            return tiff.info(page, name=name, bands=bands)
    with _opened(data, name=name, bands=bands) as image:
        return _info(image, bands, deep=png.deep_channels(data))


def _opened(data: bytes, *, name: str, bands: int | None) -> ImageFile:
    """The image with only its header read, its size checked."""
    kind = recognise(data[:HEADER_BYTES], name=name)
    if kind == "WebP":
        # Its decoder allocates the whole canvas on opening, so the size must be known before.
        width, height = _webp_canvas(data[:30], name)
        check_size(ImageInfo(height=height, width=width, channels=4, dtype=_UINT8), name=name)
    image = _OPENERS[kind](io.BytesIO(data))
    if kind == "PNG" and "exif" not in image.info and (exif := _exif_behind(data)):
        image.info["exif"] = exif  # before anything asks for it: Pillow would remember that there was none
    check_size(_info(image, bands, deep=png.deep_channels(data)), name=name)
    return image


def _exif_behind(data: bytes) -> bytes | None:
    """The EXIF data of a PNG that may stand behind its pixels, where Pillow finds them only once these are decoded."""
    at = 8 if b"eXIf" in data else len(data)
    while at + 8 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == b"eXIf":
            return b"Exif\0\0" + data[at + 8 : at + 8 + length]
        at += 12 + length  # its length, kind and checksum take 4 bytes each
    return None


def _check_work(image: ImageFile, data: bytes, *, name: str) -> None:
    """Refuses small files that would take minutes to decode."""
    # Other data may hold the two bytes by chance, so only their absence is cheap to detect.
    if isinstance(image, JpegImageFile) and data.count(b"\xff\xda") > _MAX_SCANS:
        if (scans := _num_scans(data)) > _MAX_SCANS:
            raise UnreadableImage(f"{name} is a JPEG of {scans:,} scans; expected {_MAX_SCANS} at most")
    if isinstance(image, BmpImageFile) and image.tile[0].codec_name == "bmp_rle":
        if max(len(data), image.width * image.height) > _MAX_RUN_LENGTHS:
            raise UnreadableImage(
                f"{name} is a run-length encoded BMP of over {_MAX_RUN_LENGTHS >> 20} MiB or million pixels; save "
                "it uncompressed or as PNG"
            )


def _num_scans(data: bytes) -> int:
    """The number of scans in a JPEG's first frame (ITU-T T.81, annex B)."""
    scans, at = 0, 2
    while (marker := _MARKER.search(data, at)) and marker[0] != b"\xff\xd9":
        scans += marker[0] == b"\xff\xda"
        at = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return scans


def _webp_canvas(head: bytes, name: str) -> tuple[int, int]:
    """Width and height in a WebP's first chunk (RFC 9649, section 2)."""
    chunk = head[12:16]
    if chunk == b"VP8X" and len(head) == 30:
        return int.from_bytes(head[24:27], "little") + 1, int.from_bytes(head[27:30], "little") + 1
    if chunk == b"VP8L" and len(head) >= 25:
        packed = int.from_bytes(head[21:25], "little")
        return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1
    if chunk == b"VP8 " and len(head) == 30:
        return int.from_bytes(head[26:28], "little") & 0x3FFF, int.from_bytes(head[28:30], "little") & 0x3FFF
    raise UnreadableImage(f"{name} is not a whole WebP image: no size in its header")


def _is_lossy_webp(data: bytes) -> bool:
    """Whether a WebP's first frame is compressed with loss (RFC 9649, sections 2.5 to 2.7)."""
    at = 12
    while (chunk := data[at : at + 4]) not in (b"VP8 ", b"VP8L", b""):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + (16 if chunk == b"ANMF" else length + length % 2)  # a frame's own chunks stand behind 16 bytes
    return chunk == b"VP8 "


def _info(image: ImageFile, bands: int | None, *, deep: int = 0) -> ImageInfo:
    """What an opened image is once decoded; `deep` is what `deep_channels` says of its file."""
    width, height = image.size
    if _orientation(image) >= 5:
        height, width = width, height
    if deep:
        found = 4 if deep == 3 and image.has_transparency_data else deep
        alpha = found not in (3, bands)
        return ImageInfo(height=height, width=width, channels=found - alpha, dtype=_UINT16, alpha=alpha)
    if image.mode.startswith("I;16"):
        return ImageInfo(height=height, width=width, channels=1, dtype=_UINT16)
    if image.mode in ("I", "F"):
        return ImageInfo(height=height, width=width, channels=1, dtype=_FLOAT32)
    channels, kept = 1 if image.mode in _GREY else 3, _keeps_alpha(image, bands)
    alpha = image.has_transparency_data and not kept
    return ImageInfo(height=height, width=width, channels=channels + kept, dtype=_UINT8, alpha=alpha)


def _keeps_alpha(image: Image.Image, bands: int | None) -> bool:
    return image.has_transparency_data and bands == (2 if image.mode in _GREY else 4)


def _orientation_of(data: bytes, name: str) -> int:
    if recognise(data[:HEADER_BYTES], name=name) not in ("JPEG", "PNG", "WebP"):
        return 1
    with _opened(data, name=name, bands=None) as image:
        return _orientation(image)


def _orientation(image: Image.Image) -> int:
    try:
        # The base class reads what is known; PNG's own method would decode the pixels to look behind them.
        return int(Image.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:
        return 1  # EXIF is often broken in otherwise sound photographs


def _pixels(image: Image.Image, *, keep_alpha: bool) -> np.ndarray:
    rows = max(1, _BAND_PIXELS // image.width)
    if image.height <= rows:
        return _converted(image, keep_alpha=keep_alpha)
    first = _converted(image.crop((0, 0, image.width, rows)), keep_alpha=keep_alpha)
    pixels = np.empty((image.height, *first.shape[1:]), first.dtype)
    pixels[:rows] = first
    for top in range(rows, image.height, rows):
        below = min(top + rows, image.height)
        pixels[top:below] = _converted(image.crop((0, top, image.width, below)), keep_alpha=keep_alpha)
    return pixels


def _converted(image: Image.Image, *, keep_alpha: bool) -> np.ndarray:
    mode = image.mode
    if mode.startswith("I;16"):
        pixels = np.array(image).astype(np.uint16)
    elif mode in ("I", "F"):
        pixels = np.array(image).astype(np.float32)
    elif image.has_transparency_data and keep_alpha:
        pixels = np.array(image.convert("LA" if mode in _GREY else "RGBA"))
    elif image.has_transparency_data:
        colour = (image.convert("LA") if mode == "La" else image).convert("RGBA")  # Pillow has no way from La
        shown = Image.alpha_composite(Image.new("RGBA", image.size, "white"), colour).convert("RGB")
        pixels = np.array(shown.getchannel(0) if mode in _GREY else shown)
    elif mode in ("1", "L"):
        pixels = np.array(image.convert("L"))
    else:
        pixels = np.array(image.convert("RGB"))
    return pixels.reshape(image.height, image.width, -1)
