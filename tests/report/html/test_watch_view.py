"""The state of a run as lines in the terminal and as a page."""

import re
import shlex
from dataclasses import replace
from io import StringIO
from math import nan
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console
from test_page import Outline

from mae.report.figures.curves import Line
from mae.report.html import watch
from mae.report.html.watch import Look, Newest, RunState, Warned, describe, sparkline, terminal_view, write_watch_page

HOSTILE = '"><script>alert(1)</script>[bold]\x1b[2J'


def state(folder: Path, **changes) -> RunState:
    newest = Newest(
        loss=0.5,
        terms={"reconstruction": 0.5},
        lr=1e-3,
        grad_norm=0.75,
        images_per_second=1234.5,
        data_wait=0.25,
        seconds=190.0,
    )
    values = {
        "folder": folder,
        "status": "live",
        "read_at": 10_000.0,
        "written_at": 9_990.0,
        "step": 300,
        "total_steps": 1200,
        "seconds_left": 125.0,
        "newest": newest,
        "loss": Line(label="this run", x=[100, 200, 300], y=[1.0, 0.75, 0.5]),
        "baselines": {"zero": 0.99, "mean_of_visible": 0.8},
        "facts": [("recipe", "demo")],
        "resume": f"mae pretrain --resume --out {shlex.quote(str(folder))}",
        "next_commands": (f"mae evaluate all {folder} --data LABELLED/",),
    }
    return RunState(**{**values, **changes})


LOOKS = [
    Look(step=0, samples=0, numbers={"effective_rank": 2.0, "knn": 0.25, "chance": 0.1, "held_out": 1.25}),
    Look(
        step=200,
        samples=200,
        numbers={"effective_rank": 8.5, "knn": 0.5, "chance": 0.1, "held_out": 0.6, "held_out_train": 0.55},
    ),
]
REFERENCE = Line(
    label="reference: recipe demo, 2 seeds", x=[100, 400], y=[0.9, 0.3], band=([0.8, 0.25], [1.0, 0.35])
)  # at 300 samples 0.5 ± 0.0667
WARNINGS = [Warned(step=step, name="loss_spike", text=f"text {step}") for step in (10, 20, 30, 40)]


def lines(shown: RunState) -> dict[str, str]:
    return dict(describe(shown))


def test_describes_a_live_run(tmp_path):
    told = lines(state(tmp_path, looks=LOOKS, reference=REFERENCE, warnings=WARNINGS))
    assert told["state"] == "live, step 300 of 1,200 (25%), 2 min 05 s left"
    assert told["loss"] == "0.5000, 38% below mean predictor"
    assert told["learning rate"] == "1.00e-03; gradient norm 0.75"
    assert told["speed"] == "1,234 images/s, 25% of the time waiting for data"
    assert told["baselines"] == "zero 0.9900, mean of visible 0.8000"
    assert told["reference"] == "0.5000 ± 0.0667 at the same number of samples (recipe demo, 2 seeds)"
    assert told["held out"] == "0.6000; 0.5500 on as many training images"
    assert told["features"] == "effective rank 8.5 ↑ (first 2), k-NN accuracy 50.0% ↑ (first 25.0%), chance 10.0%"
    assert told["warnings"].splitlines() == [
        "1 earlier", *(f"step {step}, loss_spike: text {step}" for step in (20, 30, 40))
    ]  # fmt: skip


def test_terms_are_named_where_there_are_several(tmp_path):
    newest = state(tmp_path).newest
    several = replace(newest, loss=0.9, terms={"reconstruction": 0.6, "uniformity": -1.0}, grad_norm=None)
    told = lines(state(tmp_path, newest=several))
    assert told["loss"] == "0.9000; reconstruction 0.6000, 25% below mean predictor, uniformity -1.0000"
    assert told["learning rate"] == "1.00e-03"


def test_a_stopped_run_says_since_when_and_how_to_go_on(tmp_path):
    told = lines(state(tmp_path / "a b", status="stopped", seconds_left=None, written_at=2_800.0))
    assert "stopped at step 300 of 1,200 (25%): nothing written for 2 h 00 min, since 1970-01-0" in told["state"]
    assert told["state"].endswith(f"mae pretrain --resume --out '{tmp_path}/a b'")


