"""Images in tar archives, as the webdataset library writes them; read in place and never extracted.

A tar has no table of contents: its headers are read once, and the resulting index is kept in the user's cache. Nor has
it checksums of its members, so that damage shows only where an image can no longer be decoded.
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
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np

from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.items import Names, digest_of_parts, fingerprint_of
from mae.data.remote.cache import user_cache
from mae.data.sources.folder import check_any, count_of, is_image, is_visible, plain_path, unread_note, walk
from mae.data.sources.source import TEST, TRAIN, Source
from mae.data.sources.tar_index import MORE_BEHIND, NO_END, Member, members
from mae.errors import UsageError
from mae.text import visible

_ROW = np.dtype([("offset", "<u8"), ("length", "<u8"), ("label", "<u8"), ("label_length", "<u8")])
"""Offset and length of an image and of its class in the tar; a length of 0 for none."""

_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst", ".tar.lz4")
_LABEL = ".cls"
_MAX_LABEL = 20  # bytes of text
_MAX_TARS = 100_000
_SEQUENCE = re.compile(r"(\d{1,18})\.\.(\d{1,18})")
_INDEX_VERSION = 2  # of the cached indexes: others are not read
_STABLE_SECONDS = 2.0  # a file changed just now may change again within the same timestamp

Reader = Callable[[str, int, int], bytes]
"""Reads bytes of a file, given an offset and a length; fewer at its end; raises `OSError`."""


def read_local(path: str, offset: int, length: int) -> bytes:
    """Bytes of a local file, opened anew for each read: worker processes and threads would share a position."""
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)


@dataclass(frozen=True, kw_only=True, eq=False)
class TarSource(Source):
    """Image members of tar archives, archive by archive, in the order they have there.

    Attributes:
        tars: the archives' paths.
        marks: size and modification time in nanoseconds of each `[tars, 2]`.
        names: of the members; below the folder of their archive where that is a split such as `train`.
        places: the number of each member's archive.
        table: a row for each member, see `_ROW`.
        reader: reads the archives.
    """

    tars: tuple[str, ...]
    marks: np.ndarray
    names: Names
    places: np.ndarray
    table: np.ndarray
    reader: Reader = read_local

    def __len__(self) -> int:
        return len(self.names)

    @property
    def block_sizes(self) -> np.ndarray:
        """How many consecutive images are in the same archive, in order."""
        ends = np.flatnonzero(np.diff(self.places, append=-1)) + 1
        return np.diff(ends, prepend=0)

    def item_name(self, index: int) -> str:
        """The archive and member, for messages."""
        return f"{self.tars[self.places[index]]}/{self.names[index]}"

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
        """16 hexadecimal digits of the names and sizes, and the archives' paths, sizes and modification times."""
        used = np.unique(self.places)
        tars = (os.path.realpath(self.tars[number]) for number in used)
        return fingerprint_of([self.fingerprint() + fingerprint_of(tars, self.marks[used, 0], self.marks[used, 1])])

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the members at `indices` only."""
        names, places, table = self.names.take(indices), self.places[indices], self.table[indices]
        return replace(self, names=names, places=places, table=table, note=note)

    def classes(self) -> list[str] | None:
        """The number in the `.cls` member that belongs to each image, as text; None where there is none at all.

        Raises:
            UsageError: an image without one, or one that is not a number.
        """
        labelled = self.table["label_length"] > 0
        if not labelled.any():
            return None
        if not labelled.all():
            lonely = self.item_name(int(np.argmin(labelled)))
            raise UsageError(f"{lonely} has no {_LABEL} file, though others have; expected one for each image")
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
            raise UsageError(f"{place} holds {text[:_MAX_LABEL]!r}; expected a class number")
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
            raise UnreadableImage(f"{name} is gone; the tar was changed since it was opened")
        return data


def tars_below(folder: Path) -> list[Path]:
    """The tar archives in a folder, sorted; none where there are images beside them.

    Raises:
        UsageError: there are only compressed ones.
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
    """Whether a name is that of a compressed tar."""
    return path.lower().endswith(_COMPRESSED)


def expand_braces(pattern: str) -> list[Path]:
    """The paths a pattern stands for: `{000..099}` for numbers, `{a,b}` for words, as in a shell.

    Raises:
        UsageError: more than 100,000 paths.
    """
    return list(map(Path, _expanded(pattern)))


