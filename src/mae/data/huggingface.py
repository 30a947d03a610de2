"""Data sets of Hugging Face `datasets`: downloaded ones and saved ones row by row, Parquet files without a download.

The images are decoded here from their bytes, as those of any other source; nothing of a data set is ever run.
"""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mae.data.base import Names, digest_of_parts, fingerprint_of
from mae.data.decoding import decode, probe
from mae.data.limits import ImageInfo, UnreadableImage, check_num_bytes
from mae.data.parquet import ParquetRows, class_texts, first_line, open_parquet
from mae.errors import MAEError, UsageError

DOWNLOADED, STREAMED = "hf:", "hf-stream:"
"""What begins the name of a source that lies in a table."""

_COLUMNS = ("image", "img", "png", "jpg")
"""What a column of plain bytes is called where it holds images."""

_TRAIN, _TEST = ("train",), ("test", "val", "validation")
_REPOSITORY = re.compile(r"(?P<place>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?")


class _Rows(Protocol):
    """Rows with an image each, of all splits one after another."""

    def __len__(self) -> int: ...

    def cell(self, row: int) -> bytes | str | None:
        """The image file; or its path, where the table holds that alone."""
        ...

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """A number for each row that changes with the size of its image."""
        ...

    def classes(self) -> Sequence[str] | None:
        """The class of each row, "" for none; None where the table has no classes."""
        ...

    def version(self) -> str:
        """A text that changes when the files were changed."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource:
    """Images in the rows of a table.

    Attributes:
        name: what the user called it.
        note: what it holds.
        table: all rows of the splits that were opened.
        splits: name and number of rows of each; the one that was asked for has no name.
        rows: which of them, by number.
        root: the folder that rows may name files in; None where they may name none.
        bands: see `decode`.
    """

    name: str
    note: str
    table: _Rows
    splits: tuple[tuple[str, int], ...]
    rows: np.ndarray
    root: Path | None = None
    bands: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def item_name(self, index: int) -> str:
        """The data set, split and row, for messages."""
        return f"{self.name}[{self._place(index)}]"

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`; raises `UnreadableImage`."""
        return decode(self.read(index), name=self.item_name(index), bands=self.bands)

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give; raises `UnreadableImage`."""
        return probe(self.read(index), name=self.item_name(index), bands=self.bands)

    def read(self, index: int) -> bytes:
        """The image file; raises `UnreadableImage`, and `MAEError` where the row cannot be had."""
        name = self.item_name(index)
        try:
            cell = self.table.cell(int(self.rows[index]))
        except UnreadableImage as error:  # which names a row group; each of its images counts
            raise UnreadableImage(f"{name}: {error}") from error
        if isinstance(cell, str):
            return _file(cell, self.root, name=name)
        if cell is None:
            raise UnreadableImage(f"{name} holds no image")
        return cell

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the splits, numbers and sizes in order."""
        return fingerprint_of(map(self._place, range(len(self))), self.table.sizes(self.rows))

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the image file, see `digest_of_parts`; raises `UnreadableImage`."""
        data = self.read(index)
        return digest_of_parts(lambda place, length: data[place : place + length], len(data))

    def version(self) -> str:
        """16 hexadecimal digits of the fingerprint and of the files' places, sizes and times of the last change."""
        return fingerprint_of([self.fingerprint() + self.table.version()])

    def take(self, indices: np.ndarray, note: str) -> "RowSource":
        """The rows at `indices` alone."""
        return replace(self, rows=self.rows[indices], note=note)

    def within(self, tops: Sequence[str]) -> np.ndarray:
        """Whether each row is of one of some splits."""
        wanted = np.array([split.lower() in tops for split, _ in self.splits])
        inside: np.ndarray = wanted[self._split_of(self.rows)]
        return inside

    @cached_property
    def names(self) -> Names:
        """As paths of files would be: split, class where there are classes, and number."""
        classes = self.table.classes()
        told = ("" for _ in self.rows) if classes is None else (classes[row] for row in self.rows)
        places = map(self._place, range(len(self)))
        return Names(_path(place, each) for place, each in zip(places, told, strict=True))

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *(number for _, number in self.splits)])

    def _split_of(self, rows: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._starts, rows, side="right") - 1

    def _place(self, index: int) -> str:
        row = int(self.rows[index])
        number = int(self._split_of(self.rows[index]))
        split = self.splits[number][0]
        return f"{split}/{row - self._starts[number]}".removeprefix("/")


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedSource(RowSource):
    """Images in the row groups of Parquet files, which are fetched when they are needed."""

    table: ParquetRows

    @property
    def block_sizes(self) -> np.ndarray:
        """How many rows of the same row group follow each other, in order."""
        ends = np.flatnonzero(np.diff(self.table.group_of(self.rows), append=-1)) + 1
        return np.diff(ends, prepend=0)

    def content(self, index: int) -> str:
        """Digits of the file that the row lies in: to read the row, all of its group would have to come."""
        return self.table.content(int(self.rows[index]))


