import signal
import tempfile
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from tiny import tiny_model

from mae.cli import main
from mae.models.file import save
from mae.records import read_json


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's file; with files in the place of onnxruntime-web's, which only a browser reads."""
    runtime = [tmp_path / name for name in ("ort.mjs", "ort.wasm")]
    for path in runtime:
        path.write_text("")
    monkeypatch.setattr("mae.web.site.vendored", lambda: runtime)
    save(tiny_model(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25)).eval(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_site_is_written_whole_and_never_over_another(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    site = tmp_path / "a[" / "site]"  # no markup
    assert main(["web", str(model), "--export", str(site)]) == 0
    facts = read_json(site / "model.json")
    for name in ("index.html", "page.js", "vendor/ort.wasm", *facts["examples"], facts["graphs"][0]["file"]):
        assert (site / name).is_file(), name
    assert f"{site}: 1 checkpoint;" in capsys.readouterr().out
    assert main(["web", str(model), "--export", str(site)]) == 2
    assert "site] exists and is not overwritten" in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_drawn_on_leaves_nothing(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save(tiny_model(mean=(0.4,) * 3, std=(0.2,) * 3, decoder="cross").eval(), tmp_path / "cross.safetensors")
    for given, says in (("cross.safetensors", "--decoder self"), ("none", "none")):
        assert main(["web", str(tmp_path / given), "--export", str(tmp_path / "site")]) == 2
        assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*site*"))
    assert main(["web", str(model), "--port", "70000", "--no-open"]) == 2
    assert "port 70000" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_the_server_and_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    served: list[Path] = []

    def serve(server: ThreadingHTTPServer) -> None:
        served.extend(Path(tempfile.gettempdir()).glob("mae-web-*"))
        signal.raise_signal(getattr(signal, name))

    monkeypatch.setattr(tempfile, "tempdir", str(model.parent))
    monkeypatch.setattr("mae.web.page.write_site", lambda model, folder: None)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", serve)
    assert main(["web", str(model), "--no-open"]) == 0
    assert len(served) == 1 and not served[0].exists()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_signal_before_there_is_a_page_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, code: int
):
    monkeypatch.setattr(tempfile, "tempdir", str(model.parent))
    monkeypatch.setattr("mae.web.page.write_site", lambda model, folder: signal.raise_signal(getattr(signal, name)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what runs behind it ignore Ctrl-C
    try:
        assert main(["web", str(model), "--no-open"]) == code
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.startswith("mae: error: ")
    assert not list(model.parent.glob("mae-web-*"))
