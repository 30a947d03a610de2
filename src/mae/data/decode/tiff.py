"""TIFF: reading tags, and decoding the kinds that Pillow would change or refuse.

Only the first page of a file is read. `tifffile` is imported inside the functions, since it adds 0.1 s to every start
of the program and most data sets hold no TIFF.
"""

import html
import io
import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from mae.data.decode.limits import MAX_PIXELS, ImageInfo, UnreadableImage, check_size, upright

if TYPE_CHECKING:
    from tifffile import TiffPage

_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _SEPARATED = 0, 1, 2, 5
_CONTIGUOUS = 1
_ALPHA = (1, 2)  # premultiplied, straight
_PREMULTIPLIED = 1
_ORIENTATION = 274
_DEFLATE = (8, 32946)
_OLD_JPEG = 6
_LZW, _UNCOMPRESSED = 5, 1
_LOSSLESS = (2, 3, 4, 32773, 34925, 50000)  # CCITT's, PackBits, LZMA, Zstandard: all that Pillow reads beside those
SCALED_BY = {2: 85, 4: 17}
"""What Pillow multiplies grey samples of fewer than 8 bits by."""
_MAX_SEGMENTS = 1 << 20  # strips or tiles: each costs some microseconds
_GDAL_METADATA, _GDAL_NODATA = 42112, 42113
_SILENT = logging.NullHandler()  # keeps warnings about odd tags, one an image, off the terminal
_MAX_METADATA = 1 << 20  # characters that are searched for names
_BAND_NAME = re.compile(r'<Item name="DESCRIPTION" sample="(\d{1,4})" role="description">([^<]{1,100})</Item>')


@contextmanager
def first_page(data: bytes, *, name: str) -> Iterator["TiffPage"]:
    """The tags of a TIFF's first page, its sizes checked.

    Raises:
        UnreadableImage: sizes over the limits, or strips that are missing.
    """
    import tifffile

    tifffile.logger().addHandler(_SILENT)  # once: the same handler is not added again
    with tifffile.TiffFile(io.BytesIO(data)) as file:
        page = file.pages.first
        check_size(info(page, name=name), name=name)
        # A tile may be larger than the image, and is allocated whole.
        if page.is_tiled and page.tilewidth * page.tilelength > MAX_PIXELS:
            raise UnreadableImage(
                f"{name} has tiles of {page.tilewidth} x {page.tilelength} pixels; expected {MAX_PIXELS:,} at most"
            )
        _check_segments(page, name=name)
        yield page


def info(page: "TiffPage", *, name: str, bands: int | None = None) -> ImageInfo:
    """What the page is once decoded; alpha that makes up `bands` channels is one of them.

    Raises:
        UnreadableImage: complex numbers.
    """
    height, width = page.imagelength, page.imagewidth
    if _orientation(page) >= 5:
        height, width = width, height
    channels, dtype = _channels(page, bands), _dtype(page, name=name)
    names, nodata = _band_names(page, channels), _nodata(page)
    return ImageInfo(
        height=height,
        width=width,
        channels=channels,
        dtype=dtype,
        names=names,
        own_names=names is not None,
        nodata=nodata,
        alpha=_has_alpha(page, bands),
        more_pages=_has_more_pages(page),
    )


def pillow_is_faithful(page: "TiffPage", *, bands: int | None) -> bool:
    """Whether Pillow decodes this page without loss; it drops bits and bands of many others."""
    samples, bits, kind = page.samplesperpixel, page.bitspersample, _kind(page)
    if (samples > 1 and page.planarconfig != _CONTIGUOUS) or 0 in page.databytecounts:  # it knows no omitted strips
        return False
    if page.parent.is_bigtiff and page.parent.byteorder == ">":  # Pillow finds no tags in these
        return False
    if samples == 1:
        plain = bits in (1, 2, 4, 8) and kind in "bu"  # it refuses others below
        if (bits, kind) == (32, "f"):  # of compressed big-endian ones Pillow swaps the bytes twice
            return page.parent.byteorder == "<" or page.compression == _UNCOMPRESSED
        return plain or (bits == 16 and kind == "u" and page.photometric == _BLACK_IS_ZERO)
    if bits != 8 or kind != "u":
        return False
    colours = samples == 3 and page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO)  # else three bands
    return colours or _has_alpha(page, bands) or (samples == 4 and page.photometric == _SEPARATED)


