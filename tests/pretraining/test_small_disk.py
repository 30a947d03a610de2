"""A disk that is really full: a small file system in memory, where this machine lets one be made."""

import signal
from pathlib import Path
from typing import Any

import pytest
from full import fill
from safetensors.torch import load_file

import mae
from mae.training.checkpoint import check
from mae.training.engine import Trainer

OPTIONS: dict[str, Any] = {
    "source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2, "mlp_ratio": 0.5,
    "decoder_depth": 1, "batch_size": 16, "save_every": 2, "steps": 12, "device": "cpu", "workers": 0, "quiet": True,
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
