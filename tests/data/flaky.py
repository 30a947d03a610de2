"""A web server on this machine that can be told to misbehave, and counts what it is asked."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True, kw_only=True)
class Fault:
    """How one answer is spoilt.

    Attributes:
        status: told in place of 200; there is no body.
        headers: told besides.
        silence: seconds before the answer.
        pause: seconds in the middle of the body.
        drip: seconds after each byte of the body.
        head_drip: seconds after each of many lines before the body.
        cut: bytes of the body that are sent, then the connection ends.
        flip: position of a byte in the body that is changed.
        length: the Content-Length that is told, whatever is sent.
        endless: zeros follow the body without end, and no length is told.
        ignores_range: a range that was asked for is not given, but all.
        shift: the range begins so many bytes later than was asked for.
    """

    status: int | None = None
    headers: tuple[tuple[str, str], ...] = ()
    silence: float = 0.0
    pause: float = 0.0
    drip: float = 0.0
    head_drip: float = 0.0
    cut: int | None = None
    flip: int | None = None
    length: int | None = None
    endless: bool = False
    ignores_range: bool = False
    shift: int = 0


Spoil = Callable[[str, int], Fault | None]
"""The fault, if any, of the n-th answer (from 0 on) for a path."""


def honest(path: str, number: int) -> None:
    return None


def first(*faults: Fault) -> Spoil:
    """The first answers for each path have these faults."""
    return lambda path, number: faults[number] if number < len(faults) else None


def always(fault: Fault) -> Spoil:
    return lambda path, number: fault


def keyed(seed: int, share: float, *faults: Fault) -> Spoil:
    """A share of the answers has one of these faults, the same in each run."""

    def spoil(path: str, number: int) -> Fault | None:
        digest = hashlib.sha256(f"{seed} {path} {number}".encode()).digest()
        return faults[digest[8] % len(faults)] if int.from_bytes(digest[:8]) < share * 2**64 else None

    return spoil


@dataclass(kw_only=True, eq=False)
class Flaky:
    """A server of the files below `root`; `spoil` may be changed while it runs.

    Attributes:
        asked: each request's path and range.
        credentials: the Authorization header of each request.
    """

    root: Path
    port: int = 0
    spoil: Spoil = honest
    asked: list[tuple[str, str]] = field(default_factory=list)
    credentials: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ranges(self, name: str) -> list[str]:
        """The ranges that were asked of a file; empty texts stand for all of it."""
        return [told for path, told in self.asked if path == f"/{name}"]


@contextmanager
def serving(root: Path, spoil: Spoil = honest) -> Iterator[Flaky]:
    flaky = Flaky(root=root, spoil=spoil)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            try:
                _answer(self, flaky)
            except ConnectionError:
                self.close_connection = True

    server = _Server(("127.0.0.1", 0), Handler)
    flaky.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield flaky
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    block_on_close = False

    def handle_error(self, *args: object) -> None:
        """Clients go away in the middle; that is no news."""


def _answer(handler: BaseHTTPRequestHandler, flaky: Flaky) -> None:
    path = unquote(urlsplit(handler.path).path)
    asked = handler.headers.get("Range", "")
    flaky.asked.append((path, asked))
    flaky.credentials.append(handler.headers.get("Authorization", ""))
    fault = flaky.spoil(path, flaky.counts[path]) or Fault()
    flaky.counts[path] += 1
    time.sleep(fault.silence)
    file = flaky.root / path.lstrip("/")
    status = fault.status or (200 if file.is_file() else 404)
    if status != 200:
        _head(handler, status, [*fault.headers, ("Content-Length", "0")])
        return
    whole = file.read_bytes()
    start = 0 if fault.ignores_range or not asked else int(asked.removeprefix("bytes=").split("-")[0])
    if start and start >= len(whole):
        _head(handler, 416, [("Content-Length", "0")])
        return
    start += fault.shift if asked else 0
    body = bytearray(whole[start:])
    headers = list(fault.headers)
    if start:
        headers.append(("Content-Range", f"bytes {start}-{len(whole) - 1}/{len(whole)}"))
    if not fault.endless:
        headers.append(("Content-Length", str(len(body) if fault.length is None else fault.length)))
    if fault.head_drip:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(int(6 / fault.head_drip)):
            handler.wfile.write(b"A: b\r\n")
            time.sleep(fault.head_drip)
    _head(handler, 206 if start else 200, headers)
    _body(handler, body, fault)


def _head(handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]]) -> None:
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    handler.end_headers()


def _body(handler: BaseHTTPRequestHandler, body: bytearray, fault: Fault) -> None:
    if fault.flip is not None and fault.flip < len(body):
        body[fault.flip] ^= 1
    sent = bytes(body if fault.cut is None else body[: fault.cut])
    if fault.drip:
        for byte in sent:
            handler.wfile.write(bytes([byte]))
            time.sleep(fault.drip)
    else:
        handler.wfile.write(sent[: len(sent) // 2])
        time.sleep(fault.pause)
        handler.wfile.write(sent[len(sent) // 2 :])
    while fault.endless:
        handler.wfile.write(bytes(1 << 16))
    if fault.cut is not None or fault.length is not None:
        handler.close_connection = True
