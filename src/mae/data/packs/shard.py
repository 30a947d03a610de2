"""One shard of a pack: tar, index and names are written to temporary files, then moved into place."""

import hashlib
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mae.data.decode.limits import UnreadableImage
from mae.data.packs.encodings import Kept, Packed, PackForm
from mae.data.packs.inputs import PackInput
from mae.data.sources.pack_format import (
    DTYPES,
    INDEX,
    WORKING,
    FileEntry,
    Shard,
    ending,
    index_bytes,
    member_header,
    names_bytes,
    padding,
)
from mae.errors import MAEError, UsageError
from mae.records import from_json, read_json, to_json, write_json


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """An image that could not be used; `number` is its place in the source."""

    number: int
    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished shard; its file in the working folder commits it."""

    shard: Shard
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What every packing process needs.

    Attributes:
        images: what to pack.
        form: how images are encoded.
        order: the images' numbers in the order of the pack.
        per_shard: images a shard, including those that turn out to be unusable.
        channels: the channel names of every image.
        nodata: the value that means nodata in those that mark one.
        folder: the pack.
    """

    images: PackInput
    form: PackForm
    order: np.ndarray
    per_shard: int
    channels: tuple[str, ...] | None
    nodata: str | None
    folder: Path

    @property
    def num_shards(self) -> int:
        """How many shards there will be."""
        return -(-len(self.order) // self.per_shard)

    def numbers(self, shard: int) -> list[int]:
        """The images of a shard."""
        part: list[int] = self.order[shard * self.per_shard : (shard + 1) * self.per_shard].tolist()
        return part


class _Tar:
    """A tar being written, with its index rows and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_bytes, self.rows, self.names = 0, list[tuple[int, ...]](), list[str]()
        self._file, self._digest = file, hashlib.sha256()

    def add(self, name: str, data: bytes, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._write(member_header(name, len(data)))
        height, width, channels = shape
        row = (self.num_bytes, len(data), zlib.crc32(data), width, height, channels, DTYPES.index(dtype))
        self._write(data)
        self._write(padding(len(data)))
        self.rows.append(row)
        self.names.append(name)

    def end(self) -> FileEntry:
        self._write(ending(self.num_bytes))
        _to_disk(self._file)
        return FileEntry(bytes=self.num_bytes, sha256=self._digest.hexdigest())

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)


def write_shard(job: Job, number: int, *, on_image: Callable[[], None]) -> Record:
    """Packs the images of a shard and commits it.

    Args:
        job: the pack.
        number: the shard's.
        on_image: called after each image; may raise.

    Raises:
        UsageError: an image that cannot be encoded so.
        MAEError: the shard cannot be written; nothing half-written stays.
    """
    name = f"shard-{number:06d}"
    aside = {kind: job.folder / WORKING / f"{name}.{os.getpid()}.{kind}" for kind in ("tar", "index.npy", "names.txt")}
    try:
        with aside["tar"].open("wb") as file:
            tar = _Tar(file)
            left_out = _fill(tar, job, job.numbers(number), on_image)
            entries = {"tar": tar.end()}
        rows = np.array(tar.rows, dtype=INDEX)
        entries["index.npy"] = _written(aside["index.npy"], index_bytes(rows))
        entries["names.txt"] = _written(aside["names.txt"], names_bytes(tar.names))
        for kind, path in aside.items():
            path.replace(job.folder / f"{name}.{kind}")
        shard = Shard(
            name=name,
            images=len(rows),
            tar=entries["tar"],
            index=entries["index.npy"],
            names=entries["names.txt"],
        )
        record = Record(shard=shard, left_out=tuple(left_out))
        write_json(_record_path(job, number), to_json(record))
        return record
    except OSError as error:
        raise MAEError(
            f"{job.folder}/{name}.tar cannot be written: {error.strerror or error}; finished shards are kept: rerun "
            "the same command to resume"
        ) from error
    finally:
        for path in aside.values():
            with suppress(OSError):  # gone after a success; a full disk must not hide the first error
                path.unlink()


def read_record(job: Job, number: int) -> Record | None:
    """The record of a shard; None if it is unfinished, or an image that was left out has become usable."""
    path = _record_path(job, number)
    if not path.is_file():
        return None
    try:
        record = from_json(Record, read_json(path), what="shard")
    except UsageError:  # truncated by a power failure
        return None
    if first_broken(job.folder, record.shard) is not None:
        return None
    usable = any(_is_usable(job, left_out.number) for left_out in record.left_out)
    return None if usable else record


def first_broken(folder: Path, shard: Shard) -> Path | None:
    """The first file of a shard that is missing or of another size; None where all are there."""
    for file in (shard.tar_file(), shard.index_file(), shard.names_file()):
        place = folder / file.name
        if not place.is_file() or place.stat().st_size != file.num_bytes:
            return place
    return None


def _record_path(job: Job, number: int) -> Path:
    return job.folder / WORKING / f"shard-{number:06d}.json"


def _fill(tar: _Tar, job: Job, numbers: list[int], on_image: Callable[[], None]) -> list[LeftOut]:
    """Adds the usable images; returns what is wrong with the others."""
    left_out = []
    for number in numbers:
        try:
            packed = _packed(job, number)
        except UnreadableImage as error:
            left_out.append(LeftOut(number=number, name=_text(job.images.item_name(number)), reason=_text(str(error))))
        else:
            tar.add(f"{job.images.keys[number]}.{packed.extension}", packed.data, packed.shape, packed.dtype)
        on_image()
    return left_out


def _is_usable(job: Job, number: int) -> bool:
    try:
        _packed(job, number)
    except UnreadableImage:
        return False
    return True


def _packed(job: Job, number: int) -> Packed:
    original = job.images.original(number, job.channels)
    if original.nodata not in (None, job.nodata) and not isinstance(job.form, Kept):  # files mark their own
        raise UsageError(
            f"{original.name} marks {original.nodata} as nodata, others {job.nodata or 'no value'}; a pack of pixels "
            "knows one: use --keep for the files as they are"
        )
    return job.form.pack(original)


def _text(text: str) -> str:
    """Text that JSON can hold: undecodable bytes of file names arrive as lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode()


def write_file(folder: Path, name: str, data: bytes) -> None:
    """A file of the pack, whole or not at all."""
    aside = folder / WORKING / name
    _written(aside, data)
    aside.replace(folder / name)


def _written(path: Path, data: bytes) -> FileEntry:
    with path.open("wb") as file:
        file.write(data)
        _to_disk(file)
    return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _to_disk(file: BinaryIO) -> None:
    """Flushes a file before it is renamed: after a power failure its name must not exist without its content."""
    file.flush()
    os.fsync(file.fileno())
