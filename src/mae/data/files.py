"""Images in files: folders, lists of paths and zip archives, which are read in place and never extracted."""

import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from errno import ELOOP, ENOENT
from pathlib import Path
from stat import S_ISDIR, S_ISREG

import numpy as np

from mae.data.base import Names, digest_of_file, fingerprint_of
from mae.data.decoding import HEADER_BYTES, decode, probe, recognise
from mae.data.limits import ImageInfo, UnreadableImage, check_num_bytes
from mae.errors import UsageError

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".tif", ".tiff", ".bmp", ".npy")

NAMES_FILE = "channels.txt"
"""Beside the images: a name a line for each channel of theirs, in order."""

_MAX_NAMES_BYTES, _MAX_NAMES, _MAX_NAME = 1 << 16, 1024, 100
_MAX_LINE = 1 << 16
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_READABLE_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, kw_only=True, eq=False)
class FileSource:
    """Image files below a folder; `names` are paths relative to it, with `/`.

    `sizes` in bytes and `times` of the last change in nanoseconds are those at opening; `channels` are the names in the
    folder's `channels.txt`, `bands` is what `decode` is told.
    """

    name: str
    note: str
    root: Path
    names: Names
    sizes: np.ndarray
    times: np.ndarray
    channels: tuple[str, ...] | None = None
    bands: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    def item_name(self, index: int) -> str:
        """The path, for messages."""
        return str(self.root / self.names[index])

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`; raises `UnreadableImage`."""
        name = self.item_name(index)
        return _as_named(decode(self.read(index), name=name, bands=self.bands), self.channels, name)

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give; raises `UnreadableImage`."""
        name = self.item_name(index)
        return _named(probe(self.read(index), name=name, bands=self.bands), self.channels, name)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names and sizes in order."""
        return fingerprint_of(self.names, self.sizes)

    def content(self, index: int) -> str:
        """16 hexadecimal digits of the file, see `digest_of_file`."""
        return digest_of_file(self.root / self.names[index])

    def version(self) -> str:
        """16 hexadecimal digits of the folder, the names, sizes, times of the last change and names of channels."""
        files = fingerprint_of(self.names, self.sizes, self.times)
        return fingerprint_of([f"{self.root.resolve()} {files}", *(self.channels or ())])

    def take(self, indices: np.ndarray, note: str) -> "FileSource":
        """The files at `indices` alone."""
        names, sizes, times = self.names.take(indices), self.sizes[indices], self.times[indices]
        return replace(self, names=names, sizes=sizes, times=times, note=note)

    def read(self, index: int) -> bytes:
        """The file as it is; raises `UnreadableImage`."""
        path = self.root / self.names[index]
        try:
            check_num_bytes(path.stat().st_size, name=str(path))
            return path.read_bytes()
        except OSError as error:
            raise UnreadableImage(f"{path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ZipSource:
    """Image members of a zip archive; `table` has a row for each member: offset, packed, size, crc, method.

    `channels` are the names in the `channels.txt` at its top, `bands` is what `decode` is told.

    The archive is opened anew for each read. That costs 20 us, and leaves no open file or position that worker
    processes or threads could share.
    """

    name: str
    note: str
    path: Path
    names: Names
    table: np.ndarray
    channels: tuple[str, ...] | None = None
    bands: int | None = None

    def __len__(self) -> int:
        return len(self.names)

    def item_name(self, index: int) -> str:
        """The path, for messages."""
        return f"{self.path}/{self.names[index]}"

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`; raises `UnreadableImage`."""
        name = self.item_name(index)
        return _as_named(decode(self.read(index), name=name, bands=self.bands), self.channels, name)

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give; raises `UnreadableImage`."""
        name = self.item_name(index)
        return _named(probe(self.read(index), name=name, bands=self.bands), self.channels, name)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums in order."""
        return fingerprint_of(self.names, self.table[:, 2], self.table[:, 3])

    def content(self, index: int) -> str:
        """The member's checksum."""
        return f"{self.table[index, 3]:08x}"

    def version(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums, and the channels' names."""
        return fingerprint_of([self.fingerprint(), *(self.channels or ())])

    def take(self, indices: np.ndarray, note: str) -> "ZipSource":
        """The members at `indices` alone."""
        return replace(self, names=self.names.take(indices), table=self.table[indices], note=note)

    def read(self, index: int) -> bytes:
        """The file as it is; raises `UnreadableImage`."""
        offset, packed, size, crc, method = (int(value) for value in self.table[index])
        name = self.item_name(index)
        check_num_bytes(max(packed, size), name=name)
        if method not in _READABLE_METHODS:
            raise UnreadableImage(f"{name} is packed by zip method {method}; expected stored or deflate")
        try:
            with self.path.open("rb") as archive:
                if offset + packed > os.fstat(archive.fileno()).st_size:  # else memory would be taken for it
                    raise UnreadableImage(f"{name} reaches beyond the archive's end; the zip is broken")
                archive.seek(offset)
                magic, name_length, extra_length = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
                if magic != b"PK\3\4":
                    raise UnreadableImage(f"{name} is not where the archive's directory says; the zip is broken")
                archive.seek(name_length + extra_length, os.SEEK_CUR)
                data = archive.read(packed)
            data = _inflate(data, size, name) if method == zipfile.ZIP_DEFLATED else data
        except (OSError, struct.error, zlib.error) as error:
            raise UnreadableImage(f"{name} cannot be read from the archive: {error}") from error
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableImage(f"{name} does not match its checksum; the zip is damaged")
        return data


def _inflate(packed: bytes, size: int, name: str) -> bytes:
    """At most `size + 1` bytes, and none beyond the header unless that is an image's: bombs stay small."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    head = inflater.decompress(packed, min(HEADER_BYTES, size))
    recognise(head, name=name)
    return head + inflater.decompress(inflater.unconsumed_tail, size - len(head) + 1)


def open_folder(root: Path, *, name: str) -> FileSource:
    """All images below a folder, sorted by path; hidden files, `__MACOSX` and loops of links are passed over.

    Raises:
        UsageError: no images.
    """
    found = sorted(walk(root))
    images = [file for file in found if is_image(file[0])]
    check_any(images, [file[0] for file in found], name=name)
    return _file_source(images, name=name, kind="folder", root=root)


def open_list(path: Path, *, name: str) -> FileSource:
    """The images a text file lists, in its order: a path a line, relative to the list; `#` starts a comment line.

    Raises:
        UsageError: no paths, or one that does not exist.
    """
    root, files = path.parent, []
    # Windows editors begin UTF-8 files with a byte order mark, which "utf-8-sig" takes away.
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as text:
        # A line longer than any path is cut, so that a file of another kind is not read whole.
        for number, line in enumerate(iter(lambda: text.readline(_MAX_LINE), ""), start=1):
            entry = line.strip()
            if not entry or entry.startswith("#"):
                continue
            if (status := _status(root / entry)) is None:
                raise UsageError(f"{name}, line {number}: {entry:.200} is not a file; paths are relative to {root}")
            files.append((entry, status.st_size, status.st_mtime_ns))
    if not files:
        raise UsageError(f"{name} lists no images; expected a path a line")
    return _file_source(files, name=name, kind="list", root=root)


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
    channels = names_beside(root)
    return FileSource(
        name=name,
        note=f"{kind}, {_count(len(files))}",
        root=root,
        names=Names(paths),
        sizes=np.array(sizes, dtype=np.int64),
        times=np.array(times, dtype=np.int64),
        channels=channels,
        bands=None if channels is None else len(channels),
    )


def names_above(folder: Path) -> tuple[str, ...] | None:
    """The names in the nearest `channels.txt`, in a folder or above it; see `names_beside`."""
    above = (folder.absolute(), *folder.absolute().parents)
    return next((names for place in above if (names := names_beside(place)) is not None), None)


def names_beside(folder: Path) -> tuple[str, ...] | None:
    """The channels' names in a folder's `channels.txt`; None where there is none.

    Raises:
        UsageError: it does not hold a name of its own a line, or is too large for that.
    """
    path = folder / NAMES_FILE
    if _status(path) is None:
        return None
    try:
        with path.open("rb") as file:
            return _channel_names(file.read(_MAX_NAMES_BYTES + 1), name=str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def _channel_names(data: bytes, *, name: str) -> tuple[str, ...]:
    lines = data.decode("utf-8-sig", "replace").splitlines() if len(data) <= _MAX_NAMES_BYTES else []
    names = tuple(line.strip() for line in lines if line.strip())
    usable = all(len(each) <= _MAX_NAME and "," not in each and each.isprintable() for each in names)
    if not usable or len(set(names)) < len(names) or not 0 < len(names) <= _MAX_NAMES:
        raise UsageError(
            f"{name} does not name channels; expected a line each, up to {_MAX_NAMES:,} different names of at most "
            f"{_MAX_NAME} printable characters, without commas"
        )
    return names


def _named(info: ImageInfo, names: tuple[str, ...] | None, name: str) -> ImageInfo:
    """With the names that stand beside the images, which go before those in the files."""
    if names is None:
        return info
    _check_count(info.channels, names, name)
    return replace(info, names=names, own_names=False)


def _as_named(image: np.ndarray, names: tuple[str, ...] | None, name: str) -> np.ndarray:
    if names is not None:
        _check_count(image.shape[2], names, name)
    return image


def _check_count(channels: int, names: tuple[str, ...], name: str) -> None:
    if channels != len(names):
        raise UnreadableImage(f"{name} has {channels} channels, and {NAMES_FILE} names {len(names)}; expected as many")


def open_zip(path: Path, *, name: str) -> ZipSource:
    """All images of a zip archive, sorted by member name.

    Raises:
        UsageError: broken, encrypted, or without images.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            named = [member for member in archive.infolist() if member.filename]
            members = sorted((member for member in named if not member.is_dir()), key=lambda member: member.filename)
            channels = _names_in(archive, members, name=name)
    # Reading a member may raise zlib's own error.
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise UsageError(f"{name} is not a whole zip archive: {error}") from error
    images = [member for member in members if is_visible(member.filename) and is_image(member.filename)]
    check_any(images, [m.filename for m in members if is_visible(m.filename)], name=name)
    if any(member.flag_bits & 1 for member in images):
        raise UsageError(f"{name} is encrypted; expected a zip without a password")
    table = [(m.header_offset, m.compress_size, m.file_size, m.CRC, m.compress_type) for m in images]
    for member, row in zip(images, table, strict=True):
        if max(row) > np.iinfo(np.int64).max:
            raise UsageError(f"{name} is not a whole zip archive: {member.filename} has an impossible size or place")
    return ZipSource(
        name=name,
        note=f"zip, {_count(len(images))}",
        path=path,
        names=Names(member.filename for member in images),
        table=np.array(table, dtype=np.int64),
        channels=channels,
        bands=None if channels is None else len(channels),
    )


def _names_in(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo], *, name: str) -> tuple[str, ...] | None:
    """The channels' names at the top of an archive, or of its one folder."""
    tops = {member.filename.split("/")[0] for member in members}
    places = [NAMES_FILE, *(f"{top}/{NAMES_FILE}" for top in tops if len(tops) == 1)]
    found = [member for member in members if member.filename in places]
    if not found:
        return None
    member = found[0]
    if member.compress_type not in _READABLE_METHODS:
        raise UsageError(
            f"{name}/{member.filename} is compressed by zip method {member.compress_type}; expected stored or deflated"
        )
    with archive.open(member) as file:
        return _channel_names(file.read(_MAX_NAMES_BYTES + 1), name=f"{name}/{member.filename}")