def is_lossless(page: "TiffPage") -> bool:
    """Whether its values are those that were saved."""
    return page.compression in (*_DEFLATE, _LZW, _UNCOMPRESSED, *_LOSSLESS)


def compression_of(page: "TiffPage") -> str:
    """What the page's compression is called."""
    return str(getattr(page.compression, "name", page.compression))  # a number where tifffile knows no name


def is_inverted(page: "TiffPage") -> bool:
    """Whether 0 stands for white: readers of pictures turn the values round."""
    return page.photometric == _WHITE_IS_ZERO


def read(page: "TiffPage", *, data: bytes, name: str, bands: int | None, stored: bool = False) -> np.ndarray:
    """The page's pixels `[H, W, C]`, uint8, uint16 or float32, upright, alpha composited over white.

    Alpha that makes up `bands` channels is one of them.

    Args:
        page: its tags.
        data: the file's content.
        name: the file's name for messages.
        bands: the number of channels wanted.
        stored: whether values stay as the file has them: not inverted, and alpha is left out.

    Raises:
        UnreadableImage: a compression, colour space or layout that cannot be read, or a strip that is damaged.
    """
    _check_readable(page, name=name)
    deflated = page.compression in _DEFLATE
    pixels = _inflated(page, data=data, name=name) if deflated else page.asarray(maxworkers=1)
    if page.axes == "SYX":
        pixels = np.moveaxis(pixels, 0, 2)
    pixels = pixels.reshape(page.imagelength, page.imagewidth, -1)
    white = (1 << page.bitspersample) - 1  # the largest value, of whole numbers
    if pixels.dtype == bool:
        pixels, white = pixels.astype(np.uint8) * 255, 255
    if page.samplesperpixel == 1 and page.bitspersample in SCALED_BY and not stored:
        pixels, white = pixels * np.uint8(SCALED_BY[page.bitspersample]), 255
    if is_inverted(page) and pixels.dtype.kind == "u" and not stored:
        pixels = pixels.dtype.type(white) - pixels
    if _has_alpha(page, bands):
        premultiplied = int(page.extrasamples[0]) == _PREMULTIPLIED
        pixels = pixels[..., :-1] if stored else over_white(pixels, white=white, premultiplied=premultiplied)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, as a nodata of float64 may
        pixels = pixels.astype(_dtype(page, name=name), copy=False)
    return np.ascontiguousarray(upright(pixels, _orientation(page)))


def _check_readable(page: "TiffPage", *, name: str) -> None:
    if page.compression not in (*_DEFLATE, _LZW, _UNCOMPRESSED):
        raise UnreadableImage(
            f"{name} is a {page.bitspersample}-bit TIFF of {page.samplesperpixel} bands compressed with "
            f"{compression_of(page)}; expected no compression, deflate or LZW: convert it, for example with "
            "'gdal_translate -co COMPRESS=DEFLATE' or 'tiffcp -c zip'"
        )
    if page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB):
        raise UnreadableImage(f"{name} is a TIFF of colours {page.photometric!r}; expected grey, RGB or bands")
    if page.axes not in ("YX", "YXS", "SYX"):
        raise UnreadableImage(f"{name} is a TIFF with axes {page.axes}; expected height, width and bands")


def _check_segments(page: "TiffPage", *, name: str) -> None:
    """Refuses a page whose table of strips or tiles has gaps, which readers would silently leave black."""
    if page.compression == _OLD_JPEG:  # keeps no such table
        return
    tall, wide = (page.tilelength, page.tilewidth) if page.is_tiled else (page.rowsperstrip, page.imagewidth)
    planes = 1 if page.planarconfig == _CONTIGUOUS else page.samplesperpixel
    needed = ceil(page.imagelength / max(tall, 1)) * ceil(page.imagewidth / max(wide, 1)) * planes
    found = (len(page.dataoffsets), len(page.databytecounts))
    if found != (needed, needed):
        raise UnreadableImage(
            f"{name} lists the offsets of {found[0]:,} strips and the sizes of {found[1]:,}; expected {needed:,}"
        )
    if needed > _MAX_SEGMENTS:
        raise UnreadableImage(f"{name} has {needed:,} strips; expected {_MAX_SEGMENTS:,} at most")


