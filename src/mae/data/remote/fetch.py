"""Packs behind a URL: fetched with retries, verified, and read from a cache on this machine."""

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
from mae.data.remote.cache import Cache, Draft, Truncated, WrongContent, user_cache
from mae.data.remote.http import FetchError, pieces
from mae.data.remote.storage import MANIFEST, MAX_MANIFEST, StoredFile, check_part, check_stored_name
from mae.data.remote.urls import SCHEME
from mae.errors import MAEError, UsageError

PROTOCOLS = ("https", "http", "s3", "gs")

TRIES = 8
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
"""Seconds between tries: doubled from the first to the longest, and shortened by up to half at random."""

_PROGRESS = 8 << 20  # bytes; a try that got this much farther than any before is no failure
_AHEAD = 2  # threads that prefetch
_BUCKET = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{1,221}")

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class RemoteStorage:
    """The files below a URL; see `Storage`.

    A file with a known checksum is fetched once into the cache and read there by all processes of this machine.

    Attributes:
        url: of the pack's folder; a query in it, such as a signature, goes with each request.
        cache: where files are stored.

    Raises:
        UsageError: an unknown protocol, or not the URL of a folder.
    """

    url: str
    cache: Cache
    _prefetcher: "_Prefetcher" = field(default_factory=lambda: _Prefetcher(), init=False, repr=False, compare=False)
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
        """16 hexadecimal digits of the URL and of `pack.json`, which lists every other file's checksum.

        Raises:
            UsageError: as `whole`.
            MAEError: as `whole`.
        """
        if MANIFEST not in self._sums:
            self.whole(MANIFEST, limit=MAX_MANIFEST)
        return hashlib.sha256(f"{self.place}\0{self._sums[MANIFEST]}".encode()).hexdigest()[:16]

    def whole(self, name: str, *, limit: int) -> bytes:
        """A small file of unknown content; it is not cached.

        Raises:
            UsageError: it does not exist, may not be read, or has more than `limit` bytes.
            MAEError: it cannot be fetched after all retries.
        """
        check_stored_name(name)
        url = self._url(name)
        data = _with_retries(url, partial(_whole, url, limit), permanent=UsageError)
        if len(data) > limit:
            raise UsageError(f"{shown(url)} has more than {limit:,} bytes; expected at most that many")
        self._sums[name] = hashlib.sha256(data).hexdigest()
        return data

    def local(self, file: StoredFile) -> Path:
        """The path of the file in the cache, valid until it is evicted.

        Raises:
            UsageError: it is larger than the cache, or the cache cannot be used.
            MAEError: it cannot be fetched after all retries, or cannot be written.
        """
        self._prefetcher.join(file)
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
        """Begins to fetch files into the cache, two at a time and in this order; returns at once.

        A reader that asks for one of them meanwhile waits for it and gets its error; one that failed before is retried
        by its reader.
        """
        for file in files:
            self._prefetcher.begin(file, partial(self.cache.path, file, self._fetch))

    def _open(self, file: StoredFile) -> BinaryIO:
        self._prefetcher.join(file)
        return self.cache.open(file, self._fetch)

    def _fetch(self, draft: Draft) -> None:
        fetch(self._url(draft.file.name), draft)

    def _url(self, name: str) -> str:
        parts = urlsplit(self.url)
        web = parts.scheme in ("http", "https")
        path = f"{parts.path.rstrip('/')}/{quote(name) if web else name}"
        return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def open_remote(url: str) -> RemoteStorage:
    """The files below a URL, or below one whose credentials are concealed; read through the user's cache.

    Raises:
        UsageError: as `RemoteStorage`; the cache cannot be used.
    """
    return RemoteStorage(url=revealed(url), cache=user_cache())


def fetch(url: str, draft: Draft, *, again: bool = True) -> None:
    """Fills a draft from a URL, with retries.

    Args:
        url: of the file.
        draft: the file to fill.
        again: whether to fetch wrong content again.

    Raises:
        WrongContent: it is wrong, and not fetched again.
        MAEError: it cannot be fetched after all retries.
    """
    _with_retries(url, partial(_fill, url, draft, again=again), reached=lambda: draft.num_bytes)


