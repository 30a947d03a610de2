"""A server of one folder for this machine's own browsers; Python's standard library alone."""

import sys
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

from mae.errors import UsageError

HOST = "127.0.0.1"

HEADERS = {
    # Both together let a page use several threads, which share memory.
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_server(folder: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the folder's files on 127.0.0.1; `serve_forever` runs it.

    Args:
        folder: what is served, and nothing outside of it.
        port: 0: a free one, see `server_address`.

    Raises:
        UsageError: the port is taken or not allowed.
    """
    try:
        return _Server((HOST, port), partial(_Handler, directory=str(folder)))
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} of {HOST} cannot be listened on ({error}); give another --port, or 0") from error


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle of an answer, as one that reloads the page does, is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(SimpleHTTPRequestHandler):
    """GET and HEAD of files; no listings, no other machine's pages."""

    extensions_map = {
        **SimpleHTTPRequestHandler.extensions_map,
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".json": "application/json",
        ".wasm": "application/wasm",
        ".onnx": "application/octet-stream",
    }

    def send_head(self) -> Any:
        """Refuse what did not ask for this machine by name: another site whose name was turned to this address."""
        name = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if name not in (HOST, "localhost"):
            self.send_error(HTTPStatus.FORBIDDEN, "only 127.0.0.1 is served")
            return None
        try:
            asked = Path(self.translate_path(self.path)).resolve()
        except ValueError:  # a null character
            asked = None
        if asked is None or not asked.is_relative_to(Path(self.directory).resolve()):  # the latter by a link
            self.send_error(HTTPStatus.NOT_FOUND)
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> BytesIO | None:
        """Folders have no listing."""
        self.send_error(HTTPStatus.NOT_FOUND)
        return None

    def end_headers(self) -> None:
        """With the headers of every answer."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told."""
