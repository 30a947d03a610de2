from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mae.cli import main
from mae.errors import MAEError
from mae.models.presets import model_config
from mae.recipes import recipe_config
from mae.training.run_folder import RunFolder


@pytest.mark.slow
def test_the_demo_says_what_it_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for grid in ("_TRAINING_GRID", "_TEST_GRID"):  # fewer squares of each photograph
        monkeypatch.setattr(f"mae.data.sources.builtin.{grid}", (6, 6))
    run = tmp_path / "run[" / "a]"  # no markup
    assert main(["demo", "--steps", "2", "--out", str(run)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "mean_of_visible",
        "Finished",
        "this model",
        "random weights",
        "raw pixels",
        "chance 12.5%",
        "Look at",
    ):
        assert part in shown, part
    assert (run / "panels" / "step-00000002.png").is_file()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, bool]]:
    """What `mae demo --web` trains and serves, instead of doing so."""
    made: list[tuple[str, Path, bool]] = []

    def train(out: Path, steps: int | None, *, resume: bool, console: object) -> int:
        made.append(("train", out, resume))
        return 0

    def serve(model: Path, *, port: int, open_browser: bool, console: object) -> int:
        made.append(("serve", model, open_browser))
        return 0

    monkeypatch.setattr("mae.cli.demo._train", train)
    monkeypatch.setattr("mae.web.page.serve_page", serve)
    monkeypatch.setattr("mae.web.site.check_ready", lambda: None)
    return made


def test_the_page_comes_after_the_training(calls: list[tuple[str, Path, bool]]):
    assert main(["demo", "--web"]) == 0
    assert calls == [("train", Path("runs/demo"), True), ("serve", Path("runs/demo"), True)]


def test_a_demo_that_is_there_is_not_trained_again(tmp_path: Path, calls: list[tuple[str, Path, bool]]):
    (tmp_path / "summary.json").write_text("{}")
    assert main(["demo", "--web", "--out", str(tmp_path)]) == 0
    assert calls == [("serve", tmp_path, True)]


def begin(folder: Path, **options: Any) -> None:
    """A run of the demo's recipe that was stopped, with what its data decided."""
    config = recipe_config("demo").override(options)
    assert isinstance(config.method, Mapping) and config.model is not None
    method = model_config(config.model, **config.method, mean=(0.5,) * 3, std=(0.25,) * 3, pixel_dtype="uint8")
    optim = replace(config.optim, precision="fp32")
    RunFolder(folder).begin(replace(config, method=method, optim=optim).to_json(), {})


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"source": "photos"}, "source is 'photos', the demo's is 'builtin:photos'"),
        ({"lr": 1e-4}, "lr is 0.0001, the demo's is 0.0015"),
        ({"decoder_depth": 2}, "decoder_depth is 2, the demo's is 4"),
    ],
)
def test_a_run_of_ones_own_is_neither_trained_on_nor_shown_as_the_demo(
    tmp_path: Path,
    calls: list[tuple[str, Path, bool]],
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    says: str,
    finished: bool,
):
    begin(tmp_path / "run", **options)
    if finished:
        (tmp_path / "run" / "summary.json").write_text("{}")
    assert main(["demo", "--web", "--out", str(tmp_path / "run")]) == 2
    told = capsys.readouterr().err
    assert says in told and "'mae web " in told and "another --out" in told and not calls


def test_a_stopped_demo_goes_on_with_its_own_steps_alone(
    tmp_path: Path, calls: list[tuple[str, Path, bool]], capsys: pytest.CaptureFixture[str]
):
    begin(tmp_path, steps=20)
    for steps in ([], ["--steps", "20"]):
        calls.clear()
        assert main(["demo", "--web", "--out", str(tmp_path), *steps]) == 0
        assert calls == [("train", tmp_path, True), ("serve", tmp_path, True)]
    calls.clear()
    (tmp_path / "summary.json").write_text("{}")
    assert main(["demo", "--web", "--out", str(tmp_path), "--steps", "30"]) == 2
    assert "holds a demo of 20 steps, and --steps asks for 30" in capsys.readouterr().err and not calls


def test_what_the_page_needs_is_looked_for_before_the_training(
    calls: list[tuple[str, Path, bool]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing() -> None:
        raise MAEError("get it by 'make web'")

    monkeypatch.setattr("mae.web.site.check_ready", missing)
    assert main(["demo", "--web"]) == 1
    assert "make web" in capsys.readouterr().err and not calls
