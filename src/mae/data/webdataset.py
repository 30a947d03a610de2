"""Images in tar archives, as the webdataset library keeps them; read in place and never extracted.

A tar has no table of what it holds. Its headers are walked once, and what they say is kept in the user's cache. Nor has
it checksums of its members, so that damage within one shows only where the image cannot be decoded any more.
"""

import hashlib
import itertools
import os
import re
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from mae.data.base import Names, digest_of_parts, fingerprint_of
from mae.data.cache import user_cache
from mae.data.decoding import decode, probe
from mae.data.files import check_any, is_image, is_visible, walk
from mae.data.limits import ImageInfo, UnreadableImage, check_num_bytes
from mae.data.tars import Member, members
from mae.errors import UsageError

_ROW = np.dtype([("offset", "<u8"), ("length", "<u8"), ("label", "<u8"), ("label_length", "<u8")])
"""Of an image: where it and its class lie in the tar; a length of 0 for none."""

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")
_PARTS = ("train", "test", "val", "validation")
_LABEL = ".cls"
_MAX_LABEL = 20  # bytes of text
_MAX_TARS = 100_000
_BRACES = re.compile(r"\{(\d{1,18}\.\.\d{1,18}|[^{}]*,[^{}]*)\}")
_SEQUENCE = re.compile(r"(\d+)\.\.(\d+)")
_FORM = 1  # of the kept indexes: another one is not read
_SETTLED_SECONDS = 2.0  # a file that was changed just now may change again without another time of change

Reader = Callable[[str, int, int], bytes]
"""Gives so many bytes of a file from a place on, or fewer where it ends; raises `OSError`."""


def read_local(path: str, offset: int, length: int) -> bytes:
    """Bytes of a local file, opened anew for each read: worker processes and threads would share a position."""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)