def open_rows(spec: str) -> RowSource:
    """A data set by its name on the Hugging Face hub, or by its folder.

    Args:
        spec: `hf:` or `hf-stream:`, then `OWNER/NAME`, with `@REVISION`, `:SPLIT` and `#COLUMN` as wanted, or a folder
            that `save_to_disk` wrote (`hf:`) or that holds Parquet files (`hf-stream:`), with `:SPLIT` and `#COLUMN`.

    Raises:
        UsageError: `datasets` is not installed; nothing of that name, no such split or no column of images.
        MAEError: it cannot be had.
    """
    asked = _asked(spec)
    return _streamed(spec, asked) if spec.startswith(STREAMED) else _downloaded(spec, asked)


def absolute_rows(spec: str) -> str:
    """The same with an absolute path, where it names a folder."""
    asked, kind = _asked(spec), spec.split(":", 1)[0]
    if asked.folder is None:
        return spec
    return f"{kind}:{asked.folder.resolve()}{spec[len(kind) + 1 + len(asked.place) :]}"


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """What a source's name says."""

    place: str
    folder: Path | None
    revision: str | None
    split: str | None
    column: str | None


def _asked(spec: str) -> _Asked:
    rest, column = spec.split(":", 1)[1], None
    if "#" in rest and not Path(rest).is_dir():
        rest, _, column = rest.rpartition("#")
    place, _, split = rest.rpartition(":")
    for folder, part in ((rest, None), (place, split)):
        if folder and Path(folder).is_dir():
            return _Asked(place=folder, folder=Path(folder), revision=None, split=part, column=column)
    if not (match := _REPOSITORY.fullmatch(rest)):
        raise UsageError(
            f"{spec} is neither a folder that is there nor a name on the Hugging Face hub; expected a folder, or "
            f"OWNER/NAME with @REVISION, :SPLIT or #COLUMN behind it"
        )
    return _Asked(folder=None, column=column, **match.groupdict())


def _package() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            "data sets of Hugging Face need the package datasets, which is not installed: "
            "pip install 'openmae[datasets]'"
        ) from error


def _hub_error(spec: str, asked: _Asked, error: Exception) -> MAEError:
    if asked.folder is not None:
        return UsageError(f"{spec} cannot be read: {first_line(error)}")
    return MAEError(
        f"{spec} is no folder here and cannot be had from the Hugging Face hub: {first_line(error)}. Look at the name "
        f"and at the network; without one, give a folder that save_to_disk wrote"
    )


def _chosen_splits(found: Sequence[str], asked: _Asked, *, spec: str) -> tuple[dict[str, str], list[str]]:
    """The splits to open, each with the name it goes by here, and those left out."""
    if asked.split is not None:
        if asked.split not in found:
            raise UsageError(f"{spec}: there is no split {asked.split!r}; there are {', '.join(found)}")
        return {asked.split: ""}, []
    if len(found) == 1:
        return {found[0]: ""}, []
    if not any(split in _TRAIN for split in found):
        raise UsageError(
            f"{spec} has the splits {', '.join(found)}, and none is train; name one, as in {spec}:{found[0]}"
        )
    chosen = {split: split for split in found if split in (*_TRAIN, *_TEST)}
    return chosen, [split for split in found if split not in chosen]


