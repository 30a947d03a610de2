"""A disk that is really full: a small file system in memory, where this machine lets one be made."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from full import fill
from safetensors.torch import load_file

import mae
from mae.training.checkpoint import check
from mae.training.engine import Trainer

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5,
    "decoder_depth": 1, "batch_size": 16, "checkpoint_every": 2, "steps": 12, "device": "cpu", "workers": 0,
    "quiet": True,
    "held_out": 0.0,
}  # fmt: skip


def weights(run: Path) -> dict[str, Any]:
    return load_file(max((run / "checkpoints").iterdir()) / "model.safetensors")


def checkpoints(run: Path) -> list[str]:
    """Those that are there, each of which must be whole."""
    found = sorted((run / "checkpoints").iterdir())
    assert not any(check(path) for path in found)
    return [path.name for path in found]


@pytest.mark.parametrize("leave", [0, 2_000_000, 8_000_000])
def test_a_run_on_a_full_disk_keeps_its_checkpoint_and_goes_on_when_there_is_room(
    disk: Path, tmp_path: Path, leave: int, monkeypatch: pytest.MonkeyPatch
):
    """With no room not a line can be written, with some no checkpoint, with more one of its two large files."""
    run, whole = disk / "run", mae.pretrain(out=tmp_path / "whole", **OPTIONS)
    with monkeypatch.context() as patch:
        clip = Trainer._clip
        patch.setattr(
            Trainer, "_clip", lambda self: [self.step == 4 and signal.raise_signal(signal.SIGTERM), clip(self)][1]
        )
        assert not mae.pretrain(out=run, **OPTIONS).finished
    before = checkpoints(run)
    assert before == ["step-00000004", "step-00000005"]
    monkeypatch.setattr("mae.pretraining.run.check_disk", lambda *_: None)  # which would refuse to begin
    wall = fill(disk, leave=leave)
    with pytest.raises((mae.MAEError, OSError), match="No space left on device"):
        mae.pretrain(out=run, resume=True, quiet=True)
    assert checkpoints(run) == before
    wall.unlink()
    mae.pretrain(out=run, resume=True, quiet=True)
    assert all((value == weights(run)[name]).all() for name, value in weights(whole.folder).items())
    assert (run / "metrics.jsonl").read_text().count('"step": 12,') >= 1


def stopped_at(run: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of 12 steps that was stopped at one of them."""
    with monkeypatch.context() as patch:
        clip = Trainer._clip
        patch.setattr(
            Trainer,
            "_clip",
            lambda self: [self.step == step - 1 and signal.raise_signal(signal.SIGTERM), clip(self)][1],
        )
        assert not mae.pretrain(out=run, **OPTIONS).finished


def num_bytes(checkpoint: Path) -> int:
    return sum(path.stat().st_size for path in checkpoint.iterdir())


@pytest.mark.parametrize("step", [2, 5])
@pytest.mark.parametrize("aside", [False, True])
def test_a_run_goes_on_where_there_is_room_for_one_checkpoint(
    disk: Path,
    tmp_path: Path,
    step: int,
    aside: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Whether it has one checkpoint or two; what a killed writer left counts as room."""
    run, whole = disk / "run", mae.pretrain(out=tmp_path / "whole", **OPTIONS)
    stopped_at(run, step, monkeypatch)
    newest = max((run / "checkpoints").iterdir())
    one = num_bytes(newest)
    if aside:
        shutil.copytree(newest, run / "checkpoints" / ".writing-step-00000006")
    fill(disk, leave=int((0.6 if aside else 1.6) * one))
    mae.pretrain(out=run, resume=True, quiet=True)
    assert all((value == weights(run)[name]).all() for name, value in weights(whole.folder).items())
    assert checkpoints(run)[-1] == "step-00000012"
    assert ("step-00000002 is deleted for it" in caplog.text) == (step == 2)


def test_a_run_is_not_begun_again_where_there_is_no_room_for_one(disk: Path, monkeypatch: pytest.MonkeyPatch):
    run = disk / "run"
    stopped_at(run, 5, monkeypatch)
    before, one = checkpoints(run), num_bytes(max((run / "checkpoints").iterdir()))
    wall = fill(disk, leave=one // 2)
    with pytest.raises(mae.MAEError, match=r"MB free; its next checkpoint needs .* MB; free space there$"):
        mae.pretrain(out=run, resume=True, quiet=True)
    assert checkpoints(run) == before
    wall.unlink()
    mae.pretrain(out=run, resume=True, quiet=True)
    fill(disk, leave=200_000)  # a run that is over writes no checkpoint any more
    assert mae.pretrain(out=run, resume=True, quiet=True).finished
