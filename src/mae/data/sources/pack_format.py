"""The files of a pack: what each holds, and how it is read with every value checked (docs/reference/pack-format.md)."""

import hashlib
import io
import json
import re
import tarfile
from dataclasses import asdict, dataclass
from typing import Any
from unicodedata import category

import numpy as np
from numpy.lib import format as npy

from mae.data.decode.limits import MAX_BYTES
from mae.data.remote.storage import MANIFEST, StoredFile
from mae.errors import UsageError

REPORT = "report.json"

WORKING = ".packing"
"""The folder in an unfinished pack: the options, and which shards are done."""

FORMAT = "openmae pack"
VERSION = 1

INDEX = np.dtype(
    [
        ("offset", "<u8"),
        ("length", "<u8"),
        ("crc32", "<u4"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("channels", "<u2"),
        ("dtype", "u1"),
    ]
)
"""A row an image. `offset` is where its bytes begin in the tar; width and height are those after orientation."""

DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.float32))
"""The types that the index's `dtype` numbers."""

BLOCK = 512
"""Bytes; each header and each member of a tar begins at a multiple of it."""

_RECORD = 20 * BLOCK  # the size of a tar is a multiple of this
_MAX_IMAGES = 1 << 31
_HEADER_BYTES = 1024  # of an index; NumPy's own takes 256
_MAX_NAME = 4097  # bytes including the newline; no path is longer
_UNSAFE = re.compile(r"(^|/)\.{0,2}(/|$)", re.MULTILINE)  # absolute, or with a part that is empty, "." or ".."


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file's size and the SHA-256 of its content."""

    bytes: int
    sha256: str

    def __post_init__(self) -> None:
        """Refuses impossible values.

        Raises:
            UsageError: a negative size, or a checksum that is not 64 hexadecimal digits.
        """
        if not 0 <= self.bytes < 1 << 62 or not re.fullmatch("[0-9a-f]{64}", self.sha256):
            raise UsageError(f"{MANIFEST} lists a file of {self.bytes} bytes with SHA-256 {self.sha256[:80]!r}")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One tar with its index and its names."""

    name: str
    images: int
    tar: FileEntry
    index: FileEntry
    names: FileEntry

    def __post_init__(self) -> None:
        """Refuses impossible values.

        Raises:
            UsageError: a name that is not a shard's, or a number of images that contradicts the sizes.
        """
        if not re.fullmatch(r"shard-[0-9]{6,12}", self.name):
            raise UsageError(f"{MANIFEST} lists a shard {self.name[:80]!r}; expected shard-000000 and so on")
        rows, names = self.index.bytes - self.images * INDEX.itemsize, self.names.bytes
        counted = 0 <= self.images <= _MAX_IMAGES and 0 < rows <= _HEADER_BYTES
        if not (counted and 2 * self.images <= names <= _MAX_NAME * self.images):
            raise UsageError(
                f"{MANIFEST} lists {self.images:,} images in {self.name}, an index of {self.index.bytes:,} bytes and "
                f"names of {names:,} bytes; they contradict each other"
            )

    def tar_file(self) -> StoredFile:
        """The tar itself."""
        return StoredFile(name=f"{self.name}.tar", num_bytes=self.tar.bytes, sha256=self.tar.sha256)

    def index_file(self) -> StoredFile:
        """The rows of `INDEX`."""
        return StoredFile(name=f"{self.name}.index.npy", num_bytes=self.index.bytes, sha256=self.index.sha256)

    def names_file(self) -> StoredFile:
        """The members' names, one a line."""
        return StoredFile(name=f"{self.name}.names.txt", num_bytes=self.names.bytes, sha256=self.names.sha256)


@dataclass(frozen=True, kw_only=True)
class PackSourceEntry:
    """What a pack was made of."""

    name: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `pack.json`, except the format's name and version.

    Attributes:
        form: the options that the pack was made with.
        source: what it was made of.
        images: how many there are in all shards.
        channel_names: of every image, in order; None where nothing names them.
        nodata: the value that means nodata in the files, as text; None where they name none.
        shards: in order.
        left_out: how many files of the source could not be used; `report.json` lists them.
    """

    form: dict[str, str | int]
    source: PackSourceEntry
    images: int
    channel_names: tuple[str, ...] | None
    shards: tuple[Shard, ...]
    left_out: int
    nodata: str | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that contradict each other.

        Raises:
            UsageError: another number of images than in the shards, none or too many, or a shard listed twice.
        """
        counted = sum(shard.images for shard in self.shards)
        if counted != self.images or not 0 < counted <= _MAX_IMAGES:
            raise UsageError(f"{MANIFEST} lists {self.images:,} images, its shards {counted:,}")
        if not 0 <= self.left_out <= _MAX_IMAGES:
            raise UsageError(f"{MANIFEST} lists an impossible number of images left out, {self.left_out}")
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise UsageError(f"{MANIFEST} lists the same shard twice")

    def to_bytes(self) -> bytes:
        """The file."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return (json.dumps(values, indent=1) + "\n").encode()


def read_manifest(data: bytes, *, place: str) -> Manifest:
    """Parses a `pack.json`.

    Raises:
        UsageError: it is not one, has another version or impossible content.
    """
    from pydantic import TypeAdapter, ValidationError  # slow to import

    try:
        # In Rust, so that endlessly nested brackets cannot exhaust Python's stack.
        kind: Any = TypeAdapter(_Kind).validate_json(data, strict=True)
        if kind.format != FORMAT:
            raise UsageError(f"{place}/{MANIFEST} is of format {kind.format[:80]!r}; expected {FORMAT!r}")
        if kind.version != VERSION:
            raise UsageError(
                f"{place} is a pack of version {kind.version}; this mae reads version {VERSION}: use a newer mae"
            )
        return TypeAdapter(Manifest).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])[:80]
        reason = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{place} is not a whole pack: {MANIFEST}{f', {where}' if where else ''}: {reason}") from error


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What distinguishes a pack from other files of that name."""

    format: str = ""
    version: int = 0


