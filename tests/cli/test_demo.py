from pathlib import Path

import pytest

from mae.cli import main
from mae.errors import MAEError


@pytest.mark.slow
def test_the_demo_says_what_it_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    for grid in ("_TRAINING_GRID", "_TEST_GRID"):  # fewer squares of each photograph
        monkeypatch.setattr(f"mae.data.sources.builtin.{grid}", (6, 6))
    assert main(["demo", "--steps", "2", "--out", str(tmp_path / "run")]) == 0
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
    assert (tmp_path / "run" / "panels" / "step-00000002.png").is_file()


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


def test_what_the_page_needs_is_looked_for_before_the_training(
    calls: list[tuple[str, Path, bool]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def missing() -> None:
        raise MAEError("get it by 'make web'")

    monkeypatch.setattr("mae.web.site.check_ready", missing)
    assert main(["demo", "--web"]) == 1
    assert "make web" in capsys.readouterr().err and not calls
