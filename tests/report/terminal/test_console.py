"""What the progress display says of each kind of row."""

from io import StringIO

import pytest
from rich.console import Console

from mae.report.terminal.console import ProgressDisplay

ROW = {
    "step": 4,
    "samples": 32,
    "loss": 0.5,
    "terms": {"reconstruction": 0.5},
    "lr": 1e-3,
    "images_per_second": 1234.5,
    "data_wait": 0.25,
}
EVALUATION = {"step": 4, "samples": 32, "evaluation": {"knn": 38.41234, "[odd] name": 0.5}}


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("baseline", [1.0, None])
def test_rows_are_shown(terminal: bool, baseline: float | None) -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=200)
    display = ProgressDisplay(console, total_steps=8, start_step=0, mean_baseline=baseline)
    display.log({**EVALUATION, "step": 0})  # before the first step there is nothing to reckon a speed from
    display.log(ROW)
    display.log(EVALUATION)
    display.close()
    assert "step 0  knn 38.41  [odd] name 0.5" in text.getvalue()
    assert "step 4  knn 38.41  [odd] name 0.5" in text.getvalue()
    beside = "" if baseline is None else " (50% below mean predictor)"
    assert f"step 4/8  loss 0.5000{beside}  lr 1.00e-03  1,234 images/s" in text.getvalue()


def test_other_terms_are_named_and_the_baseline_stands_beside_the_reconstruction() -> None:
    text = StringIO()
    display = ProgressDisplay(Console(file=text, width=200), total_steps=8, start_step=0, mean_baseline=1.0)
    display.log({**ROW, "loss": 0.9, "terms": {"reconstruction": 0.7, "uniformity": -1.25}})
    assert "loss 0.9000  reconstruction 0.7000  uniformity -1.2500 (30% below mean predictor)" in text.getvalue()


def test_a_look_before_the_first_step_is_not_reckoned_as_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("mae.report.terminal.console.time.monotonic", lambda: now[0])
    text = StringIO()
    display = ProgressDisplay(Console(file=text, width=200), total_steps=12, start_step=0, mean_baseline=None)
    now[0] = 500.0
    display.log({**EVALUATION, "step": 0})
    now[0] = 540.0  # four steps of ten seconds
    display.log(ROW)
    assert "ETA 1 min 20 s" in text.getvalue()
    now[0] = 640.0
    display.log(EVALUATION)  # later ones come again, and count
    display.log({**ROW, "step": 7})
    assert "ETA 1 min 40 s" in text.getvalue()