def _chosen_column(usable: Sequence[str], named: Sequence[str], asked: _Asked, *, spec: str) -> str:
    """The column of images: the one that is asked for, else the only one.

    Args:
        usable: columns that may hold images.
        named: those among them that say so.
        asked: what the source's name says.
        spec: the source's name.
    """
    if asked.column is not None:
        if asked.column not in usable:
            raise UsageError(f"{spec}: {asked.column!r} is no column of images; {_such_as(usable)}")
        return asked.column
    if len(named) != 1:
        several = "several columns of images" if named else "no column of images"
        raise UsageError(f"{spec} has {several}; {_such_as(named or usable)}")
    return named[0]


def _such_as(columns: Sequence[str]) -> str:
    return (
        f"name one: {', '.join('#' + column for column in columns)}" if columns else "no column holds images or bytes"
    )


def _only_classes(features: Mapping[str, Any], package: Any) -> str | None:
    """The column of classes; `label` where there are several; None where there is none."""
    found = [name for name, feature in features.items() if isinstance(feature, package.ClassLabel)]
    return "label" if "label" in found else found[0] if len(found) == 1 else None


def _column_of(features: Mapping[str, Any], asked: _Asked, package: Any, *, spec: str) -> str:
    images = [name for name, feature in features.items() if isinstance(feature, package.Image)]
    plain = [name for name, feature in features.items() if _is_bytes(feature)]
    named = images or [name for name in plain if name in _COLUMNS or isinstance(features[name], dict)]
    return _chosen_column([*images, *plain], named, asked, spec=spec)


def _is_bytes(feature: Any) -> bool:
    """Whether values are bytes, or a structure that holds bytes beside a path, as images without a type do."""
    inside = feature.get("bytes") if isinstance(feature, dict) else feature
    return getattr(inside, "dtype", None) in ("binary", "large_binary")


def _downloaded(spec: str, asked: _Asked) -> RowSource:
    package = _package()
    try:
        if asked.folder is None:
            found = package.load_dataset(asked.place, revision=asked.revision)
        else:
            found = package.load_from_disk(str(asked.folder.resolve()))
    except Exception as error:  # datasets, the hub and the files raise errors of many kinds
        raise _hub_error(spec, asked, error) from error
    parts = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    chosen, left_out = _chosen_splits(list(parts), asked, spec=spec)
    tables = [parts[split] for split in chosen]
    features = tables[0].features
    column = _column_of(features, asked, package, spec=spec)
    rows = _table_rows(tables, column, _only_classes(features, package), package, spec=spec)
    splits = tuple((name, len(table)) for name, table in zip(chosen.values(), tables, strict=True))
    return RowSource(
        name=spec,
        note=f"Hugging Face data set, {_note(len(rows), column, left_out)}",
        table=rows,
        splits=splits,
        rows=np.arange(len(rows)),
        root=asked.folder,
    )


def _note(rows: int, column: str, left_out: Sequence[str]) -> str:
    others = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{rows:,} rows, images in {column}{others}"