def test_a_finished_run_and_one_that_only_began(tmp_path):
    assert lines(state(tmp_path, status="finished"))["state"] == "finished, 1,200 steps"
    begun = state(tmp_path, step=0, newest=None, loss=None, seconds_left=None, baselines={})
    assert describe(begun) == [("state", "live, step 0 of 1,200 (0%)"), ("loss", "none yet")]
    write_watch_page(begun, tmp_path / "p.html", refresh=5)
    assert "<img" not in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize("samples", [50, 450])
def test_where_the_reference_has_no_point_nothing_is_compared(tmp_path, samples):
    line = Line(label="this run", x=[samples], y=[0.5])
    told = lines(state(tmp_path, loss=line, reference=REFERENCE))
    assert told["reference"] == "recipe demo, 2 seeds; no value at this number of samples"


def test_the_terminal_shows_every_line_and_no_text_acts(tmp_path):
    shown = state(tmp_path / HOSTILE.replace("/", ""), looks=LOOKS, warnings=[Warned(step=1, name="w", text=HOSTILE)])
    text = StringIO()
    Console(file=text, width=200, force_terminal=True, color_system=None).print(terminal_view(shown))
    for value in ("live, step 300", "█▅▁  1 to 0.5", "baselines"):
        assert value in text.getvalue()
    assert text.getvalue().count("[bold]") == 2  # of the folder and of the warning
    assert "\x1b[2J" not in text.getvalue()


def test_the_course_of_numbers_in_letters():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([1.0, 3.0, 5.0, 7.0], width=2) == "▁█"
    assert sparkline([2.0, 2.0, nan]) == "▅▅" and sparkline([nan]) == ""


@pytest.fixture
def drawn(monkeypatch):
    """What the page has drawn of losses."""
    calls = []
    original = watch.lines_figure
    monkeypatch.setattr(
        watch, "lines_figure", lambda given, **parts: (calls.append((given, parts)), original(given, **parts))[1]
    )
    return calls


def page_of(shown: RunState, path: Path, refresh: int | None) -> tuple[str, Outline]:
    write_watch_page(shown, path, refresh=refresh)
    source = path.read_text()
    outline = Outline(source)
    assert outline.open == []
    return source, outline


def test_the_page_holds_curves_panels_and_warnings_and_needs_nothing_else(tmp_path, drawn):
    panel = tmp_path / "step-00000200.png"
    Image.new("RGB", (8, 8)).save(panel)
    note = "Grey: something."
    shown = state(
        tmp_path,
        looks=LOOKS,
        reference=REFERENCE,
        reference_note=note,
        warnings=WARNINGS,
        panel=panel,
        status="stopped",
    )
    source, outline = page_of(shown, tmp_path / "p.html", refresh=10)
    images = [attrs for tag, attrs in outline.tags if tag == "img"]
    assert [image["alt"] for image in images] == ["Loss", "Online evaluation", "Latest reconstructions"]
    assert all(image["src"].startswith("data:image/png;base64,") for image in images)
    assert not {tag for tag, _ in outline.tags} & {"script", "link", "iframe", "object", "base"}
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"base64,[^\"]*", "", source))
    texts = [text for _, text in outline.texts]
    assert note in texts and "text 10" in texts and "8.5" in texts and "recipe" in texts
    assert f"mae pretrain --resume --out {tmp_path}" in texts
    [(lines_drawn, parts)] = drawn
    assert [line.label for line in lines_drawn] == ["this run", "held out", "held out train"]
    assert list(lines_drawn[1].x) == [0, 200] and list(lines_drawn[2].y) == [0.55]
    assert parts["reference"] is REFERENCE and parts["levels"] == shown.baselines
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".png"] == ["p.html"]


def test_the_page_is_read_again_only_where_it_is_written_again(tmp_path):
    def times(refresh: int | None) -> list[str]:
        _, outline = page_of(state(tmp_path), tmp_path / "p.html", refresh)
        return [attrs["content"] for tag, attrs in outline.tags if attrs.get("http-equiv") == "refresh"]

    assert times(10) == ["10"] and times(None) == []


def test_a_hostile_folder_name_does_nothing_on_the_page(tmp_path):
    shown = state(tmp_path / HOSTILE.replace("/", ""), warnings=[Warned(step=1, name=HOSTILE, text=HOSTILE)])
    source, outline = page_of(shown, tmp_path / "p.html", None)
    assert "<script" not in source and "script" not in {tag for tag, _ in outline.tags}
    assert any("<script>alert(1)" in text for tag, text in outline.texts if tag == "h1")
