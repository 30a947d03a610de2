"""Image files: every kind that is meant to be read, the same damaged, and those made to do harm."""

import io
import zlib
from pathlib import Path

import numpy as np
import tifffile
from hostile.corpus import Case, Verdict
from hostile.forge import bmp, chunk, grey_png, more_scans, png, resized_jpeg, strip_tiff, zeros
from PIL import Image

FLIPS = 5
"""Damaged copies of each valid image."""
LARGEST = 8192
"""Side of the largest square image that the limits allow."""
WIDE, HIGH = 24, 16
_rng = np.random.default_rng(0)
_COLOUR = _rng.integers(0, 256, (HIGH, WIDE, 3), dtype=np.uint8)
_GREY = _COLOUR[..., 0]
_DEEP = _rng.integers(0, 65536, (HIGH, WIDE, 5), dtype=np.uint16)

Made = tuple[str, bytes, Verdict, str]


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def tiff(pixels: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    tifffile.imwrite(buffer, pixels, **options)
    return buffer.getvalue()


def npy(pixels: np.ndarray, **options: object) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, pixels, **options)
    return buffer.getvalue()


def npy_of(header: str) -> bytes:
    """An NPY that says of itself what it likes."""
    return b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


def valid() -> list[Made]:
    """One of every kind, with the shape and type it must become."""
    colour, grey = Image.fromarray(_COLOUR), Image.fromarray(_GREY)
    alpha = Image.fromarray(np.dstack([_COLOUR, _GREY]))
    rgb, one = f"{WIDE}x{HIGH}x3 uint8", f"{WIDE}x{HIGH}x1 uint8"
    turned = Image.Exif()
    turned[274] = 6
    stored: dict[str, tuple[bytes, str]] = {
        "jpeg": (encoded(colour, "JPEG"), rgb),
        "jpeg progressive": (encoded(colour, "JPEG", progressive=True), rgb),
        "jpeg cmyk": (encoded(colour.convert("CMYK"), "JPEG"), rgb),
        "jpeg grey": (encoded(grey, "JPEG"), one),
        "jpeg turned by exif": (encoded(colour, "JPEG", exif=turned), f"{HIGH}x{WIDE}x3 uint8"),
        "jpeg of several pictures": (encoded(colour, "MPO", save_all=True, append_images=[colour]), rgb),
        "png": (encoded(colour, "PNG"), rgb),
        "png with alpha": (encoded(alpha, "PNG"), rgb),
        "png grey with alpha": (encoded(alpha.convert("LA"), "PNG"), one),
        "png of a palette": (encoded(colour.quantize(16), "PNG"), rgb),
        "png of a palette, one transparent": (encoded(colour.quantize(4), "PNG", transparency=1), rgb),
        "png grey, 16 bits": (encoded(Image.fromarray(_DEEP[..., 0]), "PNG"), f"{WIDE}x{HIGH}x1 uint16"),
        "png animated": (encoded(colour, "PNG", save_all=True, append_images=[colour.rotate(180)]), rgb),
        "png interlaced": (grey_png(_GREY, interlaced=True), one),
        "webp": (encoded(colour, "WEBP"), rgb),
        "webp lossless": (encoded(colour, "WEBP", lossless=True), rgb),
        "webp with alpha": (encoded(alpha, "WEBP"), rgb),
        "webp animated": (encoded(colour, "WEBP", save_all=True, append_images=[colour.rotate(180)]), rgb),
        "bmp": (encoded(colour, "BMP"), rgb),
        "bmp grey": (encoded(grey, "BMP"), one),
        "bmp of run lengths": (bmp(20, 2, b"\x14\x07\0\0\x14\x09\0\1"), "20x2x1 uint8"),
        "1 x 1": (encoded(colour.crop((0, 0, 1, 1)), "PNG"), "1x1x3 uint8"),
        "16384 x 164": (encoded(Image.new("L", (16384, 164)), "PNG"), "16384x164x1 uint8"),
        "npy": (npy(_COLOUR), rgb),
        "npy, channels first": (npy(np.moveaxis(_DEEP, 2, 0)), f"{WIDE}x{HIGH}x5 uint16"),
        "npy of wide floats": (npy(_GREY.astype(np.float64)), f"{WIDE}x{HIGH}x1 float32"),
        "largest": (png(LARGEST, LARGEST, zeros(LARGEST * (LARGEST + 1))), f"{LARGEST}x{LARGEST}x1 uint8"),
    }
    for depth in (1, 2, 4):
        stored[f"png grey, {depth} bits"] = grey_png(_GREY >> (8 - depth), depth=depth), one
    return [(name, data, "ok", why) for name, (data, why) in {**stored, **_valid_tiffs()}.items()]


