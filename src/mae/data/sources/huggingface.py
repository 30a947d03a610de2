"""Data sets of Hugging Face `datasets`, downloaded or saved, read row by row; none of their code is ever run."""

import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.items import Names, digest_of_parts, fingerprint_of
from mae.data.sources.source import TEST, TRAIN, Source
from mae.errors import MAEError, UsageError

PREFIX = "hf:"
"""What the name of a Hugging Face data set begins with."""

_COLUMNS = ("image", "img", "png", "jpg")
"""Names of columns whose plain bytes are taken for images."""

_REPOSITORY = re.compile(r"(?P<place>\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(?P<revision>[\w./-]+))?(?::(?P<split>[\w.-]+))?")


@dataclass(frozen=True, kw_only=True, eq=False)
class RowSource(Source):
    """Images in the rows of a table.

    Attributes:
        table: all rows of the splits that were opened.
        splits: name and number of rows of each; a split that the user named has the name "".
        rows: which of them, by number.
        root: the folder in which rows may name files; None: nowhere.
    """

    table: "_TableRows"
    splits: tuple[tuple[str, int], ...]
    rows: np.ndarray
    root: Path | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def item_name(self, index: int) -> str:
        """The data set, split and row, for messages."""
        return f"{self.name}[{self._place(index)}]"

    def read(self, index: int) -> bytes:
        """The image file; raises `UnreadableImage`."""
        name, cell = self.item_name(index), self.table.cell(int(self.rows[index]))
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
        """16 hexadecimal digits of the fingerprint and of the files' locations, sizes and modification times."""
        return fingerprint_of([self.fingerprint() + self.table.version()])

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the rows at `indices` only."""
        return replace(self, rows=self.rows[indices], note=note)

    def within(self, tops: Sequence[str]) -> np.ndarray:
        """Whether each row belongs to one of some splits."""
        wanted = np.array([split.lower() in tops for split, _ in self.splits])
        inside: np.ndarray = wanted[self._split_of(self.rows)]
        return inside

    @cached_property
    def names(self) -> Names:
        """Like paths of files: split, class where there are classes, and number."""
        places = map(self._place, range(len(self)))
        return Names(_path(place, each) for place, each in zip(places, self._classes(), strict=True))

    def directories(self) -> list[list[str]]:
        """Split and class of each row, as they are; neither of them where it has no name."""
        splits = (self.splits[number][0] for number in self._split_of(self.rows))
        return [[each for each in pair if each] for pair in zip(splits, self._classes(), strict=True)]

    def _classes(self) -> Sequence[str]:
        """The class of each row, "" for none."""
        classes = self.table.classes()
        return [""] * len(self) if classes is None else [classes[row] for row in self.rows]

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


def open_rows(spec: str) -> RowSource:
    """A data set by its name on the Hugging Face hub, or by its folder.

    Args:
        spec: `hf:`, then `OWNER/NAME`, with `@REVISION`, `:SPLIT` and `#COLUMN` as wanted, or a folder that
            `save_to_disk` wrote, with `:SPLIT` and `#COLUMN`.

    Raises:
        UsageError: `datasets` is not installed; nothing of that name, no such split or no column of images.
        MAEError: it cannot be downloaded.
    """
    return _downloaded(spec, _parse(spec))


def absolute_rows(spec: str) -> str:
    """The same with an absolute path, where it names a folder."""
    parsed = _parse(spec)
    if parsed.folder is None:
        return spec
    return f"{PREFIX}{parsed.folder.resolve()}{spec[len(PREFIX) + len(parsed.place) :]}"


@dataclass(frozen=True, kw_only=True)
class _Spec:
    """A parsed source name."""

    place: str
    folder: Path | None
    revision: str | None
    split: str | None
    column: str | None


def _parse(spec: str) -> _Spec:
    rest, column = spec.removeprefix(PREFIX), None
    if "#" in rest and not Path(rest).is_dir():
        rest, _, column = rest.rpartition("#")
    place, _, split = rest.rpartition(":")
    for folder, part in ((rest, None), (place, split)):
        if folder and Path(folder).is_dir():
            return _Spec(place=folder, folder=Path(folder), revision=None, split=part, column=column)
    if not (match := _REPOSITORY.fullmatch(rest)):
        raise UsageError(
            f"{spec} is neither an existing folder nor a name on the Hugging Face hub; expected a folder, or "
            f"OWNER/NAME followed by @REVISION, :SPLIT or #COLUMN"
        )
    return _Spec(folder=None, column=column, **match.groupdict())


def _package() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UsageError(
            "Hugging Face data sets need the package datasets, which is not installed: pip install 'openmae[datasets]'"
        ) from error


def _hub_error(spec: str, parsed: _Spec, error: Exception) -> MAEError:
    if parsed.folder is not None:
        return UsageError(f"{spec} cannot be read: {_first_line(error)}")
    return MAEError(
        f"{spec} is not a folder here and cannot be downloaded from the Hugging Face hub: {_first_line(error)}. Check "
        f"the name and the network; without a network, give a folder written by save_to_disk"
    )


def _chosen_splits(found: Sequence[str], parsed: _Spec, *, spec: str) -> tuple[dict[str, str], list[str]]:
    """The splits to open, each with its name here, and those left out."""
    if parsed.split is not None:
        if parsed.split not in found:
            raise UsageError(f"{spec}: there is no split {parsed.split!r}; expected one of {', '.join(found)}")
        return {parsed.split: ""}, []
    if len(found) == 1:
        return {found[0]: ""}, []
    if not any(split in TRAIN for split in found):
        raise UsageError(
            f"{spec} has the splits {', '.join(found)}, and none is train; name one, such as {spec}:{found[0]}"
        )
    chosen = {split: split for split in found if split in (*TRAIN, *TEST)}
    return chosen, [split for split in found if split not in chosen]


def _chosen_column(usable: Sequence[str], named: Sequence[str], parsed: _Spec, *, spec: str) -> str:
    """The column of images: the one the user named, else the only one.

    Args:
        usable: columns that may hold images.
        named: those among them that are declared or named as images.
        parsed: the parsed name of the source.
        spec: the source's name.
    """
    if parsed.column is not None:
        if parsed.column not in usable:
            raise UsageError(f"{spec}: {parsed.column!r} is not a column of images; {_such_as(usable)}")
        return parsed.column
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


def _column_of(features: Mapping[str, Any], parsed: _Spec, package: Any, *, spec: str) -> str:
    images = [name for name, feature in features.items() if isinstance(feature, package.Image)]
    plain = [name for name, feature in features.items() if _is_bytes(feature)]
    named = images or [name for name in plain if name in _COLUMNS or isinstance(features[name], dict)]
    return _chosen_column([*images, *plain], named, parsed, spec=spec)


def _is_bytes(feature: Any) -> bool:
    """Whether values are bytes, or structs of bytes and a path, as untyped images are."""
    inside = feature.get("bytes") if isinstance(feature, dict) else feature
    return getattr(inside, "dtype", None) in ("binary", "large_binary")


def _downloaded(spec: str, parsed: _Spec) -> RowSource:
    package = _package()
    try:
        if parsed.folder is None:
            found = package.load_dataset(parsed.place, revision=parsed.revision)
        else:
            found = package.load_from_disk(str(parsed.folder.resolve()))
    except Exception as error:  # datasets, the hub and the files raise errors of many kinds
        raise _hub_error(spec, parsed, error) from error
    parts = dict(found) if isinstance(found, dict) else {str(found.split or "train"): found}
    chosen, left_out = _chosen_splits(list(parts), parsed, spec=spec)
    tables = [parts[split] for split in chosen]
    features = tables[0].features
    column, label = _column_of(features, parsed, package, spec=spec), _only_classes(features, package)
    for name in filter(None, (column, label)):
        if not all(name in table.features for table in tables):
            raise UsageError(
                f"{spec}: the column {name!r} is not in every split; name one, such as {spec}:{next(iter(chosen))}"
            )
    rows = _table_rows(tables, column, label, package, spec=spec)
    splits = tuple((name, len(table)) for name, table in zip(chosen.values(), tables, strict=True))
    return RowSource(
        name=spec,
        note=f"Hugging Face data set, {_note(len(rows), column, left_out)}",
        table=rows,
        splits=splits,
        rows=np.arange(len(rows)),
        root=parsed.folder,
    )


def _note(rows: int, column: str, left_out: Sequence[str]) -> str:
    others = f"; left out: {', '.join(left_out)}" if left_out else ""
    return f"{rows:,} rows, images in {column}{others}"


def _table_rows(tables: Sequence[Any], column: str, label: str | None, package: Any, *, spec: str) -> "_TableRows":
    """The tables with only the columns needed, their content validated."""
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
        raise UsageError(f"{spec}: the column {column!r} cannot be read: {_first_line(error)}") from error
    labels = None if label is None else tuple(table.select_columns([label]) for table in tables)
    if sum(map(len, undecoded)) == 0:
        raise UsageError(f"{spec} has no rows")
    return _TableRows(parts=tuple(undecoded), column=column, labels=labels, label=label)


@dataclass(frozen=True, kw_only=True, eq=False)
class _TableRows:
    """Rows of Arrow tables on disk, mapped into memory."""

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
        """The image file; or its path, where the table holds that alone."""
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        value = self.parts[part][row - int(self._starts[part])][self.column]
        if not isinstance(value, dict):
            return value
        found: bytes | str | None = value["bytes"] if value["bytes"] is not None else value.get("path")
        return found

    def sizes(self, rows: np.ndarray) -> np.ndarray:
        """The bytes of each row's image."""
        lengths = []
        for part in self.parts:
            for table in part.with_format("arrow").iter(10_000):
                values = table.column(self.column)
                values = pc.struct_field(values, "bytes") if pa.types.is_struct(values.type) else values
                lengths.append(pc.fill_null(pc.binary_length(values), 0).to_numpy().astype(np.int64))
        sizes: np.ndarray = np.concatenate(lengths)[rows]
        return sizes

    def classes(self) -> Sequence[str] | None:
        """The class of each row, "" for none; None where the table has no classes."""
        if self.labels is None or self.label is None:
            return None
        found: list[str] = []
        for part in self.labels:
            column = part.with_format("arrow")[:].column(self.label)
            found += _class_texts(column, part.features[self.label].names, self.label)
        return found

    def version(self) -> str:
        """A text that changes when the files were changed."""
        files = [Path(file["filename"]) for part in self.parts for file in part.cache_files]
        return fingerprint_of(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files)