def walk(root: Path) -> Iterator[tuple[str, int, int]]:
    """Path, size in bytes and time of the last change in nanoseconds of each file."""
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
            if error.errno in (ENOENT, ELOOP):  # a link to nothing, or to itself
                continue
            raise
        if S_ISDIR(status.st_mode):
            identity = _identity(Path(entry.path))
            if identity not in seen:  # a link may lead back up
                seen.add(identity)
                open_folders.append((path + "/", _entries(Path(entry.path))))
        elif S_ISREG(status.st_mode):  # neither a pipe nor a device
            yield path, status.st_size, status.st_mtime_ns


def _entries(folder: Path) -> "Iterator[os.DirEntry[str]]":
    """What is visible in a folder, sorted by name."""
    try:
        entries = [entry for entry in os.scandir(folder) if is_visible(entry.name)]
    except OSError as error:
        raise UsageError(f"{folder} cannot be listed: {error.strerror}") from error
    return iter(sorted(entries, key=lambda entry: entry.name))


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def is_visible(path: str) -> bool:
    """Whether neither the file nor a folder above it is hidden or macOS's own."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in path.split("/"))


def is_image(path: str) -> bool:
    """Whether the name is an image's by its end."""
    return path.lower().endswith(EXTENSIONS)


def check_any(images: Sequence[object], paths: Iterable[str], *, name: str) -> None:
    """Refuses what holds no images, and tells what it holds instead.

    Args:
        images: what was found.
        paths: all files that were looked at.
        name: what the user called it.

    Raises:
        UsageError: no images.
    """
    if images:
        return
    found = Counter(os.path.splitext(path)[1].lower() or "without extension" for path in paths)
    others = ", ".join(f"{count:,} {extension}" for extension, count in found.most_common(5)) or "nothing"
    raise UsageError(f"{name} holds no images: looked for {' '.join(EXTENSIONS)}; found {others}")


def _count(number: int) -> str:
    return f"{number:,} file{'' if number == 1 else 's'}"
