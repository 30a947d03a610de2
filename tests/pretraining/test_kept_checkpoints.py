"""Which checkpoints a run keeps for good when nobody says."""

from pathlib import Path
from typing import Any

import pytest

import mae
from mae.pretraining.build import kept_every


@pytest.mark.parametrize(
    ("steps", "num_bytes", "asked", "expected"),
    [
        (1000, 10**6, None, 100),
        (1005, 10**6, None, 101),  # ten at the most
        (999, 10**6, None, None),  # over too soon to be looked at
        (5000, 10**8, None, 500),
        (5000, 10**8 + 1, None, None),  # ten would take more than 1 GB
        (5000, 10**9, 7, 7),
        (10, 10**6, 3, 3),
    ],
)
def test_small_ones_are_kept_ten_times(steps: int, num_bytes: int, asked: int | None, expected: int | None):
    assert kept_every(asked, steps=steps, num_bytes=num_bytes) == expected


def test_a_checkpoint_is_as_large_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = []
    monkeypatch.setattr("mae.pretraining.build.check_room", lambda *_, num_bytes, **__: said.append(num_bytes))
    small: dict[str, Any] = {"img_size": 8, "patch_size": 2, "mlp_ratio": 0.5, "decoder_depth": 1}
    options = {"batch_size": 16, "steps": 1, "device": "cpu", "workers": 0, "doctor": False, "quiet": True}
    for number, change in enumerate(
        [
            small,  # with Muon
            {**small, "optimizer": "adamw", "target": "codes", "teacher": "codebook", "loss": "cross_entropy"},
            {**small, "optimizer": "adamw", "target": "features", "teacher": "ema"},
            {"init_from": str(tmp_path / "0"), "adapter": "lora", "adapter_blocks": 1},
        ]
    ):
        run = mae.pretrain("builtin:digits", out=tmp_path / str(number), **options, **change)
        (folder,) = (run.folder / "checkpoints").iterdir()
        found = sum(path.stat().st_size for path in folder.iterdir())
        assert said[-1] <= found <= said[-1] + 100_000, change  # and headers, settings and random states