def _expanded(pattern: str) -> list[str]:
    paths, rest = [""], pattern
    while rest:
        before, choices, rest = _first_braces(rest)
        if len(paths) * len(choices) > _MAX_TARS:
            raise UsageError(f"{pattern} stands for more than {_MAX_TARS:,} files; expected at most that many")
        paths = [path + before + choice for path in paths for choice in choices]
    return paths


def _first_braces(pattern: str) -> tuple[str, list[str], str]:
    """What stands before the first braces that offer a choice, the choices, and what follows."""
    for start in (found.start() for found in re.finditer(r"\{", pattern)):
        end, parts = _inside(pattern, start)
        if choices := _choices(parts):
            return pattern[:start], choices, pattern[end + 1 :]
    return pattern, [""], ""


def _inside(pattern: str, start: int) -> tuple[int, list[str]]:
    """Where the braces that begin there end, and what they hold, cut at commas that lie in no braces within.

    Braces without an end hold nothing.
    """
    depth, cuts = 0, [start]
    for at in range(start, len(pattern)):
        depth += (pattern[at] == "{") - (pattern[at] == "}")
        if pattern[at] == "," and depth == 1:
            cuts.append(at)
        if depth == 0:
            return at, [pattern[one + 1 : other] for one, other in pairwise([*cuts, at])]
    return len(pattern), []


def _choices(parts: list[str]) -> list[str]:
    """What braces around such parts stand for; nothing where they are plain text."""
    if len(parts) > 1:
        return [choice for part in parts for choice in _expanded(part)]
    if not parts or not (ends := _SEQUENCE.fullmatch(parts[0])):
        return []
    first, last = int(ends[1]), int(ends[2])
    padded = any(len(end) > 1 and end.startswith("0") for end in ends.groups())
    width = max(map(len, ends.groups())) if padded else 0
    step = 1 if first <= last else -1
    numbers = range(first, last + step, step)
    return [f"{number:0{width}}" for number in itertools.islice(numbers, _MAX_TARS + 1)]


def open_tars(paths: Sequence[Path], *, name: str) -> TarSource:
    """All images of some tar archives, in the order given.

    An archive belongs to a split where its folder below their common folder, or a word of its own name, is `train`,
    `test`, `val` or `validation`, as in `imagenet-train-000000.tar`; the names of its members then begin with it.

    Args:
        paths: of the archives.
        name: what the user called them.

    Raises:
        UsageError: one is missing, not a whole tar or compressed, or none holds an image.
    """
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise UsageError(f"{name}: {len(missing):,} of {len(paths):,} tars are missing, such as {missing[0]}")
    if compressed := [path for path in paths if is_compressed(path.name)]:
        raise UsageError(_compressed(str(compressed[0])))
    with ThreadPoolExecutor(min(len(paths), 16)) as pool:  # on a network file system each header takes its time
        indexes = list(pool.map(partial(_index, folder=_index_folder()), paths))
    skipped: Counter[str] = sum((index.skipped for index in indexes), Counter())
    others = Counter({what: skipped.pop(what) for what in [*skipped] if what[:1] in ("", ".")})
    faults = {what: skipped.pop(what) for what in (MORE_BEHIND, NO_END) if what in skipped}
    if not any(index.names for index in indexes):
        check_any([], others, name=name)
    root = Path(os.path.commonpath([path.absolute().parent for path in paths]))
    above = [_above(path, root) for path in paths]
    left_out = visible(", ".join(f"{count:,} {what}" for what, count in sorted(skipped.items())))
    skipped_note = f"; skipped: {left_out}" if left_out else ""
    skipped_note += "".join(f"; {count_of(count, 'tar')} {what}" for what, count in faults.items())
    total = sum(len(index.names) for index in indexes)
    return TarSource(
        name=name,
        note=f"{count_of(len(paths), 'tar')}, {count_of(total, 'file')}{skipped_note}{unread_note(others)}",
        tars=tuple(map(str, paths)),
        marks=np.array([index.mark for index in indexes], dtype=np.int64),
        names=Names(part + each for part, index in zip(above, indexes, strict=True) for each in index.names),
        places=np.repeat(np.arange(len(paths)), [len(index.names) for index in indexes]),
        table=np.concatenate([index.table for index in indexes]),
    )


def _compressed(path: str) -> str:
    return (
        f"{path} is a compressed tar, in which no image can be read by itself; decompress it: the images in it are "
        f"already compressed"
    )


