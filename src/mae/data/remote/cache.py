"""Fetched files, stored by content in a folder of bounded size that the processes of a machine share."""

import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from stat import S_ISDIR
from typing import BinaryIO

from filelock import FileLock, Timeout

from mae.data.remote.storage import StoredFile
from mae.errors import MAEError, UsageError
from mae.records import read_json, write_json

FOLDER, GIGABYTES = "OPENMAE_CACHE", "OPENMAE_CACHE_GB"
"""Environment variables: the cache folder, and its maximum size in billions of bytes."""

_DEFAULT_GIGABYTES = 50.0
_GB = 1e9
_ROOM = "room"
_LOCKS = "locks"
_KEPT = re.compile(r"([0-9a-f]{64})(\.[0-9a-f]{16})?")  # an entry; with a suffix, one being fetched
_WAIT_SECONDS = 0.2
_NOTED_SECONDS = 10  # a use is not recorded again within them: that would be a write per image
_CHUNK = 1 << 20
_VERIFIED_NS = 1_000_000_000 * 10**9
"""The modification time of verified files, in 2001: whole seconds, which every file system can store."""

_log = logging.getLogger(__name__)


class WrongContent(Exception):
    """The fetched file is not the expected one."""


class Truncated(WrongContent):
    """The fetched file may be the beginning of the expected one."""


