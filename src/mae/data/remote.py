"""Packs behind a URL: fetched with patience, checked, and read from a cache on this machine."""

import hashlib
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

from mae.credentials import revealed, shown
from mae.data.cache import Cache, CutShort, Draft, WrongContent, user_cache
from mae.data.pack_format import MANIFEST, MAX_MANIFEST
from mae.data.storage import StoredFile, check_part, check_stored_name
from mae.data.transport import Trouble, pieces
from mae.errors import MAEError, UsageError

PROTOCOLS = ("https", "http", "s3", "gs")

TRIES = 8
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between tries: doubled each time from the first to the longest, and shortened by up to half at random."""

_PROGRESS = 8 << 20  # bytes; a try that got so much farther than any before is no failure
_AHEAD = 2  # threads that fetch ahead
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_BUCKET = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,221}")

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RemoteStorage:
    """The files below a URL; see `Storage`.

    A file of known content is fetched once into the cache and then read there, by all processes of this machine.

    Attributes:
        url: of the pack's folder; a query in it, such as a signature, goes with each request.
        cache: where files are kept.

    Raises:
        UsageError: no such protocol, or no URL of a folder.
    """

    url: str
    cache: Cache
    _ahead: "_Ahead" = field(default_factory=lambda: _Ahead(), init=False, repr=False, compare=False)
    _sums: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_url(self.url)

    def __repr__(self) -> str:
        return f"RemoteStorage(url={self.place!r}, cache={self.cache!r})"

    @property
    def room(self) -> int:
        """See `Storage`."""
        return self.cache.max_bytes

    @property
    def place(self) -> str:
        """The URL, without user, password and query."""
        return shown(self.url).rstrip("/")

    def version(self) -> str:
        """16 hexadecimal digits of the URL and of `pack.json` as it was read, which tells every other file's content.

        Raises:
            UsageError: as `whole`.
            MAEError: as `whole`.
        """
        if MANIFEST not in self._sums:
            self.whole(MANIFEST, limit=MAX_MANIFEST)
        return hashlib.sha256(f"{self.place}\0{self._sums[MANIFEST]}".encode()).hexdigest()[:16]

    def whole(self, name: str, *, limit: int) -> bytes:
        """A small file of which nothing is known yet; it is not kept.

        Raises:
            UsageError: it is not there, it may not be read, or it has more than `limit` bytes.
            MAEError: it did not come, however often it was asked for.
        """
        check_stored_name(name)
        url = self._url(name)
        data = _patiently(url, partial(_whole, url, limit), lasting=UsageError)
        if len(data) > limit:
            raise UsageError(f"{shown(url)} has more than {limit:,} bytes; expected at most as many")
        self._sums[name] = hashlib.sha256(data).hexdigest()
        return data

    def local(self, file: StoredFile) -> Path:
        """The file in the cache, where it lies until others need its place.

        Raises:
            UsageError: it is larger than the cache, or the cache cannot be used.
            MAEError: it did not come, however often it was asked for, or it cannot be written.
        """
        self._ahead.join(file)
        return self.cache.path(file, self._fetch)

    def part(self, file: StoredFile, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset` on; raises as `local`."""
        what = f"{self.place}/{file.name}"
        check_part(file, offset, length, what=what)
        try:
            with self._open(file) as stream:
                stream.seek(offset)
                data = stream.read(length)
        except OSError as error:
            raise MAEError(f"{what} cannot be read from the cache {self.cache.root}: {error.strerror}") from error
        if len(data) != length:
            raise MAEError(f"{what} was changed in the cache {self.cache.root} while it was read")
        return data

    def prefetch(self, files: Iterable[StoredFile]) -> None:
        """Begin to fetch files into the cache, two at a time and in this order; returns at once.

        A reader that asks for one of them meanwhile waits for it and meets its error; one that failed before is tried
        again by its reader.
        """
        for file in files:
            self._ahead.begin(file, partial(self.cache.path, file, self._fetch))

    def _open(self, file: StoredFile) -> BinaryIO:
        self._ahead.join(file)
        return self.cache.open(file, self._fetch)

    def _fetch(self, draft: Draft) -> None:
        fetch(self._url(draft.file.name), draft)

    def _url(self, name: str) -> str:
        parts = urlsplit(self.url)
        web = parts.scheme in ("http", "https")
        path = f"{parts.path.rstrip('/')}/{quote(name) if web else name}"
        return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def is_url(spec: str) -> bool:
    """Whether what the user typed is meant as a URL, of whatever protocol."""
    return _SCHEME.match(spec) is not None


def open_remote(url: str) -> RemoteStorage:
    """The files below a URL, or below a place of which one came in; read through the user's cache.

    Raises:
        UsageError: as `RemoteStorage`; the cache cannot be used.
    """
    return RemoteStorage(url=revealed(url), cache=user_cache())


def fetch(url: str, draft: Draft, *, again: bool = True) -> None:
    """Fill a draft with what lies at a URL, with patience.

    Args:
        url: of the file.
        draft: what it must become.
        again: whether wrong content is asked for again.

    Raises:
        WrongContent: it is wrong, and not asked for again.
        MAEError: it did not come, however often it was asked for.
    """
    _patiently(url, partial(_fill, url, draft, again=again), reached=lambda: draft.num_bytes)


