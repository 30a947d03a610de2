"""The page of a run, from a server that sends no headers of isolation: one thread, and a slider of checkpoints."""

from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from browser import browser  # noqa: F401 - a fixture

import mae
from mae.errors import MAEError
from mae.models.file import load_model
from mae.training.checkpoint import MODEL, good_checkpoints
from mae.training.run_folder import RunFolder
from mae.web.graph import MaskedGraph
from mae.web.site import vendored, write_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Requests are not told."""


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = mae.pretrain(
        "builtin:digits",
        out=tmp_path / "run",
        model="mae_vit_lesson_patch4",
        img_size=(16, 16),
        batch_size=4,
        warmup_epochs=0,
        steps=2,
        checkpoint_keep_every=1,
        device="cpu",
        workers=0,
        quiet=True,
    ).folder
    return RunFolder(folder)


@pytest.fixture
def address(run: RunFolder, tmp_path: Path) -> Iterator[str]:
    try:
        vendored()
    except MAEError as missing:
        pytest.skip(f"no onnxruntime-web: {missing}")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    write_site(run.root, tmp_path / "site")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "site")))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def test_the_slider_steps_through_the_checkpoints_of_a_gray_run(
    run: RunFolder,
    address: str,
    browser: "Browser",  # noqa: F811
):
    kept = good_checkpoints(run.checkpoints)
    assert len(kept) == 2
    page = browser.new_page()
    page.add_init_script('document.addEventListener("reconstructed", ({detail}) => { window.last = detail; });')
    page.goto(address + "?lang=en&threads=3")  # more than the page may use
    page.wait_for_function("() => window.last", timeout=60_000)
    assert page.evaluate("() => self.crossOriginIsolated") is False and page.workers == []
    assert page.inner_text("#step-shown") == "step 2"
    answers = {}
    for place, step in ((1, 2), (0, 1)):
        page.evaluate("() => { window.last = null; }")
        page.fill("#step", str(place)) if page.input_value("#step") != str(place) else page.click("[data-mask=random]")
        page.wait_for_function("() => window.last", timeout=60_000)
        said = page.evaluate("() => [window.last.pixels, window.last.hidden, window.last.patches].map(v => [...v])")
        model = load_model(kept[step] / MODEL)
        layout = model.tokenizer.layout
        pixels = torch.tensor(said[0]).reshape(1, layout.channels, *layout.size)
        with torch.no_grad():
            expected = MaskedGraph(model)(pixels, torch.tensor(said[1], dtype=torch.bool)[None])["patches"]
        answers[step] = np.array(said[2])
        assert np.abs(answers[step] - expected.flatten().numpy()).max() < 1e-3, step
    assert page.inner_text("#step-shown") == "step 1"
    page.close()


def test_a_checkpoint_that_does_not_come_leaves_the_one_that_is_shown(
    address: str,
    browser: "Browser",  # noqa: F811
):
    held: list[Any] = []
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(
        """window.answers = 0;
        document.addEventListener("reconstructed", () => { window.answers++; });"""
    )
    page.goto(address + "?lang=en")
    page.wait_for_function("() => window.answers > 0", timeout=60_000)
    page.route("**/step-00000001.onnx", lambda route: held.append(route))

    page.fill("#step", "0")
    page.wait_for_function("() => document.getElementById('status').textContent === 'Loading the model …'")
    assert page.inner_text("#step-shown") == "loading step 1 …"
    held.pop().fulfill(status=503)
    page.wait_for_selector("#failure:visible")
    assert page.inner_text("#failure").startswith("models/step-00000001.onnx could not be loaded")
    assert page.input_value("#step") == "1" and page.inner_text("#step-shown") == "step 2"
    assert "patches hidden" in page.inner_text("#status")

    before = page.evaluate("window.answers")
    page.fill("#step", "0")
    page.wait_for_timeout(150)
    assert not page.is_visible("#failure")
    held.pop().continue_()
    page.wait_for_function(f"() => window.answers > {before}", timeout=60_000)
    assert page.inner_text("#step-shown") == "step 1" and not page.is_visible("#failure") and not errors
    page.close()
