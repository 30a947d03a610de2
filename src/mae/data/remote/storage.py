"""The files of a pack in a folder or behind a URL: read whole, in parts, or as a local file."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import ClassVar, Protocol, runtime_checkable

from mae.data.items import fingerprint_of
from mae.data.remote.urls import MANIFEST as MANIFEST
from mae.errors import MAEError, UsageError

MAX_MANIFEST = 16 << 20
"""Bytes of the largest `pack.json` that is read: some 40,000 shards."""


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """What is known of a file before it is read.

    Attributes:
        name: relative to the store, with `/`.
        num_bytes: its size.
        sha256: of its content, 64 hexadecimal digits; for `Cache.fetch_unknown` only the first ones, as far as known.

    Raises:
        UsageError: a name that leads out of the store.
    """

    name: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        check_stored_name(self.name)


@runtime_checkable  # so that type checks while testing can tell one
class Storage(Protocol):
    """Read-only files below one place."""

    @property
    def place(self) -> str:
        """The folder or URL, for messages."""
        ...

    @property
    def room(self) -> int | None:
        """Bytes of the cache that files are fetched into; None: files are local."""
        ...

    def version(self) -> str:
        """A text that changes when a file is changed in place."""
        ...

    def whole(self, name: str, *, limit: int) -> bytes:
        """A small file of unknown content; raises `UsageError` if it does not exist or has over `limit` bytes."""
        ...

    def local(self, file: StoredFile) -> Path:
        """The path of a local file with this content; raises `MAEError` if it cannot be fetched."""
        ...

    def part(self, file: StoredFile, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset` on, never fewer; raises `MAEError` if they cannot be read."""
        ...

    def prefetch(self, files: Iterable[StoredFile]) -> None:
        """Begins to fetch files in this order, and returns at once."""
        ...


@dataclass(frozen=True, kw_only=True)
class LocalStorage:
    """A folder.

    A file is opened anew for each part. That costs 7 us, and leaves no open file or position that worker processes or
    threads could share.
    """

    root: Path
    room: ClassVar[None] = None

    @property
    def place(self) -> str:
        """The folder, for messages."""
        return str(self.root)

    def version(self) -> str:
        """16 hexadecimal digits of the folder and its files' names, sizes and modification times."""
        try:
            found = sorted((entry.name, entry.stat()) for entry in os.scandir(self.root) if entry.is_file())
        except OSError as error:
            raise MAEError(f"{self.root} cannot be listed: {error.strerror}") from error
        files = (f"{name} {status.st_size} {status.st_mtime_ns}" for name, status in found)
        return fingerprint_of([str(self.root.resolve()), *files])

    def whole(self, name: str, *, limit: int) -> bytes:
        """See `Storage`."""
        check_stored_name(name)
        path = self.root / name
        try:
            status = path.stat()
            if not S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
                raise UsageError(f"{path} is not a file")
            with path.open("rb") as file:  # memory is allocated for all that may be read
                data = file.read(min(status.st_size, limit) + 1)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
        if len(data) > limit:
            raise UsageError(f"{path} has more than {limit:,} bytes; expected at most that many")
        return data

    def local(self, file: StoredFile) -> Path:
        """The file itself; only its size is checked. See `Storage`."""
        path = self.root / file.name
        try:
            status = path.stat()
        except OSError as error:
            raise MAEError(f"{path} cannot be read: {error.strerror}") from error
        if not S_ISREG(status.st_mode):
            raise MAEError(f"{path} is not a file")
        _check_num_bytes(path, status.st_size, file)
        return path

    def part(self, file: StoredFile, offset: int, length: int) -> bytes:
        """See `Storage`."""
        path = self.root / file.name
        check_part(file, offset, length, what=str(path))
        try:
            with open(path, "rb", buffering=0) as stream:
                _check_num_bytes(path, os.fstat(stream.fileno()).st_size, file)
                stream.seek(offset)
                data = stream.read(length)
                while len(data) < length and (more := stream.read(length - len(data))):
                    data += more  # without a buffer a system may give less than it has
        except OSError as error:
            raise MAEError(f"{path} cannot be read: {error.strerror}") from error
        if len(data) != length:
            raise MAEError(f"{path} ends early: {len(data):,} of {length:,} bytes from {offset:,} on are present")
        return data

    def prefetch(self, files: Iterable[StoredFile]) -> None:
        """Nothing to do: the files are local."""


def check_part(file: StoredFile, offset: int, length: int, *, what: str) -> None:
    """Refuses a part outside the file.

    Raises:
        MAEError: it reaches beyond the file.
    """
    if not 0 <= offset <= offset + length <= file.num_bytes:
        raise MAEError(f"{what} has {file.num_bytes:,} bytes; {length:,} from {offset:,} on reach beyond them")


def check_stored_name(name: str) -> None:
    """Refuses names that lead out of a store.

    Raises:
        UsageError: an absolute one, or one with `..`, a backslash, a drive or unprintable characters.
    """
    parts = name.split("/")
    harmless = all(part not in ("", ".", "..") for part in parts) and name.isprintable()
    if not harmless or "\\" in name or ":" in name or PurePosixPath(name).is_absolute():
        raise UsageError(f"{name[:200]!r} is not the name of a file in a pack; expected one that stays inside it")


def _check_num_bytes(path: Path, found: int, file: StoredFile) -> None:
    if found != file.num_bytes:
        raise MAEError(f"{path} has {found:,} bytes; expected {file.num_bytes:,}: changed or copied incompletely")
