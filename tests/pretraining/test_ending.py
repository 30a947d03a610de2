"""What a run leaves that says how it ended, and the callbacks that follow it."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mae
from mae.pretraining.watch.status import read_state
from mae.report.html.watch import describe
from mae.training.run_records import read_ending

TINY: dict[str, Any] = {
    "model": "mae_vit_lesson_patch4",
    "img_size": (16, 16),
    "batch_size": 8,
    "device": "cpu",
    "doctor": False,
    "quiet": True,
}


class Noted:
    """A callback that keeps the rows, and may do something at a step."""

    def __init__(self, act: Any = None, at: int = 1) -> None:
        self.rows: list[Any] = []
        self.closed = False
        self._act, self._at = act, at

    def log(self, row: Any) -> None:
        self.rows.append(row)
        if self._act is not None and "loss" in row and row["step"] == self._at:
            self._act()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    drawn = np.random.default_rng(0).integers(0, 256, (16, 16, 16, 3), dtype=np.uint8)
    for number, pixels in enumerate(drawn):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def told(run: Path) -> str:
    return dict(describe(read_state(run, now=time.time())))["state"]


def test_a_stopped_run_says_so_and_a_resumed_one_that_it_finished(images: Path, tmp_path: Path) -> None:
    run, noted = tmp_path / "run", Noted(lambda: os.kill(os.getpid(), signal.SIGINT))
    first = mae.pretrain(images, out=run, steps=40, callbacks=[noted], **TINY)
    assert not first.finished and noted.closed and any("evaluation" in row for row in noted.rows)
    ending = read_ending(run / "ended.json")
    assert ending is not None and (ending.how, ending.why) == ("stopped", "Ctrl-C") and 1 <= ending.step < 40
    assert told(run).startswith("stopped: Ctrl-C; ended at step ") and "--resume --out" in told(run)
    assert "Ctrl-C" in (run / "summary.html").read_text()
    mae.pretrain(out=run, resume=True, quiet=True)
    ending = read_ending(run / "ended.json")
    assert ending is not None and (ending.how, ending.step) == ("finished", 40)
    assert told(run) == "finished, 40 steps" and "What it reached" in (run / "summary.html").read_text()
    with pytest.raises(mae.UsageError, match="is one of 40 steps, and 80 steps are asked for.*--init-from"):
        mae.pretrain(out=run, resume=True, quiet=True, steps=80)


def test_a_stopped_and_resumed_run_without_a_finite_step_says_so(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stopping = tmp_path / "run", Noted()

    def stop_at_once(row: Any) -> None:
        if row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(stopping, "log", stop_at_once)
    monkeypatch.setattr("mae.training.engine.all_finite", lambda *numbers: torch.tensor(False))
    assert not mae.pretrain(images, out=run, steps=4, callbacks=[stopping], **TINY).finished
    with pytest.raises(mae.MAEError, match=r"not finite \(nan or inf\) in any step of the run.*Lower the rate"):
        mae.pretrain(out=run, resume=True, quiet=True)
    ending = read_ending(run / "ended.json")
    assert ending is not None and ending.how == "failed"


def test_a_callback_that_raises_ends_the_run_which_says_why(images: Path, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no room <b>here</b>")

    with pytest.raises(RuntimeError, match="no room"):
        mae.pretrain(images, out=tmp_path / "run", steps=4, callbacks=[Noted(fail)], **TINY)
    ending = read_ending(tmp_path / "run" / "ended.json")
    assert ending is not None and (ending.how, ending.why) == ("failed", "no room <b>here</b>")
    assert "no room <b>here</b>" in told(tmp_path / "run")


def test_a_run_that_no_checkpoint_was_waited_for_begins_again(images: Path, tmp_path: Path) -> None:
    def insist() -> None:
        raise KeyboardInterrupt  # as a second Ctrl-C does

    with pytest.raises(KeyboardInterrupt):
        mae.pretrain(images, out=tmp_path / "run", steps=4, callbacks=[Noted(insist)], **TINY)
    ending = read_ending(tmp_path / "run" / "ended.json")
    assert ending is not None and (ending.how, ending.step, ending.saved) == ("stopped", 1, False)
    assert mae.pretrain(out=tmp_path / "run", resume=True, quiet=True).finished
    ending = read_ending(tmp_path / "run" / "ended.json")
    assert ending is not None and (ending.how, ending.step, ending.saved) == ("finished", 4, True)


@pytest.mark.parametrize("how", ["failed", "stopped"])
def test_records_of_earlier_versions_do_not_say_what_was_saved(images: Path, tmp_path: Path, how: str) -> None:
    def fail() -> None:
        raise RuntimeError

    run = tmp_path / "run"
    with pytest.raises(RuntimeError):
        mae.pretrain(images, out=run, steps=4, callbacks=[Noted(fail)], **TINY)
    (run / "ended.json").write_text(json.dumps({"how": how, "why": "", "step": 1, "at": 1.0}))
    if how == "failed":  # which saved nothing; a run that was stopped did
        assert mae.pretrain(out=run, resume=True, quiet=True).finished
        return
    with pytest.raises(mae.UsageError, match="holds no checkpoint, and the run stopped after step 1, which saved one"):
        mae.pretrain(out=run, resume=True, quiet=True)


@pytest.mark.parametrize("text", ["[]", "{", '{"how": "asleep", "why": "", "step": 1, "at": 1.0}', '{"how": "failed"}'])
def test_a_damaged_record_of_the_ending_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "ended.json").write_text(text)
    with pytest.raises(mae.UsageError, match="ended.json"):
        read_ending(tmp_path / "ended.json")
