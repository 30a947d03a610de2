"""The bytes of a file behind a URL, from a place on, and what can go wrong on the way; fsspec carries them."""

import atexit
import os
import re
import threading
import time
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
"""Longest wait for a connection, and for an answer or more of it."""

SLOWEST = 1024
"""Bytes a second; what comes more slowly counts as a stall."""

_MAX_REDIRECTS = 5
_CHUNK = 1 << 20
_BLOCK = 8 << 20  # that an object store is asked for at a time
_MOVED = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)  # of the 4xx, those that say to come again
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
"""By process, thread and protocol. A forked process must not touch those of its parent, not even to close them: what
runs their connections was left behind."""

_leaving = threading.Event()  # the program ends, and fsspec closes what threads in the background still read from


class Trouble(Exception):
    """Why bytes did not come.

    Attributes:
        lasting: asking again would not help.
        wait: seconds after which the server wants to be asked again.
    """

    def __init__(self, what: str, *, lasting: bool = False, wait: float = 0.0) -> None:
        super().__init__(what)
        self.lasting = lasting
        self.wait = wait


def pieces(url: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    """What lies at a URL from one place to another, piece by piece, each with the place that it belongs to.

    A web server that cannot begin at `start` begins at 0, and may send more than was asked for.

    Raises:
        Trouble: bytes did not come.
        UsageError: the packages for the protocol are not installed.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https"):
        return _from_web(url, start)
    return _from_store(parts.scheme, f"{parts.netloc}{parts.path}", start, end)


def told_length(url: str) -> int | None:
    """How many bytes a web server says that a file has; None where it does not say.

    Raises:
        Trouble: it did not answer.
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
        if start and response.status == 416:  # nothing lies there
            return
        place = _place(response, start)
        mark, since = place, time.monotonic()
        while chunk := _translated(partial(sync, filesystem.loop, response.content.read, _CHUNK)):
            yield place, chunk
            place += len(chunk)
            if time.monotonic() - since > STALL_SECONDS:
                if place - mark < SLOWEST * STALL_SECONDS:
                    raise Trouble(f"only {place - mark:,} bytes came within {STALL_SECONDS} s")
                mark, since = place, time.monotonic()
    finally:
        filesystem.loop.call_soon_threadsafe(response.close)


def _answer(filesystem: Any, url: str, start: int) -> Any:
    """The response to a request, redirects followed; from https they may lead to https alone."""
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    for _ in range(_MAX_REDIRECTS + 1):
        response = _translated(partial(_request, filesystem, url, headers))
        if response.status not in _MOVED:
            return response
        filesystem.loop.call_soon_threadsafe(response.close)
        url = _followed(url, response.headers.get("Location", ""))
    raise Trouble(f"it leads on to other addresses more than {_MAX_REDIRECTS} times", lasting=True)


def _request(filesystem: Any, url: str, headers: dict[str, str]) -> Any:
    from aiohttp import ClientTimeout

    limits = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
    session = sync(filesystem.loop, filesystem.set_session)
    get = partial(session.get, filesystem.encode_url(url), headers=headers, allow_redirects=False, timeout=limits)
    # A limit on the whole as well: the others start anew with each byte of a header.
    return sync(filesystem.loop, get, timeout=CONNECT_SECONDS + STALL_SECONDS)


def _followed(url: str, location: str) -> str:
    target = urljoin(url, location)
    allowed = ("https",) if urlsplit(url).scheme == "https" else ("http", "https")
    if not location or urlsplit(target).scheme not in allowed:
        raise Trouble(f"it leads on to {shown(target)!r}; expected {' or '.join(allowed)}", lasting=True)
    return target


def _place(response: Any, start: int) -> int:
    """Where the body begins, if it is the file's."""
    if response.status not in (200, 206):
        trouble = _refused(response.status, response.headers.get("Retry-After", ""))
        raise Trouble(f"{trouble}; {_LACKING}", lasting=True) if response.status in (401, 403) else trouble
    if encoding := response.headers.get("Content-Encoding"):
        raise Trouble(f"the server sends it compressed ({encoding[:20]}), unasked", lasting=True)
    if response.status == 200:
        return 0
    told = response.headers.get("Content-Range", "")
    if not re.match(rf"bytes {start}-", told):
        raise Trouble(f"asked for bytes from {start:,} on, the server sends {told[:50]!r}")
    return start


def _refused(status: int, retry_after: str = "") -> Trouble:
    lasting = status < 500 and status not in _PASSING
    meaning = _MEANING.get(status, "")
    wait = float(retry_after) if retry_after.isdecimal() and len(retry_after) < 6 else 0.0
    return Trouble(f"HTTP status {status}{meaning}", lasting=lasting, wait=wait)


def _from_store(protocol: str, path: str, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    filesystem = _filesystem(protocol)
    while start < end:
        asked = min(_BLOCK, end - start)
        data = _translated(partial(filesystem.cat_file, path, start=start, end=start + asked))
        if len(data) > asked:
            raise Trouble(f"asked for {asked:,} bytes, the server sends {len(data):,}")
        yield start, data
        start += len(data)
        if len(data) < asked:
            return


def _filesystem(protocol: str) -> Any:
    key = os.getpid(), threading.get_ident(), protocol
    if key not in _filesystems:
        try:
            _filesystems[key] = _translated(partial(_opened, protocol))
            atexit.register(_leaving.set)  # comes before what fsspec has registered
        except ImportError as error:
            raise UsageError(f"{protocol}:// needs packages of its own: pip install 'openmae[remote]'") from error
    return _filesystems[key]


def _opened(protocol: str) -> Any:
    # fsspec would give the same object to all, and in a forked process wait for the parent's connections to close.
    if protocol in ("http", "https"):
        return fsspec.filesystem(protocol, skip_instance_cache=True, client_kwargs={"trust_env": True})
    if protocol == "gs":
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=STALL_SECONDS)
        return fsspec.filesystem("gs", skip_instance_cache=True, requests_timeout=limits)
    limits_kwargs = {"connect_timeout": CONNECT_SECONDS, "read_timeout": STALL_SECONDS}
    once = {"retries": {"total_max_attempts": 1}}  # RemoteStorage tries again itself
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, config_kwargs=limits_kwargs | once)
    filesystem.retries = 1
    return filesystem