def _above(path: Path, root: Path) -> str:
    """The folders above the members of an archive, with a slash at the end."""
    folders = path.absolute().parent.relative_to(root).parts
    words = re.split(r"[-_.]", path.stem.lower())
    part = next((word for word in words if word in (*TRAIN, *TEST)), None)
    if part is not None and not any(folder.lower() in (*TRAIN, *TEST) for folder in folders[:1]):
        folders = (part, *folders)
    return "".join(f"{folder}/" for folder in folders)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Index:
    """What one archive holds; `skipped` counts what was skipped over, files that are no images by their extension."""

    mark: tuple[int, int]
    names: list[str]
    table: np.ndarray
    skipped: Counter[str]


def _index_folder() -> Path | None:
    """Where indexes are cached; None where the user has no trustworthy cache."""
    try:
        return user_cache().root / "indexes"
    except UsageError:
        return None


def _index(path: Path, folder: Path | None) -> _Index:
    """From the user's cache if it is there, else from the archive."""
    status = path.stat()
    mark = status.st_size, status.st_mtime_ns
    kept = folder and folder / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.npz"
    if kept and (index := _load_index(kept, mark)) is not None:
        return index
    try:
        with path.open("rb", buffering=0) as file:

            def read(offset: int, length: int) -> bytes:
                file.seek(offset)
                return file.read(length)

            index = _walked(members(read, status.st_size, name=str(path)), mark)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if kept and time.time() - status.st_mtime > _STABLE_SECONDS:
        _save_index(kept, index)
    return index


def _walked(found: Iterator[Member], mark: tuple[int, int]) -> _Index:
    images: dict[str, Member] = {}
    labels: dict[str, Member] = {}
    skipped: Counter[str] = Counter()
    for member in found:
        name = plain_path(member.name)
        if member.kind == "fault":
            skipped[member.name] += 1
        elif member.kind == "folder" or not is_visible(name):
            # ".." begins with a dot as hidden names do, but is never there by chance.
            skipped["names that lead out"] += ".." in name.split("/")
        elif member.name.startswith("/"):
            skipped["names that lead out"] += 1
        elif member.kind != "file":
            skipped["links" if member.kind == "link" else "devices and the like"] += 1
        elif is_image(name):
            skipped["older versions of a file"] += name in images
            images.pop(name, None)  # the last one counts, as where a tar is extracted
            images[name] = member
        elif name.endswith(_LABEL):
            labels[_key(name)] = member
        else:
            skipped[os.path.splitext(name)[1].lower()] += 1
    nothing = Member("", "file", 0, 0)
    rows = [(image, labels.get(_key(name), nothing)) for name, image in images.items()]
    table = np.array([(image.offset, image.length, label.offset, label.length) for image, label in rows], dtype=_ROW)
    return _Index(mark=mark, names=list(images), table=table, skipped=+skipped)


def _key(name: str) -> str:
    """The key that the files of one sample share: everything before the first dot of the last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.split(".")[0]


def _load_index(path: Path, mark: tuple[int, int]) -> _Index | None:
    """The cached index of an archive of the same size and modification time; None where there is no whole one."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in ("mark", "names", "table", "skipped")}
        names = arrays["names"].tobytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
        skipped = dict(
            line.rsplit("\t", 1)
            for line in arrays["skipped"].tobytes().decode("utf-8", "surrogateescape").split("\n")
            if line
        )
        index = _Index(
            mark=mark,
            names=names,
            table=arrays["table"],
            skipped=Counter({what: int(count) for what, count in skipped.items()}),
        )
    # No file, or a truncated or changed one: the archive must be read again.
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    table = index.table
    if arrays["mark"].tolist() != [_INDEX_VERSION, *mark] or table.dtype != _ROW or table.shape != (len(names),):
        return None
    parts = [(table[place], table[length]) for place, length in (("offset", "length"), ("label", "label_length"))]
    # Not by their sums, which could wrap around.
    inside = all(((place <= mark[0]) & (length <= mark[0] - place)).all() for place, length in parts)
    return index if inside else None


def _save_index(path: Path, index: _Index) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    names = "".join(name + "\0" for name in index.names).encode("utf-8", "surrogateescape")
    skipped = "\n".join(f"{what}\t{count}" for what, count in index.skipped.items()).encode("utf-8", "surrogateescape")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with aside.open("wb") as file:
            np.savez(
                file,
                mark=np.array([_INDEX_VERSION, *index.mark]),
                names=np.frombuffer(names, dtype=np.uint8),
                table=index.table,
                skipped=np.frombuffer(skipped, dtype=np.uint8),
            )
        aside.replace(path)
    except OSError:  # a full disk or a read-only home: the next start reads the headers again
        with suppress(OSError):
            aside.unlink()
