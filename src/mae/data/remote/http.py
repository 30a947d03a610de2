"""The bytes of a file behind a URL from an offset on, by fsspec, and what can go wrong on the way."""

import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import fsspec
from fsspec.asyn import sync

from mae.credentials import VARIABLE, shown
from mae.errors import UsageError

CONNECT_SECONDS = 10
STALL_SECONDS = 30
"""Timeouts for connecting, and for a response or more of it."""

SLOWEST = 1024
"""Bytes a second; anything slower counts as a stall."""

_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
_BLOCK = 8 << 20  # requested from an object store at a time
_MOVED = (301, 302, 303, 307, 308)
_TEMPORARY = (408, 425, 429)  # of the 4xx, those worth a retry
_MEANING = {
    401: ": it needs credentials",
    403: ": access is denied",
    404: ": it is not there",
    407: ": the proxy needs credentials",
    416: ": it is shorter than expected",
}
_LACKING = f"give the URL with user, password or query again, which no run keeps, set {VARIABLE} to it, or use ~/.netrc"
_LONGEST_REPLY = 200
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")
_CUT = ("ClientPayloadError", "ResponseStreamingError", "IncompleteReadError", "ServerDisconnectedError")
_URL = re.compile(r"\w+://[^\s'\"<>]+")

_T = TypeVar("_T")

_filesystems: dict[tuple[int, int, str], Any] = {}
"""By process, thread and protocol. A forked process must not touch those of its parent, not even to close them: the
event loop of their connections does not exist in it."""

_leaving = threading.Event()  # the program ends, and fsspec closes connections that background threads still read from


class FetchError(Exception):
    """A failed fetch.

    Attributes:
        permanent: whether a retry would not help.
        wait: seconds after which the server asks to retry.
    """

    def __init__(self, what: str, *, permanent: bool = False, wait: float = 0.0) -> None:
        super().__init__(what)
        self.permanent = permanent
        self.wait = wait


