"""A run goes on with the images that it was begun with, or says that they are others."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mae
from mae.cli import main
from mae.data.dataset import sampled
from mae.errors import UsageError
from mae.pretraining.watch.replay_step import replay
from mae.training.log import read_rows
from mae.training.run_folder import RunFolder

Run = Callable[..., mae.PretrainResult]


def arrays_in(folder: Path, count: int) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        np.save(folder / f"{number:03d}.npy", rng.integers(0, 255, (8, 8, 3), np.uint8))
    return folder


def blacken(path: Path) -> None:
    status = path.stat()
    np.save(path, np.zeros((8, 8, 3), np.uint8))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # even where they are put back
    assert path.stat().st_size == status.st_size


def cut(folder: Path) -> Path:
    """As a kill after the first checkpoint leaves it."""
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    shutil.rmtree(newest)
    (folder / "summary.json").unlink()
    return folder


def test_images_changed_in_place_are_refused_and_named(pretrain: Run, tmp_path: Path, capsys: Any):
    source = arrays_in(tmp_path / "images", 120)
    folder = cut(pretrain(source=source).folder)
    for path in source.iterdir():
        blacken(path)
    words = r"holds other images than when .* was begun: of 120 whose content is compared 120 were changed in place, "
    with pytest.raises(UsageError, match=words + ".*000.npy, .*001.npy, .*002.npy and others; put them back"):
        mae.pretrain(out=folder, resume=True, quiet=True)
    assert main(["pretrain", "--resume", "--out", str(folder)]) == 2
    assert "were changed in place" in capsys.readouterr().err


def test_one_changed_image_is_named(pretrain: Run, tmp_path: Path):
    source = arrays_in(tmp_path / "images", 40)
    folder = cut(pretrain(source=source).folder)
    blacken(source / "017.npy")
    with pytest.raises(UsageError, match=r"compared 1 were changed in place, \S*/017.npy; put them back"):
        mae.pretrain(out=folder, resume=True, quiet=True)


def test_a_copied_folder_goes_on(pretrain: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(sampled, "SAMPLED", 10)
    source = arrays_in(tmp_path / "images", 40)
    folder = cut(pretrain(source=source).folder)
    before = read_rows(folder / "metrics.jsonl")
    shutil.copytree(source, tmp_path / "copy")
    shutil.rmtree(source)
    (tmp_path / "copy").rename(source)
    for path in source.iterdir():
        os.utime(path, ns=(1, 1))
    assert mae.pretrain(out=folder, resume=True).finished
    told = " ".join(capsys.readouterr().out.split())
    assert "place or times of the files differ from when the run was begun; 10 of 40" in told
    assert len(read_rows(folder / "metrics.jsonl")) >= len(before)


def test_where_images_moved_is_remembered_once_they_are_known_again(pretrain: Run, tmp_path: Path):
    folder = cut(pretrain(source=arrays_in(tmp_path / "first", 40), monitor_every=1 / 20).folder)
    config = json.loads((folder / "config.json").read_text())
    others = arrays_in(tmp_path / "others", 41)
    with pytest.raises(UsageError, match="others holds other images"):
        mae.pretrain(others, out=folder, resume=True, quiet=True)
    assert json.loads((folder / "config.json").read_text()) == config
    (tmp_path / "first").rename(tmp_path / "second")
    mae.pretrain(tmp_path / "second", out=folder, resume=True, quiet=True)
    moved = {**config, "source": str(tmp_path / "second")}
    assert json.loads((folder / "config.json").read_text()) == moved
    mae.pretrain(out=cut(folder), resume=True, quiet=True)  # of a checkpoint from before it moved


def test_channels_in_another_order_are_other_images(pretrain: Run, tmp_path: Path):
    source = arrays_in(tmp_path / "images", 40)
    (source / "channels.txt").write_text("red\ngreen\nblue\n")
    folder = cut(pretrain(source=source).folder)
    (source / "channels.txt").write_text("blue\ngreen\nred\n")
    with pytest.raises(UsageError, match="holds other images"):
        mae.pretrain(out=folder, resume=True, quiet=True)


def test_a_list_in_another_order_is_other_images(pretrain: Run, tmp_path: Path):
    source = arrays_in(tmp_path / "images", 40)
    names = sorted(path.name for path in source.iterdir())
    (source / "list.txt").write_text("\n".join(names))
    folder = cut(pretrain(source=source / "list.txt").folder)
    (source / "list.txt").write_text("\n".join(reversed(names)))
    with pytest.raises(UsageError, match="holds other images"):
        mae.pretrain(out=folder, resume=True, quiet=True)
    (source / "list.txt").write_text("# the same\n" + "\n".join(names))
    assert mae.pretrain(out=folder, resume=True, quiet=True).finished


@pytest.mark.parametrize("broken", [{"content": 3}, {"listing": None}, {"images": "many"}, {"version": ...}])
def test_a_data_file_that_does_not_tell_is_refused(finished: Path, broken: dict[str, Any]):
    data = json.loads((finished / "data.json").read_text())
    name, value = next(iter(broken.items()))
    data = {key: other for key, other in data.items() if key != name} | ({} if value is ... else {name: value})
    (finished / "data.json").write_text(json.dumps(data))
    with pytest.raises(UsageError, match=r"data.json|holds other images"):
        mae.pretrain(out=finished, resume=True, quiet=True)


def test_a_replay_refuses_changed_images(pretrain: Run, tmp_path: Path):
    source = arrays_in(tmp_path / "images", 40)
    folder = pretrain(source=source).folder
    capture = RunFolder(folder).failure(1)
    capture.mkdir(parents=True)
    step = {"step": 1, "epoch": 0, "seed": 0, "ids": [3], "mask_ratio": 0.75, "progress": 0.1, "precision": "fp32"}
    (capture / "capture.json").write_text(json.dumps(step))
    blacken(source / "003.npy")
    with pytest.raises(UsageError, match=r"were changed in place, \S*/003.npy"):
        replay(folder, device="cpu")
