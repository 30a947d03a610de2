"""What the progress display says of each kind of row."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from mae.report.terminal.console import ProgressDisplay, show_table

ROW = {
    "step": 4,
    "samples": 32,
    "loss": 0.5,
    "terms": {"reconstruction": 0.5},
    "lr": 1e-3,
    "images_per_second": 1234.5,
    "data_wait": 0.25,
}
EVALUATION = {"step": 4, "samples": 32, "evaluation": {"knn": 0.3841234, "[odd] name": 0.5}}


def test_no_name_in_a_table_is_markup_or_steers_the_terminal() -> None:
    text = StringIO()
    name = "[/a]\x1b[2J\x9b1m\u202e\udcff"
    show_table(Console(file=text, width=80), f"Plan for {name}", [("images", f"{name}\nand one more")])
    shown = "[/a]\ufffd[2J\ufffd1m\ufffd\ufffd"
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert lines == [f"Plan for {shown}", f"images  {shown}", "        and one more"]


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
    assert "step 0  k-NN accuracy 38.4% ↑  [odd] name 0.5" in text.getvalue()
    assert "step 4  k-NN accuracy 38.4% ↑  [odd] name 0.5" in text.getvalue()
    if terminal:
        return
    beside = "" if baseline is None else " (50% below mean predictor)"
    assert f"step 4/8  loss 0.5000{beside}  lr 1.00e-03  1,234 images/s" in text.getvalue()


def test_numbers_of_either_codebook_are_told_alike() -> None:
    text = StringIO()
    display = ProgressDisplay(Console(file=text, width=200), total_steps=8, start_step=0, mean_baseline=None)
    display.log({**EVALUATION, "evaluation": {"codes_used": 30.0, "code_prediction_codes_used": 9.0}})
    assert "codes used 30 ↑  code prediction codes used 9 ↑" in text.getvalue()


def test_other_terms_are_named_and_the_baseline_stands_beside_the_reconstruction() -> None:
    text = StringIO()
    display = ProgressDisplay(Console(file=text, width=200), total_steps=8, start_step=0, mean_baseline=1.0)
    display.log({**ROW, "loss": 0.9, "terms": {"reconstruction": 0.7, "uniformity": -1.25}})
    assert "loss 0.9000  reconstruction 0.7000 (30% below mean predictor)  uniformity -1.2500" in text.getvalue()


def test_where_nothing_is_to_be_predicted_it_says_so_of_any_target() -> None:
    text = StringIO()
    ProgressDisplay(Console(file=text, width=200), total_steps=8, start_step=0, mean_baseline=0.0).log(ROW)
    assert "(nothing to predict: the target is the same everywhere, as that of images of one colour)" in text.getvalue()


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


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_the_live_line_holds_what_fits_the_most_important_first(width: int) -> None:
    text = StringIO()
    console = Console(file=text, force_terminal=True, width=width, color_system=None)
    display = ProgressDisplay(console, total_steps=5000, start_step=0, mean_baseline=1.0)
    display.log({**ROW, "step": 1250, "terms": {"reconstruction": 0.5, "uniformity": -1.25}})
    display.close()
    *_, line = (Text.from_ansi(each).plain.rstrip() for each in text.getvalue().splitlines() if "1250/5000" in each)
    assert len(line) <= width
    bar, numbers = line.index("1250/5000"), line[line.index("1250/5000") :]  # without colour its rest is blank
    assert numbers.startswith("1250/5000  loss 0.5000 (50% below mean)  ETA ")
    assert bar >= 10 if width >= 80 else bar == 0
    fields = ("img/s", "lr 1.00e-03", "waiting for data 25%", "uniformity -1.2500")
    shown = [field in line for field in fields]
    assert shown == sorted(shown, reverse=True)  # only the end is left out
    assert sum(shown) >= {60: 0, 80: 1, 100: 2, 120: 3, 200: 4}[width]


def test_where_no_arrow_can_be_written_a_word_stands_for_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        display = ProgressDisplay(Console(file=file, width=80), total_steps=8, start_step=0, mean_baseline=None)
        display.log({"step": 4, "samples": 32, "evaluation": {"effective_rank": 4.238, "uniformity": -0.5}})
    assert (tmp_path / "log").read_text() == (
        "step 4  effective rank 4.24 (up is better)  uniformity -0.5 (down is better)\n"
    )