def pieces(url: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The bytes of a URL from one offset to another in pieces, each with its offset.

    A web server that cannot begin at `start` begins at 0, and may send more than requested.

    Raises:
        FetchError: it failed.
        UsageError: the packages for the protocol are not installed.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return _from_web(url, start)
    return _from_store(parts.scheme, f"{parts.netloc}{parts.path}", start, end)


def remote_length(url: str) -> int | None:
    """The size of a file in bytes according to its web server; None where it does not say.

    Raises:
        FetchError: it did not respond.
        UsageError: the packages for the protocol are not installed.
    """
    filesystem = _filesystem(urlsplit(url).scheme)
    response = _answer(filesystem, url, 0)
    try:
        _place(response, 0)
        length = response.content_length
        return length if isinstance(length, int) else None
    finally:
        filesystem.loop.call_soon_threadsafe(response.close)


def _from_web(url: str, start: int) -> Iterator[tuple[int, bytes]]:
    filesystem = _filesystem(urlsplit(url).scheme)
    response = _answer(filesystem, url, start)
    try:
        if start and response.status == 416:  # nothing is there
            return
        place = _place(response, start)
        mark, since = place, time.monotonic()
        while chunk := _translated(partial(sync, filesystem.loop, response.content.read, _CHUNK)):
            yield place, chunk
            place += len(chunk)
            if time.monotonic() - since > STALL_SECONDS:
                if place - mark < SLOWEST * STALL_SECONDS:
                    raise FetchError(f"only {place - mark:,} bytes came within {STALL_SECONDS} s")
                mark, since = place, time.monotonic()
    finally:
        filesystem.loop.call_soon_threadsafe(response.close)


def _answer(filesystem: Any, url: str, start: int) -> Any:
    """The response to a request, with redirects followed; from https they may only lead to https."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    for _ in range(_MAX_REDIRECTS + 1):
        response = _translated(partial(_request, filesystem, url, headers))
        if response.status not in _MOVED:
            return response
        filesystem.loop.call_soon_threadsafe(response.close)
        url = _followed(url, response.headers.get("Location", ""))
    raise FetchError(f"more than {_MAX_REDIRECTS} redirects", permanent=True)


def _request(filesystem: Any, url: str, headers: dict[str, str]) -> Any:
    from aiohttp import ClientTimeout

    limits = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
    session = sync(filesystem.loop, filesystem.set_session)
    get = partial(session.get, filesystem.encode_url(url), headers=headers, allow_redirects=False, timeout=limits)
    # A limit on the whole as well: the others restart with each byte of a header.
    return sync(filesystem.loop, get, timeout=CONNECT_SECONDS + STALL_SECONDS)


def _followed(url: str, location: str) -> str:
    target = urljoin(url, location)
    allowed = ("https",) if urlsplit(url).scheme == "https" else ("http", "https")
    if not location or urlsplit(target).scheme not in allowed:
        raise FetchError(f"it redirects to {shown(target)!r}; expected {' or '.join(allowed)}", permanent=True)
    return target


def _place(response: Any, start: int) -> int:
    """The offset of the response's body in the file."""
    if response.status not in (200, 206):
        trouble = _refused(response.status, response.headers.get("Retry-After", ""))
        raise FetchError(f"{trouble}; {_LACKING}", permanent=True) if response.status in (401, 403) else trouble
    if encoding := response.headers.get("Content-Encoding"):
        raise FetchError(f"the server compresses it ({encoding[:20]}), which was not requested", permanent=True)
    if response.status == 200:
        return 0
    content_range = response.headers.get("Content-Range", "")
    if not re.match(rf"bytes {start}-", content_range):
        raise FetchError(f"asked for bytes from {start:,} on, the server sends {content_range[:50]!r}")
    return start


def _refused(status: int, retry_after: str = "") -> FetchError:
    permanent = status < 500 and status not in _TEMPORARY
    meaning = _MEANING.get(status, "")
    wait = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else 0.0
    return FetchError(f"HTTP status {status}{meaning}", permanent=permanent, wait=wait)


def _from_store(protocol: str, path: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    filesystem = _filesystem(protocol)
    while start < end:
        asked = min(_BLOCK, end - start)
        data = _translated(partial(filesystem.cat_file, path, start=start, end=start + asked))
        if len(data) > asked:
            raise FetchError(f"asked for {asked:,} bytes, the server sent {len(data):,}")
        yield start, data
        start += len(data)
        if len(data) < asked:
            return


def _filesystem(protocol: str) -> Any:
    key = os.getpid(), threading.get_ident(), protocol
    if key not in _filesystems:
        try:
            _filesystems[key] = _translated(partial(_opened, protocol))
            # fsspec closes connections by finalizers. The first one of a program registers when all of them run, and
            # what is registered later runs earlier: so there must be one before this.
            weakref.finalize(_filesystems[key], lambda: None)
            atexit.register(_leaving.set)
        except ImportError as error:
            raise UsageError(f"{protocol}:// needs extra packages: pip install 'openmae[remote]'") from error
    return _filesystems[key]


def _opened(protocol: str) -> Any:
    # fsspec would share one object, and in a forked process wait for the parent's connections to close.
    if protocol in ("http", "https"):
        return fsspec.filesystem(protocol, skip_instance_cache=True, client_kwargs={"trust_env": True})
    if protocol == "gs":
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
        return fsspec.filesystem("gs", skip_instance_cache=True, requests_timeout=limits)
    limits_kwargs = {"connect_timeout": CONNECT_SECONDS, "read_timeout": STALL_SECONDS}
    once = {"retries": {"total_max_attempts": 1}}  # RemoteStorage retries itself
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, config_kwargs=limits_kwargs | once)
    filesystem.retries = 1
    return filesystem


def _translated(work: Callable[[], _T]) -> _T:
    """The result of `work`; whatever the libraries raise becomes `FetchError`."""
    try:
        return work()
    except (FetchError, UsageError, ImportError):
        raise
    except Exception as error:
        # Not "from error": its text may hold the credentials in a URL.
        raise _fetch_error(error) from None


def _fetch_error(error: Exception) -> FetchError:
    name = type(error).__name__
    if _leaving.is_set():
        return FetchError("the program is ending", permanent=True)
    if isinstance(error, TimeoutError):  # fsspec's and aiohttp's derive from it
        return FetchError(f"the server sent nothing for {STALL_SECONDS} s, or did not connect within {CONNECT_SECONDS}")
    if isinstance(error, FileNotFoundError):
        return FetchError("it is not there", permanent=True)
    if isinstance(error, PermissionError):
        return FetchError("access is denied", permanent=True)
    if "ProxyConnection" in name:
        return FetchError("the proxy that http_proxy or https_proxy names cannot be reached")
    if name in _CUT:
        return FetchError("the response was truncated")
    if (status := _status(error)) is not None:
        return _refused(status)
    text = _URL.sub(lambda found: shown(found[0]), " ".join(str(error).split()))[:_LONGEST_REPLY]
    permanent = name in (*_NO_CREDENTIALS, "InvalidURL", "InvalidUrlClientError") or "Certificate" in name
    return FetchError(f"{name}: {text}" if text else name, permanent=permanent)


def _status(error: BaseException) -> int | None:
    """The HTTP status in an object store's error or in its cause."""
    response = getattr(error.__cause__ or error, "response", None)
    found = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
    if type(error).__module__.startswith("gcsfs"):  # aiohttp's errors have a code too, which is not the server's
        found = getattr(error, "code", None)
    return found if isinstance(found, int) and 400 <= found < 600 else None
