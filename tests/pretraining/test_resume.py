"""A run that was cut ends where an uninterrupted one does."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import mae
from mae.config import as_flags
from mae.errors import UsageError
from mae.training.log import loss_rows, read_rows

Run = Callable[..., mae.PretrainResult]
OPTIONS: dict[str, Any] = {
    "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "batch_size": 64, "steps": 42,
    "device": "cpu", "save_every": 5, "skip_doctor": True,
}  # fmt: skip
ARGS = ["builtin:digits", "--workers", "1", *(flag for name in OPTIONS for flag in as_flags(name, OPTIONS[name]))]


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mae", "pretrain", *more, "--out", str(out)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while len(loss_rows(read_rows(out / "metrics.jsonl"))) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return mae.load(path).state_dict()


def assert_same_end(one: Path, other: Path) -> None:
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in first)
    measured = [
        [(row["step"], row.get("loss"), row.get("evaluation")) for row in read_rows(run / "metrics.jsonl")]
        for run in (one, other)
    ]
    assert measured[0] == measured[1]


def test_resuming_where_no_checkpoint_was_yet_starts_over(finished: Path, tmp_path: Path):
    cut = shutil.copytree(finished, tmp_path / "cut")
    shutil.rmtree(cut / "checkpoints")
    mae.pretrain(out=cut, resume=True, quiet=True)
    assert_same_end(finished, cut)


def test_resuming_falls_back_to_the_checkpoint_before_a_damaged_one(finished: Path, tmp_path: Path):
    cut = shutil.copytree(finished, tmp_path / "cut")
    damaged = cut / "checkpoints" / "step-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    mae.pretrain(out=cut, resume=True, quiet=True)
    assert_same_end(finished, cut)


def test_resuming_a_finished_run_changes_nothing(finished: Path):
    before = weights(finished)
    assert mae.pretrain(out=finished, resume=True, quiet=True).finished
    after = weights(finished)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_resumed_run_refuses_other_options(finished: Path):
    with pytest.raises(UsageError, match="begun otherwise: lr was .*, is now 0.5; mask_ratio was 0.75, is now 0.5"):
        mae.pretrain(out=finished, resume=True, quiet=True, lr=0.5, mask_ratio=0.5)
    with pytest.raises(UsageError, match="source was 'builtin:digits', is now 'builtin:photos'"):
        mae.pretrain("builtin:photos", out=finished, resume=True, quiet=True)
    with pytest.raises(UsageError, match="recipe was 'default', is now 'cifar10'"):
        mae.pretrain(recipe="cifar10", out=finished, resume=True, quiet=True)
    changed = {"workers": 1, "accumulate": 2}
    assert mae.pretrain("builtin:digits", out=finished, resume=True, quiet=True, **changed).finished


def test_a_resumed_run_refuses_other_images(pretrain: Run, tmp_path: Path, photos: Path):
    pretrain(source=photos, img_size=32, patch_size=4, batch_size=8)
    (photos / "00.png").unlink()
    with pytest.raises(UsageError, match="holds other images than when the run .* was begun"):
        mae.pretrain(out=tmp_path / "run", resume=True, quiet=True)


def test_resume_needs_a_run(tmp_path: Path):
    with pytest.raises(UsageError, match="--resume needs --out"):
        mae.pretrain("builtin:digits", resume=True, quiet=True)
    with pytest.raises(UsageError, match="holds no run to go on with"):
        mae.pretrain(out=tmp_path / "nowhere", resume=True, quiet=True)


def test_resume_begins_a_run_that_is_none_yet_where_a_source_says_of_what(
    pretrain: Run, finished: Path, tmp_path: Path
):
    """The same command then serves every start of a job that is stopped and started again."""
    for _ in range(2):
        assert pretrain("job", resume=True).finished
    assert_same_end(finished, tmp_path / "job")


@pytest.mark.parametrize("left", [["panels"], ["panels", "data.json"], ["panels", "data.json", ".config.json.writing"]])
def test_a_start_killed_before_the_run_was_begun_leaves_the_folder_free(
    pretrain: Run, finished: Path, tmp_path: Path, left: list[str]
):
    (tmp_path / "job" / "panels").mkdir(parents=True)
    for name in left[1:]:
        (tmp_path / "job" / name).write_text("{")
    assert pretrain("job").finished
    assert_same_end(finished, tmp_path / "job")


@pytest.mark.parametrize("left", ["panels/mine.png", "notes.txt", "data.json.txt"])
def test_a_folder_with_anything_else_is_refused(pretrain: Run, tmp_path: Path, left: str):
    (tmp_path / "job" / "panels").mkdir(parents=True)
    (tmp_path / "job" / left).write_text("")
    with pytest.raises(UsageError, match="is there already and is not an empty folder"):
        pretrain("job")


@pytest.mark.digits
@pytest.mark.slow
def test_torchrun_starts_a_run_anew_after_a_process_died_and_it_goes_on(
    tmp_path: Path, few_watched: pytest.MonkeyPatch
):
    """It begins at the last checkpoint by itself, and computes what one process does.

    So is what a batch is compared with (uniformity), and how much of it is hidden.
    """
    few_watched.undo()  # as many images as the other processes look at
    changed = {"steps": 40, "save_every": 2, "accumulate": 2, "recipe": "improved", "mask_warmup": 0.15, "workers": 0}
    assert mae.pretrain("builtin:digits", out=tmp_path / "one", quiet=True, **{**OPTIONS, **changed}).finished
    options = {**OPTIONS, **changed}
    words = ["pretrain", "builtin:digits", *(flag for name in options for flag in as_flags(name, options[name]))]
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m", "mae"]
    command = [sys.executable, "-m", *launcher, *words, "--out", str(tmp_path / "cut")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as cut:
        wait_for_step(cut, tmp_path / "cut", 9)
        psutil.Process(cut.pid).children()[-1].kill()
        said = cut.communicate(timeout=240)[0]
    assert cut.returncode == 0, said
    rows = [loss_rows(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("one", "cut")]
    assert [row["step"] for row in rows[1]] == list(range(1, 41))
    for alone, together in zip(*rows, strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["terms"] == pytest.approx(alone["terms"], rel=1e-4, abs=1e-6)


def test_a_run_that_torchrun_may_start_anew_needs_a_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(UsageError, match="give --out, so that it finds what it did"):
        mae.pretrain("builtin:digits", quiet=True)