def _translated(work: Callable[[], _T]) -> _T:
    """What `work` gives; whatever the libraries raise, and each has errors of its own, becomes `Trouble`."""
    try:
        return work()
    except (Trouble, UsageError, ImportError):
        raise
    except Exception as error:
        # Not "from error": its text may hold the credentials in a URL.
        raise _trouble(error) from None


def _trouble(error: Exception) -> Trouble:
    name = type(error).__name__
    if _leaving.is_set():
        return Trouble("the program ends", lasting=True)
    if isinstance(error, TimeoutError):  # fsspec's and aiohttp's derive from it
        return Trouble(f"the server sent nothing for {STALL_SECONDS} s, or could not be reached in {CONNECT_SECONDS}")
    if isinstance(error, FileNotFoundError):
        return Trouble("it is not there", lasting=True)
    if isinstance(error, PermissionError):
        return Trouble("access is denied", lasting=True)
    if "ProxyConnection" in name:
        return Trouble("the proxy that http_proxy or https_proxy names cannot be reached")
    if name in _CUT:
        return Trouble("the answer was cut short")
    if (status := _status(error)) is not None:
        return _refused(status)
    text = _URL.sub(lambda found: shown(found[0]), " ".join(str(error).split()))[:_LONGEST_REPLY]
    lasting = name in (*_NO_CREDENTIALS, "InvalidURL", "InvalidUrlClientError") or "Certificate" in name
    return Trouble(f"{name}: {text}" if text else name, lasting=lasting)


def _status(error: BaseException) -> int | None:
    """The HTTP status that an object store's error tells, its own or of the one that it was made of."""
    told = getattr(error.__cause__ or error, "response", None)
    found = told.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(told, dict) else None
    if type(error).__module__.startswith("gcsfs"):  # aiohttp's errors have a code too, and it is none of the server's
        found = getattr(error, "code", None)
    return found if isinstance(found, int) and 400 <= found < 600 else None
