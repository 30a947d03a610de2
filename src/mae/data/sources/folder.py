"""Images in files: folders and lists of paths."""

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from errno import ELOOP, ENOENT, ENOTDIR
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Self

import numpy as np

from mae.data.decode.image import EXTENSIONS, UNREAD_EXTENSIONS
from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.items import Names, digest_of_file, fingerprint_of
from mae.data.sources.channel_names import names_beside
from mae.data.sources.source import TEST, TRAIN, Source
from mae.errors import UsageError
from mae.text import visible

_MAX_LINE = 1 << 16
_ARCHIVES = (".tar", ".zip", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z", ".rar")
"""What names of files end in that may hold images, and are not looked into where images lie beside them."""
_SYSTEMS_OWN = frozenset(
    {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
)  # of macOS, Synology's drives, Windows and Linux


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource(Source):
    """Image files below a folder; `names` are paths relative to it, with `/`.

    `sizes` in bytes and modification `times` in nanoseconds are those at opening; `channels` are the names in the
    folder's `channels.txt`. `listed`: a list names them, so that they may be relative to any folder, or absolute.
    """

    root: Path
    names: Names
    sizes: np.ndarray
    times: np.ndarray
    listed: bool = False

    def __len__(self) -> int:
        return len(self.names)

    def item_name(self, index: int) -> str:
        """The path, for messages."""
        return str(self.root / self.names[index])

    def read(self, index: int) -> bytes:
        """The content of the file; raises `UnreadableImage`."""
        path = self.root / self.names[index]
        try:
            check_num_bytes(path.stat().st_size, name=str(path))
            return path.read_bytes()
        except OSError as error:
            raise UnreadableImage(f"{path} cannot be read: {error.strerror}") from error

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        return fingerprint_of(self.names, self.sizes)

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the file, see `digest_of_file`."""
        return digest_of_file(self.root / self.names[index])

    def version(self) -> str:
        """16 hexadecimal digits of the folder, the names, sizes, modification times and channel names."""
        files = fingerprint_of(self.names, self.sizes, self.times)
        return fingerprint_of([f"{self.root.resolve()} {files}", *(self.channels or ())])

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the files at `indices` only."""
        names, sizes, times = self.names.take(indices), self.sizes[indices], self.times[indices]
        return replace(self, names=names, sizes=sizes, times=times, note=note)


def open_folder(root: Path, *, name: str) -> FileSource:
    """All images below a folder, sorted by path; hidden files, systems' own folders and link loops are skipped.

    Raises:
        UsageError: no images.
    """
    again, lost = list[str](), list[str]()
    found = sorted(walk(root, again=again, lost=lost))
    images = [file for file in found if is_image(file[0])]
    others = endings(file[0] for file in found)
    check_any(images, others, name=name)
    source = _file_source(images, name=name, kind="folder", root=root)
    linked = f"; {count_of(len(again), 'link')} to folders listed once already skipped: {again[0]}" if again else ""
    gone = sorted(filter(is_image, lost))
    linked += f"; {count_of(len(gone), 'link')} to nothing skipped: {gone[0]}" if gone else ""
    return replace(source, note=source.note + unread_note(others) + visible(linked))


def open_list(path: Path, *, name: str) -> FileSource:
    """The images a text file lists, in its order: one path a line, relative to the list; `#` starts a comment line.

    Raises:
        UsageError: no paths, or one that does not exist.
    """
    root, files = path.parent, []
    # Windows editors begin UTF-8 files with a byte order mark, which "utf-8-sig" removes.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as text:
        # A line longer than any path is cut, so that a file of another kind is not read whole.
        for number, line in enumerate(iter(lambda: text.readline(_MAX_LINE), ""), start=1):
            entry = line.strip()
            if not entry or entry.startswith("#"):
                continue
            if (status := _status(root / entry)) is None:
                raise UsageError(f"{name}, line {number}: {entry:.200} is not a file; paths are relative to {root}")
            files.append((entry.removeprefix("./"), status.st_size, status.st_mtime_ns))
    if not files:
        raise UsageError(f"{name} lists no images; expected one path a line")
    return _file_source(files, name=name, kind="list", root=root)


def open_files(root: Path, names: Sequence[str]) -> tuple[FileSource | None, list[int]]:
    """Those of some paths below a folder that are files, in their order.

    Returns:
        The source, None where there is none of them; and the positions of those there are.
    """
    found = [(row, name, status) for row, name in enumerate(names) if (status := _status(root / name)) is not None]
    if not found:
        return None, []
    files = [(name, status.st_size, status.st_mtime_ns) for _, name, status in found]
    return _file_source(files, name=str(root), kind="folder", root=root), [row for row, _, _ in found]


def _status(path: Path) -> os.stat_result | None:
    """Of a regular file; None for anything else, and for a name that no file can have."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a NUL in it
        return None
    return status if S_ISREG(status.st_mode) else None


def _file_source(files: list[tuple[str, int, int]], *, name: str, kind: str, root: Path) -> FileSource:
    """Of paths, sizes and times."""
    paths, sizes, times = zip(*files, strict=True)
    return FileSource(
        name=name,
        note=f"{kind}, {count_of(len(files), 'file')}",
        root=root,
        names=Names(paths),
        sizes=np.array(sizes, dtype=np.int64),
        times=np.array(times, dtype=np.int64),
        channels=_channels_of(root),
        listed=kind == "list",
    )


def _channels_of(root: Path) -> tuple[str, ...] | None:
    """The names in the `channels.txt` of a folder; of a part of a set, such as `train/`, also in that of the set."""
    names, folder = names_beside(root), root.absolute()
    if names is None and folder.name.lower() in (*TRAIN, *TEST):
        return names_beside(folder.parent)
    return names


def walk(
    root: Path, *, again: list[str] | None = None, lost: list[str] | None = None
) -> Iterator[tuple[str, int, int]]:
    """Path, size in bytes and modification time in nanoseconds of each file.

    Args:
        root: the folder.
        again: gets the links to folders that are listed elsewhere, or lead back up, which are skipped.
        lost: gets the links to nothing, which are skipped.
    """
    seen, open_folders = {_identity(root)}, [("", _entries(root))]
    while open_folders:  # no recursion: folders may be nested deeper than Python calls
        below, entries = open_folders[-1]
        if (entry := next(entries, None)) is None:
            open_folders.pop()
            continue
        path = below + entry.name
        try:
            status = entry.stat()
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR, ELOOP):  # a link to nothing, or to itself
                raise
            if lost is not None:
                lost.append(path)
            continue
        if S_ISDIR(status.st_mode):
            identity = _identity(Path(entry.path))
            if identity not in seen:
                seen.add(identity)
                open_folders.append((path + "/", _entries(Path(entry.path))))
            elif again is not None:
                again.append(path)
        elif S_ISREG(status.st_mode):  # neither a pipe nor a device
            yield path, status.st_size, status.st_mtime_ns


def _entries(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """The visible entries of a folder, sorted by name."""
    try:
        entries = [entry for entry in os.scandir(folder) if is_visible(entry.name)]
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}") from error
    return iter(sorted(entries, key=lambda entry: entry.name))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def is_visible(path: str) -> bool:
    """Whether neither the file nor a folder above it is hidden or some system's own."""
    return not any(part.startswith(".") or part in _SYSTEMS_OWN for part in path.split("/"))


def plain_path(name: str) -> str:
    """A name in an archive without what leads nowhere else: empty parts and `.`."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def is_image(path: str) -> bool:
    """Whether the name has an image's extension."""
    return path.lower().endswith(EXTENSIONS)


def endings(paths: Iterable[str]) -> Counter[str]:
    """How many of some files have each extension, in small letters; empty: none."""
    return Counter(os.path.splitext(path)[1].lower() for path in paths)


def check_any(images: Collection[object], found: Counter[str], *, name: str) -> None:
    """Refuses what holds no images, and says what it holds instead.

    Args:
        images: those found.
        found: `endings` of all files that were looked at.
        name: what the user called it.

    Raises:
        UsageError: no images.
    """
    if images:
        return
    others = ", ".join(f"{n:,} {each or 'without extension'}" for each, n in found.most_common(5)) or "nothing"
    advice = "; convert those to PNG, JPEG or TIFF first" if found.keys() & {*UNREAD_EXTENSIONS} else ""
    raise UsageError(f"{name} holds no images: looked for {' '.join(EXTENSIONS)}; found {others}{advice}")


def unread_note(found: Counter[str]) -> str:
    """What to add to a source's note about images in formats that are not read, and archives; empty without any.

    Args:
        found: `endings` of all files.
    """
    unread = {*UNREAD_EXTENSIONS, *_ARCHIVES}
    told = [f"{count:,} {each}" for each, count in found.most_common() if each in unread]
    return f"; not read: {', '.join(told)}" if told else ""


def count_of(number: int, what: str) -> str:
    """Such as `1 file` or `2,000 files`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