def _path(place: str, class_name: str) -> str:
    """A row's place with its class as a folder."""
    split, slash, number = place.rpartition("/")
    folder = class_name.replace("/", "_").replace("\0", "_")
    return f"{split}{slash}{folder}/{number}" if folder else place


def _file(path: str, root: Path | None, *, name: str) -> bytes:
    """A file that a row names instead of containing it, if it is in the data set's own folder."""
    try:
        if root is None or not (root / path).resolve().is_relative_to(root.resolve()):
            raise UnreadableImage(f"{name} names the file {path!r} outside the data set; such files are not read")
        status = (root / path).stat()
        if not S_ISREG(status.st_mode):
            raise UnreadableImage(f"{name} names {path!r}, which is not a file")
        check_num_bytes(status.st_size, name=name)
        return (root / path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        raise UnreadableImage(f"{name} names the file {path!r}, which cannot be read") from error


def _class_texts(column: pa.ChunkedArray, names: Sequence[str], label: str) -> list[str]:
    """The name of each row's class; "" for -1 and for null.

    Raises:
        UsageError: a class number without a name.
    """
    numbers = pc.fill_null(column, -1).to_numpy()
    if len(numbers) and not (numbers.min() >= -1 and numbers.max() < len(names)):
        raise UsageError(f"the column {label!r} holds a class number without a name; expected 0 to {len(names) - 1}")
    texts = [*names, ""]
    return [texts[number] for number in numbers]


def _first_line(error: Exception) -> str:
    """The first line of another package's error."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