def _table_rows(tables: Sequence[Any], column: str, label: str | None, package: Any, *, spec: str) -> "_TableRows":
    """The tables with the columns that are needed alone, their content compared with what they claim."""
    undecoded = []
    try:
        for table in tables:
            columns = [column] if label is None else [column, label]
            for name in columns:
                table.data.column(name).validate(full=True)
            is_image = isinstance(table.features[column], package.Image)
            images = table.select_columns([column]).with_format(None)
            undecoded.append(images.cast_column(column, package.Image(decode=False)) if is_image else images)
    except Exception as error:  # pyarrow and datasets raise errors of many kinds
        raise UsageError(f"{spec}: the column {column!r} cannot be read: {first_line(error)}") from error
    labels = None if label is None else tuple(table.select_columns([label]) for table in tables)
    if sum(map(len, undecoded)) == 0:
        raise UsageError(f"{spec} has no rows")
    return _TableRows(parts=tuple(undecoded), column=column, labels=labels, label=label)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TableRows:
    """Rows of tables that lie on the disk in Arrow's form, mapped into memory."""

    parts: tuple[Any, ...]
    column: str
    labels: tuple[Any, ...] | None
    label: str | None

    def __len__(self) -> int:
        return int(self._starts[-1])

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.parts)])

    def cell(self, row: int) -> bytes | str | None:
        """See `_Rows`."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        value = self.parts[part][row - int(self._starts[part])][self.column]
        if not isinstance(value, dict):
            return value
        found: bytes | str | None = value["bytes"] if value["bytes"] is not None else value.get("path")
        return found

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of each image; see `_Rows`."""
        lengths = []
        for part in self.parts:
            for table in part.with_format("arrow").iter(10_000):
                values = table.column(self.column)
                values = pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values
                lengths.append(pc.fill_null(pc.binary_length(values), 0).to_numpy().astype(np.int64))
        sizes: np.ndarray = np.concatenate(lengths)[rows]
        return sizes

    def classes(self) -> Sequence[str] | None:
        """See `_Rows`."""
        if self.labels is None or self.label is None:
            return None
        found: list[str] = []
        for part in self.labels:
            column = part.with_format("arrow")[:].column(self.label)
            found += class_texts(column, part.features[self.label].names, self.label)
        return found

    def version(self) -> str:
        """See `_Rows`."""
        files = [Path(file["filename"]) for part in self.parts for file in part.cache_files]
        return fingerprint_of(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


def _path(place: str, class_name: str) -> str:
    """A row's place with its class as the folder that it lies in."""
    split, slash, number = place.rpartition("/")
    folder = class_name.replace("/", "_").replace("\0", "_")
    return f"{split}{slash}{folder}/{number}" if folder else place


def _file(path: str, root: Path | None, *, name: str) -> bytes:
    """A file that a row names instead of holding it, where it lies in the data set's own folder."""
    try:
        if root is None or not (root / path).resolve().is_relative_to(root.resolve()):
            raise UnreadableImage(f"{name} names the file {path!r} outside of the data set; such are not read")
        status = (root / path).stat()
        if not S_ISREG(status.st_mode):
            raise UnreadableImage(f"{name} names {path!r}, which is no file")
        check_num_bytes(status.st_size, name=name)
        return (root / path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        raise UnreadableImage(f"{name} names the file {path!r}, which cannot be read") from error


def _streamed(spec: str, asked: _Asked) -> StreamedSource:
    package = _package()
    place = asked.place if asked.folder is None else str(asked.folder.resolve())
    try:
        builder = package.load_dataset_builder(place, revision=asked.revision)
    except Exception as error:  # datasets, the hub and the files raise errors of many kinds
        raise _hub_error(spec, asked, error) from error
    files = {str(split): list(map(str, each)) for split, each in (builder.config.data_files or {}).items()}
    _check_files(files, place, asked, builder.name, spec=spec)
    chosen, left_out = _chosen_splits(list(files), asked, spec=spec)

    def choose(schema: pa.Schema) -> tuple[str, str | None, tuple[str, ...]]:
        features = package.Features.from_arrow_schema(schema)
        label = _only_classes(features, package)
        column = _column_of(features, asked, package, spec=spec)
        return column, label, tuple(features[label].names) if label else ()

    table, numbers = open_parquet([files[split] for split in chosen], choose, name=spec)
    rows, groups = len(table), len(table.groups)
    return StreamedSource(
        name=spec,
        note=f"streamed, {groups:,} row groups, {_note(rows, table.column, left_out)}",
        table=table,
        splits=tuple(zip(chosen.values(), numbers, strict=True)),
        rows=np.arange(rows),
    )


def _check_files(files: Mapping[str, Sequence[str]], place: str, asked: _Asked, form: str, *, spec: str) -> None:
    if form != "parquet" or not any(files.values()):
        how = f"hf:{spec.removeprefix(STREAMED)}"
        raise UsageError(f"{spec} is not stored as Parquet but as {form}, which cannot be streamed; download it: {how}")
    for file in (file for each in files.values() for file in each):
        # A data set's description may name files anywhere.
        inside = Path(file).is_relative_to(place) if asked.folder else file.startswith("hf://datasets/")
        if not inside:
            raise UsageError(f"{spec} names the file {file} outside of itself; such are not read")
