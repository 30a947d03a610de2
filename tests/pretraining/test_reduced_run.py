"""Runs whose JPEGs are decoded at a reduced scale."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mae
from mae.errors import UsageError

Run = Callable[..., mae.PretrainResult]


@pytest.fixture
def large(tmp_path: Path) -> str:
    folder = tmp_path / "large"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(32):
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        coarse.resize((160, 120), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg")
    return str(folder)


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def test_a_run_keeps_the_option_when_it_is_resumed(pretrain: Run, large: str, capsys: pytest.CaptureFixture[str]):
    options = {"source": large, "batch_size": 16}
    plain = pretrain("plain", **options)
    whole, cut = (pretrain(name, **options, reduced_decoding=True) for name in ("whole", "cut"))
    assert losses(whole.folder) != losses(plain.folder)
    assert losses(whole.folder) == pytest.approx(losses(plain.folder), rel=0.05)
    assert losses(whole.folder) == losses(cut.folder)
    (cut.folder / "summary.json").unlink()
    shutil.rmtree(cut.folder / "checkpoints" / "step-00000006")
    with pytest.raises(UsageError, match="reduced_decoding"):
        mae.pretrain(out=cut.folder, resume=True, quiet=True, reduced_decoding=False)
    again = mae.pretrain(out=cut.folder, resume=True)
    assert "of JPEGs decoded at a reduced scale" in " ".join(capsys.readouterr().out.split())
    assert losses(again.folder)[-1] == losses(whole.folder)[-1]


def test_images_on_the_device_are_refused_with_it(pretrain: Run, large: str, tmp_path: Path):
    with pytest.raises(UsageError, match="--reduced-decoding decodes images anew for each crop, and --cache-on-device"):
        pretrain(source=large, batch_size=16, reduced_decoding=True, cache_on_device=True)
    assert not (tmp_path / "run").exists()