def _valid_tiffs() -> dict[str, tuple[bytes, str]]:
    rgb, bands = f"{WIDE}x{HIGH}x3 uint8", f"{WIDE}x{HIGH}x5 uint16"
    many = {"photometric": "minisblack"}
    planes = np.moveaxis(_DEEP, 2, 0).copy()
    return {
        "tiff": (tiff(_COLOUR, photometric="rgb"), rgb),
        "tiff deflate": (tiff(_COLOUR, photometric="rgb", compression="zlib"), rgb),
        "tiff of two pages": (tiff(np.stack([_COLOUR, _COLOUR]), photometric="rgb"), rgb),
        "tiff 16 bits": (tiff(_DEEP[..., 0]), f"{WIDE}x{HIGH}x1 uint16"),
        "tiff 16-bit colour": (tiff(_DEEP[..., :3], photometric="rgb"), f"{WIDE}x{HIGH}x3 uint16"),
        "tiff float": (tiff(_DEEP[..., 0].astype(np.float32)), f"{WIDE}x{HIGH}x1 float32"),
        "tiff bands": (tiff(_DEEP, **many, planarconfig="contig"), bands),
        "tiff bands, deflate": (tiff(_DEEP, **many, planarconfig="contig", compression="zlib", rowsperstrip=3), bands),
        "tiff bands by planes": (tiff(planes, **many, planarconfig="separate", compression="zlib"), bands),
        "tiff bands in tiles": (tiff(_DEEP, **many, planarconfig="contig", tile=(16, 16), compression="zlib"), bands),
        "bigtiff bands": (tiff(_DEEP, **many, planarconfig="contig", bigtiff=True), bands),
        "tiff bands, other end first": (tiff(_DEEP, **many, planarconfig="contig", byteorder=">"), bands),
    }


