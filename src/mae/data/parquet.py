"""Images in a column of Parquet files, here or on the Hugging Face hub, fetched a row group at a time.

Parquet gives no single row, but any row group by itself. A group that is needed is read once, and the images in it are
kept in the user's cache, where the processes of a machine share them. What the files say of themselves is compared with
their sizes before memory is taken for it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock

from mae.data.base import digest_of_file, fingerprint_of
from mae.data.cache import WrongContent, note, noted, user_cache
from mae.data.limits import UnreadableImage
from mae.data.storage import StoredFile
from mae.errors import MAEError, UsageError

MAX_GROUP = 1 << 30
"""Bytes of all images in a row group; usual ones have up to a tenth of that."""

_REMOTE = "hf://"
_MAX_FOOTER = 64 << 20
_MAX_FILES = 100_000
_TAIL = 1 << 16  # bytes at a file's end that are read first; most footers are shorter
_FORM = 1  # of what is kept of a row group
_CELL = np.dtype([("start", "<u8"), ("length", "<i8")])  # before the images, a row each; a length of -1 for none
_GROUP = np.dtype([("file", "<u4"), ("group", "<u4"), ("rows", "<u8"), ("num_bytes", "<u8")])

_T = TypeVar("_T")

Choose = Callable[[pa.Schema], tuple[str, str | None, tuple[str, ...]]]
"""The column of images, the column of classes if there is one, and the classes' names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParquetRows:
    """Rows of Parquet files, one after another.

    Attributes:
        name: what the user called them.
        files: paths or URLs.
        marks: of each a text that changes when the file is changed.
        column: the images.
        label: the classes, if there are any.
        class_names: what they are called.
        groups: the row groups: number of the file, of the group in it, of its rows, and bytes of its images.
    """

    name: str
    files: tuple[str, ...]
    marks: tuple[str, ...]
    column: str
    label: str | None
    class_names: tuple[str, ...]
    groups: np.ndarray

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _seen(self) -> dict[int, StoredFile]:
        """What is known of row groups that were asked for."""
        return {}

    @cached_property
    def _digests(self) -> dict[int, str]:
        """Of files whose content was asked for."""
        return {}

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.groups["rows"])]).astype(np.int64)

    def group_of(self, rows: np.ndarray) -> np.ndarray:
        """The number of each row's group."""
        return np.searchsorted(self._starts, rows, side="right") - 1

    def cell(self, row: int) -> bytes | None:
        """The image file in a row; None where there is none.

        Raises:
            UnreadableImage: its row group is damaged.
            MAEError: it cannot be had.
        """
        number = int(self.group_of(np.array(row)))
        place = row - int(self._starts[number])
        with self._images(number) as stream:
            stream.seek(place * _CELL.itemsize)
            start, length = np.frombuffer(stream.read(_CELL.itemsize), dtype=_CELL)[0].tolist()
            stream.seek(start)
            return None if length < 0 else stream.read(length)

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of each row's group: those of the images alone are not known before they are read."""
        sizes: np.ndarray = self.groups["num_bytes"].astype(np.int64)[self.group_of(rows)]
        return sizes

    def classes(self) -> list[str] | None:
        """The class of each row, "" for none; None where there are no classes.

        Raises:
            UsageError: a class without a name, or not one a row.
            MAEError: they cannot be read.
        """
        if self.label is None:
            return None
        found: list[str] = []
        for file, first in zip(*np.unique(self.groups["file"], return_index=True), strict=True):
            with self._opened(int(first)) as table:
                column = table.read(columns=[self.label], use_threads=False).column(self.label)
                rows = int(self.groups["rows"][self.groups["file"] == file].sum())
                if len(column) != rows:
                    raise UsageError(f"{self.files[file]} holds {len(column):,} classes; expected {rows:,}, one a row")
                found += class_texts(column, self.class_names, self.label)
        return found

    def version(self) -> str:
        """16 hexadecimal digits of the files' places and marks."""
        return fingerprint_of(f"{file} {mark}" for file, mark in zip(self.files, self.marks, strict=True))

    def content(self, row: int) -> str:
        """Digits of parts of the file that a row lies in; of a remote one none, since they would have to be fetched.

        Another file will hardly have row groups of the same `sizes`.

        Raises:
            UnreadableImage: it cannot be read.
        """
        number = int(self.groups["file"][int(self.group_of(np.array(row)))])
        if number not in self._digests:
            place = self.files[number]
            self._digests[number] = "" if place.startswith(_REMOTE) else digest_of_file(Path(place))
        return self._digests[number]

    def _told(self, number: int) -> str:
        row = self.groups[number]
        return f"{self.files[row['file']]}, row group {row['group']}"

    @contextmanager
    def _opened(self, number: int) -> Iterator[pq.ParquetFile]:
        """The file that a row group lies in; what pyarrow and the network raise meanwhile is explained."""
        place, mark = (each[self.groups["file"][number]] for each in (self.files, self.marks))
        try:
            with _stream(place) as stream:
                footer, _ = _footer(place, mark)
                # Few writers store checksums; where they are, they are compared.
                yield pq.ParquetFile(stream, metadata=footer, pre_buffer=True, page_checksum_verification=True)
        except MAEError:
            raise
        except Exception as error:  # pyarrow, the hub and the network raise errors of many kinds
            # A network that is down says nothing of one image.
            damaged = isinstance(error, pa.ArrowException) or not place.startswith(_REMOTE)
            kind = UnreadableImage if damaged else MAEError
            raise kind(f"{self._told(number)} cannot be read: {first_line(error)}") from error

    def _images(self, number: int) -> BinaryIO:
        """What is kept of a row group; it is fetched where it is not there."""
        cache, group = user_cache(), self.groups[number]
        if (file := self._seen.get(number)) is None:
            place = self.files[group["file"]], self.marks[group["file"]]
            key = json.dumps([_FORM, *place, int(group["group"]), self.column])
            known = cache.root / "row-groups" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
            try:
                known.parent.mkdir(mode=0o700, exist_ok=True)
                with FileLock(known.with_suffix(".lock"), mode=0o600):  # one process fetches, the others wait
                    file = self._seen[number] = noted(known) or self._kept(number, known)
            except OSError as error:
                told = f"{self._told(number)} cannot be kept in {cache.root}"
                raise MAEError(f"{told}: {error.strerror or error}; make room there, or set OPENMAE_CACHE") from error
        try:
            return cache.open(file, lambda draft: draft.write(self._fetched(number)))
        except WrongContent as error:
            raise MAEError(f"{self._told(number)} was changed since it was first read; start again") from error

    def _kept(self, number: int, known: Path) -> StoredFile:
        """Fetches a row group of which nothing is known yet, and notes what it is."""
        data = self._fetched(number)
        file = StoredFile(name=known.stem, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        user_cache().open(file, lambda draft: draft.write(data)).close()
        note(known, file)
        return file

    def _fetched(self, number: int) -> bytes:
        """A row group's images, with a table of where each begins before them."""
        images: list[bytes | None] = []
        total, rows = 0, int(self.groups["rows"][number])
        with self._opened(number) as table:
            leaf, group = _leaf(table.schema_arrow, self.column), int(self.groups["group"][number])
            # Row by row: a dictionary can make gigabytes of a few bytes, and a row is never more than one entry.
            for batch in table.iter_batches(batch_size=1, row_groups=[group], columns=[leaf], use_threads=False):
                values = batch.column(0)
                values = pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values
                image = values[0].as_py()
                total += len(image or b"")
                if total > MAX_GROUP or len(images) >= rows:
                    raise UnreadableImage(f"{self._told(number)} holds more than it claims; the file is damaged")
                images.append(image)
        if len(images) != rows:
            raise UnreadableImage(f"{self._told(number)} holds {len(images):,} rows; expected {rows:,}")
        cells = np.zeros(rows, dtype=_CELL)
        cells["length"] = [-1 if image is None else len(image) for image in images]
        ends = np.cumsum(np.maximum(cells["length"], 0)) + cells.nbytes
        cells["start"] = ends - np.maximum(cells["length"], 0)
        return b"".join([cells.tobytes(), *(image or b"" for image in images)])


def open_parquet(splits: Sequence[Sequence[str]], choose: Choose, *, name: str) -> tuple[ParquetRows, list[int]]:
    """The rows of Parquet files by their footers; no image is read.

    Args:
        splits: paths or `hf://` URLs of each split's files.
        choose: finds the columns; it is given the first file's schema.
        name: what the user called them.

    Returns:
        All rows, and how many each split has.

    Raises:
        UsageError: a file that is not whole, lacks the column, or has row groups that are too large.
        MAEError: a file that cannot be had.
    """
    files = [file for split in splits for file in split]
    if len(files) > _MAX_FILES:
        raise UsageError(f"{name} has {len(files):,} files; expected {_MAX_FILES:,} at most")
    marks = [_mark(file) for file in files]
    column, label, class_names = choose(
        _checked(files[0], lambda: _footer(files[0], marks[0])[0].schema.to_arrow_schema())
    )
    with ThreadPoolExecutor(min(len(files), 16)) as pool:  # of files far away each takes its time
        numbers = range(len(files))
        found = list(pool.map(lambda number: _groups(files[number], marks[number], number, column), numbers))
    groups = np.concatenate(found)
    if not len(groups):
        raise UsageError(f"{name} has no rows")
    ends = np.cumsum([len(split) for split in splits])
    parts = np.searchsorted(ends, groups["file"], side="right")
    counts = [int(groups["rows"][parts == part].sum()) for part in range(len(splits))]
    rows = ParquetRows(
        name=name,
        files=tuple(files),
        marks=tuple(marks),
        column=column,
        label=label,
        class_names=class_names,
        groups=groups,
    )
    return rows, counts


def class_texts(column: pa.ChunkedArray, names: Sequence[str], label: str) -> list[str]:
    """The class of each row by the names of the classes; "" for -1 and for nothing.

    Raises:
        UsageError: a number that no class has.
    """
    numbers = pc.fill_null(column, -1).to_numpy()
    if len(numbers) and not (numbers.min() >= -1 and numbers.max() < len(names)):
        raise UsageError(f"the column {label!r} holds a class that it has no name for; expected 0 to {len(names) - 1}")
    texts = [*names, ""]
    return [texts[number] for number in numbers]


def first_line(error: Exception) -> str:
    """What an error of another package says, as far as one line."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _mark(place: str) -> str:
    if place.startswith(_REMOTE):  # the URL tells the commit
        return ""
    status = _checked(place, lambda: os.stat(place))
    return f"{status.st_size} {status.st_mtime_ns}"


def _checked(place: str, read: Callable[[], _T]) -> _T:
    """What is read of a file's description, other people's errors explained."""
    try:
        return read()
    except MAEError:
        raise
    except Exception as error:  # pyarrow, the hub and the network raise errors of many kinds
        kind = MAEError if place.startswith(_REMOTE) and not isinstance(error, pa.ArrowException) else UsageError
        raise kind(f"{place} cannot be read as Parquet: {first_line(error)}") from error


def _stream(place: str) -> BinaryIO:
    if not place.startswith(_REMOTE):
        return open(place, "rb")
    from huggingface_hub import HfFileSystem  # only these need it

    # pyarrow asks for what it needs in few large parts; reading ahead of them would be in vain.
    return cast(BinaryIO, HfFileSystem().open(place, "rb", cache_type="none"))


@lru_cache(maxsize=8)
def _footer(place: str, mark: str) -> tuple[pq.FileMetaData, int]:
    """A file's description of itself, which stands at its end, and its size.

    `mark` tells the file from what it was before.
    """
    with _stream(place) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(size - _TAIL, 0))
        tail = stream.read(_TAIL)
        length = int.from_bytes(tail[-8:-4], "little")
        if tail[-4:] != b"PAR1" or not 0 < length <= min(size - 12, _MAX_FOOTER):
            raise UsageError(f"{place} is not a whole Parquet file")
        if length + 8 > len(tail):
            stream.seek(size - length - 8)
            tail = stream.read(length + 8)
    return pq.read_metadata(pa.BufferReader(tail[-length - 8 :])), size


def _groups(place: str, mark: str, number: int, column: str) -> np.ndarray:
    """The row groups of a file that have rows, what they claim compared with the file."""
    return _checked(place, lambda: _claimed(*_footer(place, mark), place, number, column))


def _claimed(footer: pq.FileMetaData, size: int, place: str, number: int, column: str) -> np.ndarray:
    schema = footer.schema.to_arrow_schema()
    leaf = _leaf(schema, column) if column in schema.names else None
    at = next((at for at in range(footer.num_columns) if footer.schema.column(at).path == leaf), None)
    if at is None:
        raise UsageError(f"{place} has no column {column!r} of images, as the first file has")
    found, total = [], 0
    for group in range(footer.num_row_groups):
        chunk, rows = footer.row_group(group).column(at), footer.row_group(group).num_rows
        num_bytes = max(chunk.total_compressed_size, 0)
        total += num_bytes
        if not 0 <= rows <= num_bytes or chunk.num_values != rows:  # any image takes more than one byte
            raise UsageError(f"{place}, row group {group} claims {rows:,} images, which it cannot hold")
        if not 0 <= chunk.total_uncompressed_size <= MAX_GROUP:
            raise UsageError(
                f"{place}, row group {group} has {chunk.total_uncompressed_size >> 20:,} MiB of images; expected "
                f"{MAX_GROUP >> 20:,} at most: download the set by hf: instead"
            )
        found += [(number, group, rows, chunk.total_uncompressed_size)] if rows else []
    if total > size:
        raise UsageError(f"{place} claims {total:,} bytes of images, more than it has")
    return np.array(found, dtype=_GROUP)


def _leaf(schema: pa.Schema, column: str) -> str:
    """The column as Parquet names it, of a structure only its bytes."""
    return f"{column}.bytes" if pa.types.is_struct(schema.field(column).type) else column