@dataclass(frozen=True, kw_only=True, eq=False)
class TarSource:
    """Image members of tar archives, archive by archive, in the order they have there.

    Attributes:
        name: what the user called it.
        note: what it holds and what was passed over.
        tars: the archives' paths.
        marks: size and time of the last change in nanoseconds of each `[tars, 2]`.
        names: of the members; below the folder of their archive, where it is a part such as `train`.
        places: the number of each member's archive.
        table: a row for each member, see `_ROW`.
        reader: reads the archives.
        bands: see `decode`.
    """

    name: str
    note: str
    tars: tuple[str, ...]
    marks: np.ndarray
    names: Names
    places: np.ndarray
    table: np.ndarray
    reader: Reader = read_local
    bands: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def block_sizes(self) -> np.ndarray:
        """How many images in a row lie in the same archive, in order."""
        ends = np.flatnonzero(np.diff(self.places, append=-1)) + 1
        return np.diff(ends, prepend=0)

    def item_name(self, index: int) -> str:
        """The archive and member, for messages."""
        return f"{self.tars[self.places[index]]}/{self.names[index]}"

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`; raises `UnreadableImage`."""
        return decode(self.read(index), name=self.item_name(index), bands=self.bands)

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give; raises `UnreadableImage`."""
        return probe(self.read(index), name=self.item_name(index), bands=self.bands)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        return fingerprint_of(self.names, self.table["length"])

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the member, see `digest_of_parts`; raises `UnreadableImage`."""
        tar, row = self.tars[self.places[index]], self.table[index]
        try:
            return digest_of_parts(
                lambda place, length: self.reader(tar, int(row["offset"]) + place, length), int(row["length"])
            )
        except OSError as error:
            raise UnreadableImage(f"{self.item_name(index)} cannot be read: {error.strerror or error}") from error

    def version(self) -> str:
        """16 hexadecimal digits of the names and sizes, and the archives' paths, sizes and times of the last change."""
        used = np.unique(self.places)
        tars = (os.path.realpath(self.tars[number]) for number in used)
        return fingerprint_of([self.fingerprint() + fingerprint_of(tars, self.marks[used, 0], self.marks[used, 1])])

    def take(self, indices: np.ndarray, note: str) -> "TarSource":
        """The members at `indices` alone."""
        names, places, table = self.names.take(indices), self.places[indices], self.table[indices]
        return replace(self, names=names, places=places, table=table, note=note)

    def classes(self) -> list[str] | None:
        """The number in the `.cls` member that belongs to each image, as text; None where there is none at all.

        Raises:
            UsageError: an image without one, or one that holds no number.
        """
        labelled = self.table["label_length"] > 0
        if not labelled.any():
            return None
        if not labelled.all():
            lonely = self.item_name(int(np.argmin(labelled)))
            raise UsageError(f"{lonely} has no {_LABEL} beside it, though others have; expected one for each image")
        return [self._class(index) for index in range(len(self))]

    def _class(self, index: int) -> str:
        row, place = self.table[index], f"{self.item_name(index)}: its {_LABEL}"
        try:
            text = self.reader(
                self.tars[self.places[index]], int(row["label"]), min(int(row["label_length"]), _MAX_LABEL)
            )
        except OSError as error:
            raise UsageError(f"{place} cannot be read: {error.strerror or error}") from error
        if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
            raise UsageError(f"{place} holds {text[:_MAX_LABEL]!r}; expected the number of a class")
        return str(int(text))

    def read(self, index: int) -> bytes:
        """The image file; raises `UnreadableImage`."""
        name, length = self.item_name(index), int(self.table["length"][index])
        check_num_bytes(length, name=name)
        try:
            data = self.reader(self.tars[self.places[index]], int(self.table["offset"][index]), length)
        except OSError as error:
            raise UnreadableImage(f"{name} cannot be read: {error.strerror or error}") from error
        if len(data) != length:
            raise UnreadableImage(f"{name} is not there any more; the tar was changed since it was opened")
        return data


def tars_below(folder: Path) -> list[Path]:
    """The tar archives in a folder, sorted; none where there are images beside them.

    Raises:
        UsageError: there are compressed ones alone.
    """
    found, compressed = [], []
    for path, _, _ in walk(folder):
        if is_image(path):
            return []
        found += [folder / path] if path.lower().endswith(".tar") else []
        compressed += [path] if is_compressed(path) else []
    if compressed and not found:
        raise UsageError(_compressed(str(folder / compressed[0])))
    return sorted(found)


def is_compressed(path: str) -> bool:
    """Whether a file is a compressed tar by its name."""
    return path.lower().endswith(_COMPRESSED)


def expanded(pattern: str) -> list[Path]:
    """The paths a pattern stands for: `{000..099}` for numbers, `{a,b}` for words, as a shell would take them.

    Raises:
        UsageError: it stands for more than 100,000.
    """
    paths = [pattern]
    while _BRACES.search(paths[0]):
        choices = _choices(_BRACES.search(paths[0])[1])  # type: ignore[index]
        if len(paths) * len(choices) > _MAX_TARS:
            raise UsageError(f"{pattern} stands for more than {_MAX_TARS:,} files; expected at most as many")
        paths = [_BRACES.sub(lambda _: choice, path, count=1) for path in paths for choice in choices]  # noqa: B023
    return [Path(path) for path in paths]


def _choices(inside: str) -> Sequence[str]:
    if not (ends := _SEQUENCE.fullmatch(inside)):
        return inside.split(",")
    first, last = int(ends[1]), int(ends[2])
    padded = any(len(end) > 1 and end.startswith("0") for end in ends.groups())
    width = max(map(len, ends.groups())) if padded else 0
    step = 1 if first <= last else -1
    numbers = range(first, last + step, step)
    return [f"{number:0{width}}" for number in itertools.islice(numbers, _MAX_TARS + 1)]


def open_tars(paths: Sequence[Path], *, name: str) -> TarSource:
    """All images of some tar archives, in the order given.

    An archive belongs to a part where its folder below what they have in common, or a word of its own name, is
    `train`, `test`, `val` or `validation`, as in `imagenet-train-000000.tar`; its members then have names below it.

    Args:
        paths: of the archives.
        name: what the user called them.

    Raises:
        UsageError: one is not there, not a whole tar, compressed, or none holds an image.
    """
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UsageError(f"{name}: {len(missing):,} of {len(paths):,} tars are not there, such as {missing[0]}")
    if compressed := [path for path in paths if is_compressed(path.name)]:
        raise UsageError(_compressed(str(compressed[0])))
    with ThreadPoolExecutor(min(len(paths), 16)) as pool:  # on a disk far away each header takes its time
        indexes = list(pool.map(partial(_index, folder=_index_folder()), paths))
    passed: Counter[str] = sum((index.passed for index in indexes), Counter())
    no_images = {what: passed.pop(what) for what in [*passed] if what[:1] in ("", ".")}
    if not any(index.names for index in indexes):
        check_any([], (f"a{extension}" for extension in Counter(no_images).elements()), name=name)
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    above = [_above(path, root) for path in paths]
    left_out = ", ".join(f"{count:,} {what}" for what, count in sorted(passed.items()))
    passed_over = f"; passed over: {left_out}" if left_out else ""
    total = sum(len(index.names) for index in indexes)
    return TarSource(
        name=name,
        note=f"{_counted(len(paths), 'tar')}, {_counted(total, 'file')}{passed_over}",
        tars=tuple(map(str, paths)),
        marks=np.array([index.mark for index in indexes], dtype=np.int64),
        names=Names(part + each for part, index in zip(above, indexes, strict=True) for each in index.names),
        places=np.repeat(np.arange(len(paths)), [len(index.names) for index in indexes]),
        table=np.concatenate([index.table for index in indexes]),
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _compressed(path: str) -> str:
    return (
        f"{path} is a compressed tar, in which no image can be read by itself; decompress it, the images in it are "
        f"compressed already"
    )


def _above(path: Path, root: Path) -> str:
    """The folders that the members of an archive lie below, with a slash at the end."""
    folders = path.absolute().parent.relative_to(root).parts
    words = re.split(r"[-_.]", path.stem.lower())
    part = next((word for word in words if word in _PARTS), None)
    if part is not None and not any(folder.lower() in _PARTS for folder in folders[:1]):
        folders = (part, *folders)
    return "".join(f"{folder}/" for folder in folders)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Index:
    """What one archive holds; `passed` counts what was passed over, files that are no images by their extension."""

    mark: tuple[int, int]
    names: list[str]
    table: np.ndarray
    passed: Counter[str]


def _index_folder() -> Path | None:
    """Where indexes are kept; None where the user has no cache that could be trusted."""
    try:
        return user_cache().root / "indexes"
    except UsageError:
        return None


def _index(path: Path, folder: Path | None) -> _Index:
    """From the user's cache where it stands there, else from the archive."""
    status = path.stat()
    mark = status.st_size, status.st_mtime_ns
    kept = folder and folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.npz"
    if kept and (index := _kept(kept, mark)) is not None:
        return index
    try:
        with path.open("rb", buffering=0) as file:

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            index = _walked(members(read, status.st_size, name=str(path)), mark)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if kept and time.time() - status.st_mtime > _SETTLED_SECONDS:
        _keep(kept, index)
    return index


def _walked(found: Iterator[Member], mark: tuple[int, int]) -> _Index:
    images: list[tuple[str, Member]] = []
    labels: dict[str, Member] = {}
    passed: Counter[str] = Counter()
    for member in found:
        name = "/".join(part for part in member.name.split("/") if part not in ("", "."))
        if member.kind == "folder" or not is_visible(name):
            # ".." begins with a dot as hidden names do, but nobody makes it by chance.
            passed["names that lead out"] += ".." in name.split("/")
        elif member.name.startswith("/"):
            passed["names that lead out"] += 1
        elif member.kind != "file":
            passed["links" if member.kind == "link" else "devices and the like"] += 1
        elif is_image(name):
            images.append((name, member))
        elif name.endswith(_LABEL):
            labels[_key(name)] = member
        else:
            passed[os.path.splitext(name)[1].lower()] += 1
    nothing = Member("", "file", 0, 0)
    rows = [(image, labels.get(_key(name), nothing)) for name, image in images]
    table = np.array([(image.offset, image.length, label.offset, label.length) for image, label in rows], dtype=_ROW)
    return _Index(mark=mark, names=[name for name, _ in images], table=table, passed=+passed)


def _key(name: str) -> str:
    """What the files of one sample have in common: all before the first dot of the last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.split(".")[0]


def _kept(path: Path, mark: tuple[int, int]) -> _Index | None:
    """What was kept of an archive that had the same size and time of the last change; None for what is not whole."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("mark", "names", "table", "passed")}
        names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        passed = dict(line.split("\t") for line in arrays["passed"].tobytes().decode().splitlines())
        index = _Index(
            mark=mark,
            names=names,
            table=arrays["table"],
            passed=Counter({what: int(count) for what, count in passed.items()}),
        )
    # No file, or one that was cut or changed: each means that the archive must be walked again.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    table = index.table
    if arrays["mark"].tolist() != [_FORM, *mark] or table.dtype != _ROW or table.shape != (len(names),):
        return None
    parts = [(table[place], table[length]) for place, length in (("offset", "length"), ("label", "label_length"))]
    # Not by their sums, which could wrap around.
    inside = all(((place <= mark[0]) & (length <= mark[0] - place)).all() for place, length in parts)
    return index if inside else None


def _keep(path: Path, index: _Index) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    names = "".join(name + "\0" for name in index.names).encode("utf-8", "surrogateescape")
    passed = "\n".join(f"{what}\t{count}" for what, count in index.passed.items()).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with aside.open("wb") as file:
            np.savez(
                file,
                mark=np.array([_FORM, *index.mark]),
                names=np.frombuffer(names, dtype=np.uint8),
                table=index.table,
                passed=np.frombuffer(passed, dtype=np.uint8),
            )
        aside.replace(path)
    except OSError:  # a full disk, or a home that may not be written to: the next start walks again
        with suppress(OSError):
            aside.unlink()
