"""Image files made byte by byte: what no honest writer makes."""

import struct
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
_FORMATS = {1: "B", 3: "H", 4: "I", 5: "Q", 12: "d", 16: "Q"}
HEADER = 8 + 2 + 4
"""Bytes of a `tiff` before its blob, without the 12 of each tag."""


def zeros(num_bytes: int, *, value: int = 0) -> bytes:
    """So many equal bytes, deflated, without ever holding them."""
    packer = zlib.compressobj(9)
    piece = bytes([value]) * (1 << 20)
    parts = [packer.compress(piece) for _ in range(num_bytes >> 20)]
    return b"".join([*parts, packer.compress(piece[: num_bytes % (1 << 20)]), packer.flush()])


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, packed: bytes, *, depth: int = 8, colour: int = 0, interlaced: bool = False,
        extra: bytes = b"") -> bytes:  # fmt: skip
    """A PNG of any header around some deflated bytes."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    chunks = chunk(b"IHDR", header) + extra + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def grey_png(pixels: np.ndarray, *, depth: int = 8, interlaced: bool = False) -> bytes:
    """Grey values `[H, W]` below 2 to the power of `depth` (1, 2, 4 or 8)."""
    height, width = pixels.shape
    passes = [pixels[top::down, left::along] for left, top, along, down in _ADAM7] if interlaced else [pixels]
    rows = b"".join(b"\0" + _packed(row, depth) for part in passes if part.size for row in part)
    return png(width, height, zlib.compress(rows), depth=depth, interlaced=interlaced)


def _packed(row: np.ndarray, depth: int) -> bytes:
    bits = np.unpackbits(row.astype(np.uint8)[:, None], axis=1)[:, 8 - depth :]
    return np.packbits(bits.ravel()).tobytes()


Tag = tuple[int, int, Sequence[int]]


def tiff(tags: Iterable[Tag], blob: bytes = b"", *, counts: dict[int, int] | None = None) -> bytes:
    """A little-endian TIFF of one page: tags of code, type and values; the blob stands at `HEADER + 12 * len(tags)`.

    Args:
        tags: in the order they are written.
        blob: bytes behind the tags.
        counts: a number of values that a tag claims to have instead of its own.
    """
    tags = list(tags)
    entries, behind = b"", b""
    place = HEADER + 12 * len(tags) + len(blob)
    for code, kind, values in tags:
        data = struct.pack(f"<{len(values)}{_FORMATS[kind]}", *values)
        if len(data) > 4:
            data, behind = struct.pack("<I", place + len(behind)), behind + data
        entries += struct.pack("<HHI", code, kind, (counts or {}).get(code, len(values))) + data.ljust(4, b"\0")
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + blob + behind


def strip_tiff(width: int, height: int, strip: bytes, *, bands: int = 5, bits: int = 16, compression: int = 8,
               rows: int = 1, strips: int | None = None, more: Sequence[Tag] = (),
               counts: dict[int, int] | None = None) -> bytes:  # fmt: skip
    """A TIFF whose strips of `rows` rows all lie in the same bytes; `strips` of them are in its table."""
    number = -(-height // rows) if strips is None else strips
    place = HEADER + 12 * (10 + len(more))
    tags: list[Tag] = [
        (256, 4, [width]), (257, 4, [height]), (258, 3, [bits] * bands), (259, 3, [compression]),
        (262, 3, [2 if bands == 3 else 1]), (273, 4, [place] * number), (277, 3, [bands]), (278, 4, [rows]),
        (279, 4, [len(strip)] * number), (284, 3, [1]), *more,
    ]  # fmt: skip
    return tiff(sorted(tags), strip, counts=counts)


def bmp(width: int, height: int, runs: bytes, *, bits: int = 8) -> bytes:
    """A grey run-length encoded BMP."""
    palette = b"".join(bytes((level, level, level, 0)) for level in range(1 << bits))
    start = 54 + len(palette)
    sizes = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, {8: 1, 4: 2}[bits], len(runs), 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", start + len(runs), 0, 0, start) + sizes + palette + runs


def resized_jpeg(data: bytes, width: int, height: int) -> bytes:
    """A JPEG whose header claims another size."""
    start = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
    return data[: start + 5] + struct.pack(">HH", height, width) + data[start + 9 :]


def more_scans(data: bytes, number: int) -> bytes:
    """A JPEG whose last scan is there so many times more."""
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * number + data[-2:]