def _check_url(url: str) -> None:
    scheme = _SCHEME.match(url)
    protocol = scheme[1].lower() if scheme else ""
    if protocol not in PROTOCOLS:
        raise UsageError(
            f"{protocol or 'nothing'}:// is no protocol that packs are read by; "
            f"expected {', '.join(f'{each}://' for each in PROTOCOLS)}"
        )
    try:
        parts = urlsplit(url)
        web = protocol in ("http", "https")
        usable = bool(parts.hostname) and parts.port != 0 if web else bool(_BUCKET.fullmatch(parts.netloc))
    except ValueError:  # a port that is no number
        usable = False
    odd = "::" in url or "\\" in url or not url.isprintable() or " " in url
    if not usable or odd or "#" in url or ("?" in url and not web):
        expected = "https://host/folder" if web else f"{protocol}://bucket/folder"
        raise UsageError(f"this is no URL of a pack's folder; expected one such as {expected}")


def _fill(url: str, draft: Draft, *, again: bool) -> None:
    """One try to fetch what is missing of a draft."""
    size = draft.file.num_bytes
    try:
        # All may have come before the last try went wrong, and there is nothing behind it to ask for.
        for place, data in pieces(url, draft.num_bytes, size) if draft.num_bytes < size or size == 0 else ():
            if place != draft.num_bytes:  # this server begins anew
                draft.restart()
            draft.write(data)
        draft.check()
    except CutShort as short:
        raise Trouble(str(short)) from None
    except WrongContent as wrong:
        if not again:
            raise
        draft.restart()
        raise Trouble(str(wrong)) from None


def _whole(url: str, limit: int) -> bytes:
    data = bytearray()
    for _, piece in pieces(url, 0, limit + 1):
        data += piece[: limit + 1 - len(data)]
        if len(data) > limit:
            break
    return bytes(data)


def _patiently(
    url: str, attempt: Callable[[], _T], *, reached: Callable[[], int] = lambda: 0, lasting: type[MAEError] = MAEError
) -> _T:
    """What an attempt gives, made again after trouble that may pass.

    Args:
        url: for messages.
        attempt: raises `Trouble`.
        reached: how many bytes are there, all attempts together.
        lasting: the error for trouble that does not pass.
    """
    tries = failures = farthest = 0
    while True:
        tries += 1
        try:
            return attempt()
        except Trouble as trouble:
            if trouble.lasting:
                raise lasting(f"{shown(url)} cannot be fetched: {trouble}") from None
            if reached() >= farthest + _PROGRESS:
                farthest, failures = reached(), 0
            failures += 1
            if failures == TRIES:
                raise MAEError(f"{shown(url)} cannot be fetched, tried {tries} times; at last: {trouble}") from None
            wait = max(_wait(url, failures), min(trouble.wait, LONGEST_WAIT))
            _log.warning("%s: %s; trying again in %.1f s (%d of %d)", shown(url), trouble, wait, failures, TRIES - 1)
        time.sleep(wait)


def _wait(url: str, failures: int) -> float:
    """Seconds before the next try; processes that failed together come back apart."""
    key = f"{socket.gethostname()} {os.getpid()} {url} {failures}".encode()
    share = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) / 2**32
    return min(FIRST_WAIT * 2.0 ** (failures - 1), LONGEST_WAIT) * (0.5 + share / 2)


class _Ahead:
    """Fetches in the background of one process; a forked one begins with none."""

    def __init__(self) -> None:
        self._begin_anew()

    def __reduce__(self) -> tuple[type["_Ahead"], tuple[()]]:
        return _Ahead, ()  # a process that is started anew begins with none either

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._fetches: dict[str, Future[Path]] = {}
        self._queue: queue.SimpleQueue[tuple[Future[Path], Callable[[], Path]]] = queue.SimpleQueue()
        self._threads = 0

    def begin(self, file: StoredFile, work: Callable[[], Path]) -> None:
        """Fetch a file by `work` as soon as a thread is free."""
        if self._process != os.getpid():
            self._begin_anew()
        if file.sha256 in self._fetches:
            return
        fetch: Future[Path] = Future()
        self._fetches[file.sha256] = fetch
        self._queue.put((fetch, work))
        if self._threads < _AHEAD:
            self._threads += 1
            # Daemons, so that a program that ends does not wait for them.
            threading.Thread(target=_work, args=(self._queue,), daemon=True, name="mae fetches ahead").start()

    def join(self, file: StoredFile) -> None:
        """Wait for a file that is being fetched; raises what its fetch raises."""
        if self._process != os.getpid() or (fetch := self._fetches.pop(file.sha256, None)) is None:
            return
        if not fetch.cancel() and not fetch.done():
            fetch.result()


def _work(tasks: "queue.SimpleQueue[tuple[Future[Path], Callable[[], Path]]]") -> None:
    while True:
        fetch, work = tasks.get()
        if not fetch.set_running_or_notify_cancel():
            continue
        try:
            fetch.set_result(work())
        except BaseException as error:
            fetch.set_exception(error)
