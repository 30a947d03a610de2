"""The server gives this machine's browsers one folder's files, and nothing else."""

import http.client
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from mae.errors import UsageError
from mae.web.serve import HEADERS, make_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    site = tmp_path / "site"
    (site / "models").mkdir(parents=True)
    for name in ("index.html", "page.js", "a.mjs", "a.wasm", "models/m.onnx", "a.json"):
        (site / name).write_text(name)
    (tmp_path / "secret.txt").write_text("secret")
    (site / "link.txt").symlink_to(tmp_path / "secret.txt")
    made = make_server(site)
    thread = Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def ask(server: ThreadingHTTPServer, path: str, *, method: str = "GET", host: str | None = None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1])
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read().decode()
    connection.close()
    return found


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html"),
        ("/page.js", "text/javascript"),
        ("/a.mjs", "text/javascript"),
        ("/a.wasm", "application/wasm"),
        ("/models/m.onnx", "application/octet-stream"),
        ("/a.json", "application/json"),
    ],
)
def test_files_have_their_types_and_isolation(server: ThreadingHTTPServer, path: str, kind: str):
    status, headers, _ = ask(server, path)
    assert status == 200 and headers["Content-type"].split(";")[0] == kind
    assert HEADERS.items() <= headers.items()


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/link.txt",
        "/models/",
        "/none",
        "//../secret.txt",
        "/%00",
        "/" + "a" * 5000,
    ],
    ids=lambda path: path[:20],
)
def test_nothing_else_is_given(server: ThreadingHTTPServer, path: str):
    status, _, text = ask(server, path)
    assert status == 404 and "secret" not in text


def test_only_this_machine_is_served_and_only_reading(server: ThreadingHTTPServer):
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, "/", host="attacker.example:80")[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_address[1]}")[0] == 200
    assert ask(server, "/", method="POST")[0] == 501
    assert ask(server, "/", method="HEAD")[0] == 200


@pytest.mark.parametrize(
    ("reason", "told"), [(ConnectionResetError, False), (BrokenPipeError, False), (RuntimeError, True)]
)
def test_a_browser_that_goes_away_is_no_error(
    server: ThreadingHTTPServer,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    reason: type[Exception],
    told: bool,
):
    def fail(handler: object) -> None:
        raise reason("no answer")

    monkeypatch.setattr("mae.web.serve._Handler.send_head", fail)
    with pytest.raises(http.client.RemoteDisconnected):  # closed once the error is told
        ask(server, "/")
    assert ("Traceback" in capfd.readouterr().err) == told


def test_a_port_that_is_taken_is_told(server: ThreadingHTTPServer):
    with pytest.raises(UsageError, match="cannot be listened on"):
        make_server(Path(), port=server.server_address[1])
    with pytest.raises(UsageError, match="port 70000"):
        make_server(Path(), port=70000)
