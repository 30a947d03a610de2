"""What a cell shows while a run trains: one output that is updated, and all that was printed."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image

import mae
from mae.errors import MAEError
from mae.pretraining.watch.status import read_state
from mae.report.html import live
from mae.report.html.live import NotebookView, in_notebook, open_console, picture_html, run_html


def test_a_cell_has_one_output_with_the_run_at_its_end(trained):
    run, shown = trained
    (numbers,) = shown.outputs
    assert 2 <= len(numbers) <= 40
    first, last = numbers[0], numbers[-1]
    assert "Reading the images" in first and "<progress" not in first
    assert 'aria-label="100% of the steps"' in last and "6 / 6" in last and "finished, 6 steps" in last
    assert f"{run.summary['loss']:.4f}" in last and "<polyline" in last and "mean of visible" in last
    # What a terminal is told stands below, folded.
    assert "<details><summary>What was printed" in last and "Finished" in last and "k-NN accuracy" in last
    assert "<b>" not in last and "r &amp; &lt;b&gt;" in last
    assert len(last) < 60_000


def test_a_result_shows_the_same_run_and_is_well_formed(trained):
    run, _ = trained
    html = run._repr_html_()
    found = ElementTree.fromstring(f"<div>{html}</div>")
    assert found.find(".//progress").get("value") == "1.0000"  # type: ignore[union-attr]
    assert "finished, 6 steps" in "".join(found.itertext())


def test_in_a_terminal_and_in_silence_nothing_is_displayed(cell, monkeypatch):
    with open_console(quiet=True) as console:
        console.print("hidden")
    monkeypatch.setattr("IPython.get_ipython", lambda: object())  # a terminal's shell: no kernel
    assert not in_notebook()
    with open_console(quiet=False) as console:
        assert not isinstance(console, live.NotebookConsole)
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    assert not in_notebook() and cell.outputs == []


def test_ipython_is_not_imported_to_find_out():
    told = "in_notebook(), 'IPython' in sys.modules"
    code = f"import sys, mae.pretraining.run; from mae.report.html.live import in_notebook; print({told})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == ["False"] * 2


def test_updates_come_at_a_modest_rate_and_the_last_one_always(cell, trained, monkeypatch):
    run, _ = trained
    clock = iter(range(100_000))
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0] + next(clock) * 1e-9)
    view = NotebookView().follow(lambda: read_state(run.folder, now=time.time()))
    for _ in range(100):
        now[0] += 0.1
        view.log({})
    assert 10 <= len(cell.outputs[0]) <= 11
    view.close()
    assert len(cell.outputs[0]) in (11, 12)


def test_a_slow_display_waits_longer(cell, trained, monkeypatch):
    run, _ = trained
    now = [0.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])

    def slow():
        now[0] += 1.0
        return read_state(run.folder, now=time.time())

    view = NotebookView().follow(slow)
    view.log({})
    now[0] = 19.0
    view.log({})
    assert len(cell.outputs[0]) == 1
    now[0] = 21.0
    view.log({})
    assert len(cell.outputs[0]) == 2


def test_the_newest_picture_is_an_output_of_its_own_shown_once(cell, trained, tmp_path):
    run, _ = trained
    state = [read_state(run.folder, now=time.time())]
    view = NotebookView().follow(lambda: state[0])
    view.close()
    assert len(cell.outputs) == 1
    Image.effect_noise((3000, 4000), 90).save(tmp_path / "one.png")
    state[0] = replace(state[0], panel=tmp_path / "one.png")
    view.close()
    view.close()
    numbers, (picture,) = cell.outputs
    assert len(numbers) == 3 and "data:image/jpeg;base64," in picture and "one.png" in picture
    assert len(picture) < 1_500_000  # noise, the worst there is
    assert re.search(r"img alt=", picture)


def test_a_picture_that_cannot_be_read_is_left_out(tmp_path):
    (tmp_path / "a.png").write_bytes(b"none")
    assert picture_html(tmp_path / "a.png", label="") == picture_html(Path("absent.png"), label="") == ""


def test_a_run_outlives_its_display(cell):
    def broken():
        raise MAEError("the folder is gone")

    view = NotebookView().follow(broken)
    view.printed.write("told <b>")
    view.close()
    assert cell.outputs[0][-1].count("told &lt;b&gt;") == 1


def test_what_was_printed_stays_when_a_run_is_refused(cell, tmp_path):
    with pytest.raises(mae.UsageError):
        mae.pretrain(tmp_path, out=tmp_path / "r")
    assert "Reading the images" in cell.outputs[0][-1]


def test_a_run_without_numbers_yet_is_shown(trained):
    run, _ = trained
    state = replace(read_state(run.folder, now=time.time()), loss=None, newest=None, step=0, status="live")
    html = run_html(state)
    assert "polyline" not in html and "none yet" in html