def index_bytes(rows: np.ndarray) -> bytes:
    """An index file."""
    stream = io.BytesIO()
    npy.write_array(stream, rows.astype(INDEX), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def read_index(data: bytes, shard: Shard, *, place: str) -> np.ndarray:
    """The rows of an index file, each inside its tar.

    Raises:
        UsageError: another type or number of rows, or rows outside the tar, overlapping or out of order.
    """
    what = f"{place}/{shard.index_file().name}"
    stream = io.BytesIO(data)
    try:
        if npy.read_magic(stream) != (1, 0):
            raise ValueError("not of version 1.0")
        shape, _, dtype = npy.read_array_header_1_0(stream, max_header_size=_HEADER_BYTES)
    except Exception as error:  # NumPy raises ValueError, SyntaxError, TokenError and more for a broken header
        raise UsageError(f"{what} is not an index: {str(error)[:200]}") from error
    start = stream.tell()
    if dtype != INDEX or shape != (shard.images,) or len(data) != start + shard.images * INDEX.itemsize:
        raise UsageError(f"{what} is not an index of {shard.images:,} images: it has shape {str(shape)[:40]}")
    rows: np.ndarray = np.frombuffer(data, INDEX, offset=start)
    _check_places(rows, shard, what)
    return rows


def _check_places(rows: np.ndarray, shard: Shard, what: str) -> None:
    offsets, lengths = rows["offset"], rows["length"]
    inside = (lengths > 0) & (lengths <= min(MAX_BYTES, shard.tar.bytes))
    inside &= (offsets >= BLOCK) & (offsets <= np.uint64(shard.tar.bytes) - lengths * inside)
    if not inside.all():
        first = int(np.flatnonzero(~inside)[0])
        raise UsageError(
            f"{what}: image {first} should have {lengths[first]:,} bytes at {offsets[first]:,}; the tar has "
            f"{shard.tar.bytes:,}"
        )
    apart = offsets[1:] >= offsets[:-1] + lengths[:-1] + np.uint64(BLOCK)
    if not apart.all() or (rows["dtype"] >= len(DTYPES)).any() or (offsets % np.uint64(BLOCK)).any():
        raise UsageError(f"{what} lists overlapping members or an unknown type")


def names_bytes(names: list[str]) -> bytes:
    """A file of names."""
    return "".join(f"{name}\n" for name in names).encode()


def read_names(data: bytes, shard: Shard, *, place: str) -> list[str]:
    """The members' names.

    Raises:
        UsageError: another number than images, not UTF-8, or a name that leads out of a folder.
    """
    what = f"{place}/{shard.names_file().name}"
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not UTF-8 text: {error.reason}") from error
    names = text.removesuffix("\n").split("\n") if text else []
    if len(names) != shard.images:
        raise UsageError(f"{what} holds {len(names):,} names; expected {shard.images:,}")
    unsafe = next((name for name in names if _UNSAFE.search(name) or not _is_clear(name)), None)
    if unsafe is not None:
        raise UsageError(f"{what} holds the name {unsafe[:200]!r}; expected one that stays inside a folder")
    return names


def _is_clear(name: str) -> bool:
    """Whether nothing in a name controls how it is shown; characters newer than this Python do not."""
    return name.isprintable() or all(each.isprintable() or category(each) == "Cn" for each in name)


def check_content(data: bytes, file: StoredFile, *, place: str) -> bytes:
    """Returns the data if its SHA-256 is the one in `pack.json`.

    Raises:
        UsageError: it is another one.
    """
    if hashlib.sha256(data).hexdigest() != file.sha256:
        raise UsageError(f"{place}/{file.name} does not match its checksum in {MANIFEST}; copy or pack it again")
    return data


def member_header(name: str, length: int) -> bytes:
    """The tar header of a member: ustar, with a pax header before it where the name needs one."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = length, 0o644
    try:
        return member.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict")
    except (ValueError, UnicodeEncodeError):  # over 255 characters, or not ASCII
        return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def padding(length: int) -> bytes:
    """The padding after a member of so many bytes."""
    return bytes(-length % BLOCK)


def ending(length: int) -> bytes:
    """The end of a tar whose members take so many bytes."""
    return bytes(2 * BLOCK + -(length + 2 * BLOCK) % _RECORD)
