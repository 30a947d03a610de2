from pathlib import Path

import pytest

from mae.cli import main


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