@dataclass(kw_only=True, eq=False)
class Draft:
    """A file while it is fetched.

    Attributes:
        file: the expected file.
        stream: where it is written.
        num_bytes: bytes written so far.
    """

    file: StoredFile
    stream: BinaryIO
    num_bytes: int = 0
    _digest: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def restart(self) -> None:
        """Discards what was written."""
        self.stream.seek(0)
        self.num_bytes, self._digest = 0, hashlib.sha256()

    def write(self, data: bytes) -> None:
        """Appends bytes.

        Raises:
            WrongContent: more than the expected size.
            OSError: they cannot be written.
        """
        if self.num_bytes + len(data) > self.file.num_bytes:
            raise WrongContent(f"more than {self.file.num_bytes:,} bytes came; expected exactly that many")
        rest = memoryview(data)
        while rest:
            rest = rest[self.stream.write(rest) :]
        self._digest.update(data)
        self.num_bytes += len(data)

    @property
    def sha256(self) -> str:
        """Of what was written, 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def check(self) -> None:
        """Verifies size and checksum.

        Raises:
            Truncated: it is too short.
            WrongContent: its checksum is wrong.
        """
        if self.num_bytes < self.file.num_bytes:
            raise Truncated(f"it ended after {self.num_bytes:,} of {self.file.num_bytes:,} bytes")
        if not self.sha256.startswith(self.file.sha256):
            raise WrongContent(f"its checksum is {self.sha256[:12]}…; expected {self.file.sha256[:12]}…")


Fetch = Callable[[Draft], None]
"""Fills a draft, which is then verified by its `check`."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder of files named by the SHA-256 of their content.

    A file is written to a temporary name, verified and renamed, so that a named file is complete. Each entry has its
    own
    lock: one process fetches, the others wait. The least recently used entries are evicted, except those whose lock is
    held; a process that has an evicted file open can go on reading it.

    A verified file is on the disk, and its modification time then set to one that no write produces. A file with
    another time is verified again before use: it was changed, or a crash came between.

    Attributes:
        root: the folder.
        max_bytes: of all files, including those being fetched.
    """

    root: Path
    max_bytes: int

    def open(self, file: StoredFile, fetch: Fetch) -> BinaryIO:
        """Opens a file for reading, fetching it if needed.

        Raises:
            UsageError: it is larger than the cache, or the folder cannot be used.
            MAEError: it cannot be written, or what `fetch` raises.
        """
        if (stream := self._trusted(file)) is not None:
            return stream
        with self._held(file, file.sha256):
            there = self._trusted(file) or self._verified(file)
            return there or self._fetched(file, fetch, key=file.sha256).open("rb", buffering=0)

    def fetch_unknown(self, file: StoredFile, fetch: Fetch) -> StoredFile:
        """Fetches a file whose checksum is only partly known; returns it with its checksum.

        Args:
            file: with the first digits of its checksum, as far as known, maybe none.
            fetch: see `open`.

        Raises:
            UsageError: see `open`.
            MAEError: see `open`.
        """
        key = hashlib.sha256(file.name.encode()).hexdigest()  # stands for the checksum while the file is fetched
        with self._held(file, key):
            return replace(file, sha256=self._fetched(file, fetch, key=key).name)

    def path(self, file: StoredFile, fetch: Fetch) -> Path:
        """The path of a file, which stays until it is evicted; see `open`."""
        self.open(file, fetch).close()
        return self.root / file.sha256

    def check(self) -> None:
        """Creates the folder, and ensures that nobody else can write to it.

        Raises:
            UsageError: it cannot be created, or others own it or may write to it.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.root.stat()
        except OSError as error:
            raise UsageError(f"the cache {self.root} cannot be created: {error.strerror}; set {FOLDER}") from error
        if not S_ISDIR(status.st_mode):
            raise UsageError(f"the cache {self.root} is not a folder; set {FOLDER} to one")
        if not hasattr(os, "geteuid"):  # Windows, where these mean nothing
            return
        if status.st_uid != os.geteuid():
            raise UsageError(f"the cache {self.root} belongs to another user; set {FOLDER} to a folder of your own")
        if status.st_mode & 0o022:
            raise UsageError(
                f"others may write to the cache {self.root}, so its content cannot be trusted; "
                f"run 'chmod go-w {self.root}' if you trust what it holds, or set {FOLDER} to another folder"
            )

    @contextmanager
    def _held(self, file: StoredFile, key: str) -> Iterator[None]:
        """Holds the lock of a key while a file is fetched, if the file fits; explains file system errors."""
        self.check()
        if file.num_bytes > self.max_bytes:
            needed = -(-file.num_bytes // _GB)
            raise UsageError(
                f"{file.name} has {file.num_bytes / _GB:.3g} GB, and the cache holds {self.max_bytes / _GB:.3g}; "
                f"set {GIGABYTES} to {needed:.0f} or more"
            )
        try:
            with self._locked(key):
                yield
        except OSError as error:
            raise MAEError(
                f"{file.name} cannot be stored in {self.root}: {error.strerror or error}; free some space, or "
                f"set {FOLDER} to another folder"
            ) from error

    def _trusted(self, file: StoredFile) -> BinaryIO | None:
        """The entry, if it was verified and not changed since."""
        path = self.root / file.sha256
        try:
            stream: BinaryIO = path.open("rb", buffering=0)
        except OSError:
            return None
        status = os.fstat(stream.fileno())
        if status.st_size != file.num_bytes or status.st_mtime_ns != _VERIFIED_NS:
            stream.close()
            return None
        if time.time_ns() - status.st_atime_ns > _NOTED_SECONDS * 1_000_000_000:
            _note_use(path)
        return stream

    def _verified(self, file: StoredFile) -> BinaryIO | None:
        """The entry after verifying its content; a damaged one is removed."""
        path = self.root / file.sha256
        if not path.exists():
            return None
        with path.open("r+b", buffering=0) as stream:  # of a file that is only read, Windows writes nothing to the disk
            if os.fstat(stream.fileno()).st_size == file.num_bytes and _sha256(stream) == file.sha256:
                os.fsync(stream.fileno())
                _note_use(path)
                return path.open("rb", buffering=0)
        _log.warning("%s in the cache %s is damaged and is fetched again", file.name, self.root)
        path.unlink()
        return None

    def _fetched(self, file: StoredFile, fetch: Fetch, *, key: str) -> Path:
        """The new entry; while it is fetched, the key stands for its checksum."""
        temporary = self._reserved(replace(file, sha256=key))
        try:
            with temporary.open("r+b", buffering=0) as stream:
                draft = Draft(file=file, stream=stream)
                fetch(draft)
                draft.check()
                os.fsync(stream.fileno())
            _note_use(temporary)
            with self._locked(_ROOM):  # whoever sums up sizes must count it exactly once
                return temporary.replace(self.root / draft.sha256)
        finally:
            temporary.unlink(missing_ok=True)

    def _reserved(self, file: StoredFile) -> Path:
        """A new temporary file of its final size, so that other processes count it."""
        while True:
            with self._locked(_ROOM):
                if self._make_room(file):
                    temporary = self.root / f"{file.sha256}.{secrets.token_hex(8)}"
                    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                    try:
                        os.truncate(descriptor, file.num_bytes)
                    finally:
                        os.close(descriptor)
                    return temporary
            time.sleep(_WAIT_SECONDS)  # what others are fetching takes the space

    def _make_room(self, file: StoredFile) -> bool:
        """Removes what killed processes left, then the least recently used entries until the file fits."""
        entries = sorted(self._entries(), key=lambda entry: (entry.is_whole, entry.used_ns))
        total = sum(entry.num_bytes for entry in entries)
        for entry in entries:
            if entry.is_whole and total + file.num_bytes <= self.max_bytes:
                break
            if self._removed(entry, file):
                total -= entry.num_bytes
        return total + file.num_bytes <= self.max_bytes

    def _removed(self, entry: "_Entry", file: StoredFile) -> bool:
        """Removes an entry unless another process holds its lock; returns whether it is gone."""
        if entry.sha256 == file.sha256:
            entry.path.unlink(missing_ok=True)
            return True
        try:
            with self._locked(entry.sha256, wait=False):
                entry.path.unlink(missing_ok=True)
        except Timeout:
            return False
        return True

    def _entries(self) -> "Iterator[_Entry]":
        for found in os.scandir(self.root):
            if named := _KEPT.fullmatch(found.name):
                with suppress(FileNotFoundError):  # another process evicted it, or finished
                    status = found.stat()
                    yield _Entry(
                        path=Path(found.path),
                        sha256=named[1],
                        is_whole=named[2] is None,
                        num_bytes=status.st_size,
                        used_ns=status.st_atime_ns,
                    )

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[None]:
        """Raises `Timeout` if another process holds the lock and this one does not wait."""
        folder = self.root / _LOCKS
        folder.mkdir(mode=0o700, exist_ok=True)
        with FileLock(folder / name, timeout=-1 if wait else 0, mode=0o600):
            yield


@dataclass(frozen=True, kw_only=True)
class _Entry:
    path: Path
    sha256: str
    is_whole: bool
    num_bytes: int
    used_ns: int


def user_cache() -> Cache:
    """The cache set by `OPENMAE_CACHE` and `OPENMAE_CACHE_GB`, by default `~/.cache/openmae` of 50 GB.

    Raises:
        UsageError: an invalid size, or a folder that cannot be used.
    """
    value = os.environ.get(GIGABYTES, "").strip() or str(_DEFAULT_GIGABYTES)
    try:
        gigabytes = float(value)
    except ValueError:
        gigabytes = 0.0
    if not 0 < gigabytes < 1e9:
        raise UsageError(f"{GIGABYTES} is {value!r}; expected a number above 0, such as 50")
    found = Cache(root=_folder(), max_bytes=int(gigabytes * _GB))
    found.check()
    return found


def write_note(path: Path, file: StoredFile) -> None:
    """Records which file was fetched without its full checksum being known."""
    write_json(path, {"num_bytes": file.num_bytes, "sha256": file.sha256})


def read_note(path: Path) -> StoredFile | None:
    """What `write_note` recorded; None where there is no valid note."""
    try:
        values = read_json(path)
        num_bytes, sha256 = int(values["num_bytes"]), str(values["sha256"])
    except (UsageError, KeyError, ValueError, TypeError):
        return None
    is_whole = num_bytes >= 0 and re.fullmatch("[0-9a-f]{64}", sha256)
    return StoredFile(name=path.stem, num_bytes=num_bytes, sha256=sha256) if is_whole else None


def _folder() -> Path:
    try:
        if folder := os.environ.get(FOLDER, "").strip():
            return Path(folder).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "openmae"
    except RuntimeError as error:
        raise UsageError(f"there is no home folder to cache fetched files in; set {FOLDER} to a folder") from error


def _note_use(path: Path) -> None:
    """Records the use of a verified entry that is on the disk, and that it may be trusted."""
    with suppress(OSError):  # it was evicted meanwhile, or may only be read
        os.utime(path, ns=(time.time_ns(), _VERIFIED_NS))


def _sha256(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()