def _check_url(url: str) -> None:
    scheme = SCHEME.match(url)
    protocol = scheme[1].lower() if scheme else ""
    if protocol not in PROTOCOLS:
        raise UsageError(
            f"{protocol or 'nothing'}:// is not a protocol that packs can be read by; "
            f"expected {', '.join(f'{each}://' for each in PROTOCOLS)}"
        )
    try:
        parts = urlsplit(url)
        web = protocol in ("http", "https")
        usable = bool(parts.hostname) and parts.port != 0 if web else bool(_BUCKET.fullmatch(parts.netloc))
    except ValueError:  # a port that is not a number
        usable = False
    odd = "::" in url or "\\" in url or not url.isprintable() or " " in url
    if not usable or odd or "#" in url or ("?" in url and not web):
        expected = "https://host/folder" if web else f"{protocol}://bucket/folder"
        raise UsageError(f"this is not the URL of a pack's folder; expected one such as {expected}")


def _fill(url: str, draft: Draft, *, again: bool) -> None:
    """One try to fetch the rest of a draft."""
    size = draft.file.num_bytes
    try:
        # All may have come before the last try failed; there is nothing beyond the end to ask for.
        for place, data in pieces(url, draft.num_bytes, size) if draft.num_bytes < size or size == 0 else ():
            if place != draft.num_bytes:  # this server starts over
                draft.restart()
            draft.write(data)
        draft.check()
    except Truncated as short:
        raise FetchError(str(short)) from None
    except WrongContent as wrong:
        if not again:
            raise
        draft.restart()
        raise FetchError(str(wrong)) from None


def _whole(url: str, limit: int) -> bytes:
    data = bytearray()
    for _, piece in pieces(url, 0, limit + 1):
        data += piece[: limit + 1 - len(data)]
        if len(data) > limit:
            break
    return bytes(data)


def _with_retries(
    url: str, attempt: Callable[[], _T], *, reached: Callable[[], int] = lambda: 0, permanent: type[MAEError] = MAEError
) -> _T:
    """The result of an attempt, retried after errors that may be temporary.

    Args:
        url: for messages.
        attempt: raises `FetchError`.
        reached: bytes fetched so far, over all attempts.
        permanent: the type of error for permanent failures.
    """
    tries = failures = farthest = 0
    while True:
        tries += 1
        try:
            return attempt()
        except FetchError as error:
            if error.permanent:
                raise permanent(f"{shown(url)} cannot be fetched: {error}") from None
            if reached() >= farthest + _PROGRESS:
                farthest, failures = reached(), 0
            failures += 1
            if failures == TRIES:
                raise MAEError(f"{shown(url)} cannot be fetched after {tries} tries; the last error: {error}") from None
            wait = max(_wait(url, failures), min(error.wait, LONGEST_WAIT))
            _log.warning("%s: %s; trying again in %.1f s (%d of %d)", shown(url), error, wait, failures, TRIES - 1)
        time.sleep(wait)


def _wait(url: str, failures: int) -> float:
    """Seconds before the next try; spreads processes that failed together."""
    key = f"{socket.gethostname()} {os.getpid()} {url} {failures}".encode()
    share = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest()) / 2**32
    return min(FIRST_WAIT * 2.0 ** (failures - 1), LONGEST_WAIT) * (0.5 + share / 2)


class _Prefetcher:
    """Background fetches of one process; a forked one starts with none."""

    def __init__(self) -> None:
        self._reset()

    def __reduce__(self) -> tuple[type["_Prefetcher"], tuple[()]]:
        return _Prefetcher, ()  # a spawned process starts with none either

    def _reset(self) -> None:
        self._process = os.getpid()
        self._fetches: dict[str, Future[Path]] = {}
        self._queue: queue.SimpleQueue[tuple[Future[Path], Callable[[], Path]]] = queue.SimpleQueue()
        self._threads = 0

    def begin(self, file: StoredFile, work: Callable[[], Path]) -> None:
        """Fetches a file by `work` as soon as a thread is free."""
        if self._process != os.getpid():
            self._reset()
        if file.sha256 in self._fetches:
            return
        fetch: Future[Path] = Future()
        self._fetches[file.sha256] = fetch
        self._queue.put((fetch, work))
        if self._threads < _AHEAD:
            self._threads += 1
            # Daemons, so that the program does not wait for them when it ends.
            threading.Thread(target=_work, args=(self._queue,), daemon=True, name="mae prefetch").start()

    def join(self, file: StoredFile) -> None:
        """Waits for a file that is being fetched; raises what its fetch raises."""
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