def _inflated(page: "TiffPage", *, data: bytes, name: str) -> np.ndarray:
    """A deflated page's values; of a strip or tile never more is inflated than it has room for.

    tifffile alone would inflate a strip whole, so that one of 400 KB could grow to 400 MB, and each of thousands again.
    """
    assert page.dtype is not None  # `info` refused others
    room = int(np.prod(page.chunks)) * page.dtype.itemsize
    page.compression = _UNCOMPRESSED  # what `page.decode` is given below
    pixels = np.full(page.shaped, page.nodata, page.dtype)
    for index, (start, length) in enumerate(zip(page.dataoffsets, page.databytecounts, strict=True)):
        if length == 0:  # GDAL omits strips of nothing but zeros or nodata
            continue
        values, (plane, _, top, left, _), _ = page.decode(_inflate(data[start : start + length], room, name), index)
        if values is not None:
            place = pixels[plane, :, top : top + values.shape[1], left : left + values.shape[2]]
            place[...] = values[:, : place.shape[1], : place.shape[2]]
    return pixels.reshape(page.shape)


def _inflate(packed: bytes, room: int, name: str) -> bytes:
    inflater = zlib.decompressobj()
    values = inflater.decompress(packed, room + 1)  # one more, so that the end and its checksum are checked
    if len(values) <= room and not inflater.eof:
        raise UnreadableImage(f"{name} is not a whole TIFF image: a compressed strip ends early")
    return values


def _band_names(page: "TiffPage", channels: int) -> tuple[str, ...] | None:
    """GDAL's names of the bands; None unless each has a unique one."""
    text = page.tags.valueof(_GDAL_METADATA, "")
    found = dict(_BAND_NAME.findall(text[:_MAX_METADATA])) if isinstance(text, str) else {}
    names = [html.unescape(found.get(str(band), "")).strip() for band in range(channels)]
    usable = all(name and name.isprintable() and "," not in name for name in names)
    return tuple(names) if usable and len(set(names)) == channels else None


def _nodata(page: "TiffPage") -> str | None:
    text = page.tags.valueof(_GDAL_NODATA, None)
    return text.strip("\0 ")[:40] or None if isinstance(text, str) else None


def _orientation(page: "TiffPage") -> int:
    return int(page.tags.valueof(_ORIENTATION, 1))


def _kind(page: "TiffPage") -> str:
    return "" if page.dtype is None else page.dtype.kind


def _has_more_pages(page: "TiffPage") -> bool:
    """Whether another page of the same size follows, as in a stack or with a page per band, and not an overview."""
    try:
        second = page.parent.pages[1]
        form = second.keyframe
        return second.shape == page.shape and not (form is None or form.is_reduced or form.is_mask)
    except Exception:  # none, or a damaged one, which is not read
        return False


def _has_alpha(page: "TiffPage", bands: int | None) -> bool:
    samples, extra = page.samplesperpixel, page.extrasamples
    if samples not in (2, 4) or len(extra) != 1 or int(extra[0]) not in _ALPHA or _kind(page) != "u":
        return False
    # Writers label a fourth band alpha unasked; it is kept where it has another name, or all bands are wanted.
    names = _band_names(page, samples)
    return bands != samples and (names is None or "alpha" in names[-1].lower())


def _channels(page: "TiffPage", bands: int | None) -> int:
    if page.photometric not in (_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB):
        return 3  # palette, CMYK, YCbCr, LAB: Pillow makes RGB of them
    return page.samplesperpixel - _has_alpha(page, bands)


def _dtype(page: "TiffPage", *, name: str) -> np.dtype:
    kind = _kind(page)
    if kind not in tuple("buif"):
        raise UnreadableImage(f"{name} is a TIFF of {page.bitspersample}-bit {page.dtype} numbers; expected real ones")
    if kind == "b" or (kind == "u" and page.bitspersample <= 8):
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if kind == "u" and page.bitspersample <= 16 else np.float32)


def over_white(pixels: np.ndarray, *, white: int, premultiplied: bool) -> np.ndarray:
    """Unsigned integers `[H, W, C + 1]` without their last band, alpha; over white, the largest value."""
    colour, alpha = pixels[..., :-1].astype(np.float64), pixels[..., -1:] / white
    shown = (colour if premultiplied else colour * alpha) + white * (1 - alpha)
    return np.clip(np.rint(shown), 0, white).astype(pixels.dtype)