def damaged() -> list[Made]:
    """Valid images cut off, which must be refused, and with bits turned, which may leave an image."""
    made: list[Made] = []
    for name, data, _, _ in valid():
        if name == "largest":
            continue
        for share in (0.05, 0.3, 0.6):
            # The end of these files holds more than the first picture.
            whole_before = name in ("jpeg of several pictures", "png animated", "tiff of two pages")
            verdict: Verdict = "either" if share > 0.05 and (whole_before or "webp animated" in name) else "refused"
            made.append((f"{name}, cut at {share:.0%}", data[: int(len(data) * share)], verdict, ""))
        for number in range(FLIPS):
            flipped = bytearray(data)
            for place in _rng.integers(0, len(data) * 8, 1 + number):
                flipped[place // 8] ^= 1 << place % 8
            made.append((f"{name}, {number + 1} bits turned, {number}", bytes(flipped), "either", ""))
    return made


def hostile() -> list[Made]:
    """Images made to exhaust memory or time, to be taken for something else, or to be shown half."""
    jpeg = encoded(Image.fromarray(_COLOUR).resize((64, 64)), "JPEG", progressive=True)
    packed_row = zlib.compress(bytes(LARGEST))
    too_long = zeros(40 << 20, value=7)
    strip = b"\7" * (64 * 10)
    made: list[Made] = [
        ("png bomb", png(60000, 60000, packed_row), "refused", "60000 x 60000 pixels; a side"),
        ("png bomb of many pixels", png(16000, 16000, packed_row), "refused", "67,108,864 pixels at most"),
        ("png of no width", png(0, 10, packed_row), "refused", "0 x 10|whole PNG"),
        ("png of 101 to 1", encoded(Image.new("L", (1010, 10)), "PNG"), "refused", "100 times the shorter"),
        ("png strip", encoded(Image.new("L", (60000, 1)), "PNG"), "refused", "60000 x 1 pixels; a side"),
        ("png text bomb", png(1, 1, zlib.compress(b"\0\7"), extra=chunk(b"zTXt", b"a\0\0" + zeros(9 << 20))),
         "refused", "whole PNG"),
        ("png profile bomb", png(1, 1, zlib.compress(b"\0\7"), extra=chunk(b"iCCP", b"a\0\0" + zeros(9 << 20))),
         "either", ""),
        ("png of pixels that are missing", png(LARGEST, LARGEST, packed_row), "refused", "whole PNG"),
        ("jpeg bomb", resized_jpeg(jpeg, 65500, 65500), "refused", "a side may have"),
        ("jpeg of 40,000 scans", more_scans(resized_jpeg(jpeg, LARGEST, LARGEST), 40_000), "refused", "JPEG of 40,0"),
        ("bmp of runs, large", bmp(LARGEST, LARGEST, b"\xff\7\0\0" * LARGEST, bits=4), "refused", "run-length"),
        ("bmp of empty runs", bmp(99, 99, bytes(20 << 20)), "refused", "run-length"),
        ("tiff of strips that grow", strip_tiff(64, 64, too_long), "ok", "64x64x5 uint16"),
        ("tiff of bands in PackBits", strip_tiff(64, 64, b"\x81\7" * (1 << 15), compression=32773), "refused",
         "compressed with PACKBITS"),
        ("tiff of a strip that ends early", strip_tiff(64, 64, zlib.compress(strip)[:-3]), "refused", "ends early"),
        ("tiff without most strips", strip_tiff(64, 64, strip, compression=1, strips=9), "refused", "9 strips"),
        ("tiff without most strips, 8 bits", strip_tiff(64, 64, strip[:192], bands=3, bits=8, compression=1, strips=9),
         "refused", "9 strips"),
        ("tiff bomb", strip_tiff(60000, 60000, strip, strips=1, rows=60000), "refused", "a side may have"),
        ("tiff of 65535 bands", strip_tiff(8000, 8000, strip, bands=65535, bits=8, strips=1, rows=8000),
         "refused", "MiB decoded"),
        ("tiff of tiles beyond measure", strip_tiff(64, 64, strip, more=[(322, 4, [1 << 24]), (323, 4, [1 << 24])]),
         "refused", "tiles of"),
        ("tiff of a tag beyond the file", strip_tiff(64, 64, strip, counts={258: 1 << 31}), "refused", ""),
        ("tiff of depth", strip_tiff(64, 64, strip, compression=1, more=[(32997, 4, [1 << 30])]), "refused", "axes Z"),
        ("tiff that is its own next page", b"II*\0\x08\0\0\0\0\0\x08\0\0\0", "refused", ""),
        ("tiff of unknown packing", strip_tiff(64, 64, strip, compression=50000), "refused", "compressed with"),
        ("tiff of NaN", tiff(np.full((4, 4), np.nan, np.float32)), "refused", "NaN"),
        ("tiff of complex numbers", tiff(np.ones((4, 4), np.complex64)), "refused", "expected real ones"),
        ("npy of objects", npy(np.array([[print]]), allow_pickle=True), "refused", "object values"),
        ("npy of words", npy(np.array([["a", "b"]])), "refused", "expected real"),
        ("npy of fields", npy(np.zeros((2, 2), [("a", "f4"), ("b", "u1")])), "refused", "expected real"),
        ("npy of dates", npy(np.zeros((2, 2), "datetime64[s]")), "refused", "expected real"),
        ("npy of NaN", npy(np.full((4, 4), np.nan)), "refused", "NaN"),
        ("npy beyond float32", npy(np.full((4, 4), 1e300)), "refused", "infinite"),
        ("npy bomb", npy_of("{'descr': '<f8', 'fortran_order': False, 'shape': (60000, 60000)}"), "refused", "a side"),
        ("npy of many bands", npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (8000, 8000, 99)}"), "refused",
         "MiB decoded"),
        ("npy of less than none", npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (-4, -4)}"), "refused",
         "shape"),
        ("npy of a fraction", npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (2.5, 4)}"), "refused",
         "whole"),
        ("npy of much too much", npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (9" + "9" * 99 + ", 4)}"),
         "refused", ""),
        ("npy of a call", npy_of("{'descr': exit(), 'fortran_order': False, 'shape': (4, 4)}"), "refused", "whole"),
        ("npy of depth", npy_of("[" * 9000), "refused", "whole"),
        ("npy of a long header", b"\x93NUMPY\x02\0\xff\xff\xff\x7f" + b"(" * 20_000, "refused", "whole"),
        ("webp bomb", _webp_canvas(16384, 16384), "refused", "67,108,864 pixels at most"),
        ("png called jpg.jpg", encoded(Image.fromarray(_GREY), "PNG"), "ok", f"{WIDE}x{HIGH}x1 uint8"),
        ("text.png", b"no image, just words", "refused", "starts with b'no image'"),
        ("empty.png", b"", "refused", "is empty"),
        ("gif.png", encoded(Image.fromarray(_GREY), "GIF"), "refused", "expected a JPEG, PNG"),
        ("postscript.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n(/etc/passwd) run", "refused", "expected a JPEG, PNG"),
        ("svg.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "refused", "expected a JPEG, PNG"),
        ("pickle.png", b"\x80\x04\x95\x0f\0\0\0", "refused", "expected a JPEG, PNG"),
    ]  # fmt: skip
    for magic in (
        b"\xff\xd8\xff",
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\xff\xff\xff\xffWEBP",
        b"II*\0",
        b"MM\0+",
        b"BM",
        b"\x93NUMPY",
    ):
        made += [(f"only {magic!r} and {rest[:2]!r}", magic + rest, "refused", "whole|pixels|version")
                 for rest in (b"", bytes(64), b"\xff" * 64)]  # fmt: skip
    return made


def _webp_canvas(width: int, height: int) -> bytes:
    data = bytearray(encoded(Image.fromarray(np.dstack([_COLOUR, _GREY])), "WEBP"))
    assert data[12:16] == b"VP8X"
    data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


def cases(folder: Path) -> list[Case]:
    """All of the above as files."""
    found = []
    for number, (name, data, verdict, why) in enumerate([*valid(), *damaged(), *hostile()]):
        path = folder / f"{number}.bin"
        path.write_bytes(data)
        found.append(Case(name=name, path=path, reader="image", verdict=verdict, why=why))
    return found
