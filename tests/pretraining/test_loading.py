"""How large crops are, several of an image, and images that lie on the device, in whole runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import mae
from mae.cli import main
from mae.data.dataset.images import load_images
from mae.data.loading.loader import normalise
from mae.data.sources.open import open_source
from mae.pretraining import build as parts
from mae.pretraining.resolve import prepare_run
from mae.pretraining.watch.alerts import what_limits_loading
from mae.recipes import recipe_config
from mae.training.distributed import World

Run = Callable[..., mae.PretrainResult]


def losses(folder: Path) -> dict[int, float]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_an_epoch_has_as_many_times_the_steps_as_there_are_views(pretrain: Run, capsys: pytest.CaptureFixture[str]):
    options = {"batch_size": 64, "epochs": 2, "steps": None}
    plain, twice = pretrain("plain", **options), pretrain("twice", **options, repeated_aug=2, quiet=False)
    assert (plain.summary["steps"], twice.summary["steps"]) == (2 * 5, 2 * 10)  # of 320 images
    assert "2 crops of each image" in " ".join(capsys.readouterr().out.split())  # lines break where the terminal ends


@pytest.mark.parametrize(("scale", "whole"), [((1.0, 1.0), True), ((0.2, 1.0), False)])
def test_crops_are_as_large_as_they_are_to_be(pretrain: Run, monkeypatch: pytest.MonkeyPatch, scale, whole):
    """A crop as large as its image fits with no other ratio, and is then the image or its mirror image."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(parts, "normalise", lambda crops, *told: seen.append(crops) or normalise(crops, *told))
    pretrain(crop_scale=scale)
    images = load_images(open_source("builtin:digits", data_root=Path("data")), in_chans=None)
    there = {images.get(number).numpy().tobytes() for number in range(len(images))}
    found = [{crop.numpy().tobytes(), crop.flip(-1).contiguous().numpy().tobytes()} & there for crop in torch.cat(seen)]
    assert len(found) >= 6 * 32 and all(found) == whole


@pytest.mark.parametrize(("cached", "said"), [(False, "give more --workers"), (True, "without --cache-on-device")])
def test_what_limits_loading_is_told_with_what_helps(tmp_path: Path, cached: bool, said: str):
    options = {"source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2}
    options |= {"device": "cpu", "cache_on_device": cached, "out": str(tmp_path / "run")}
    config = recipe_config("mae").override(options)
    assert said in what_limits_loading(prepare_run(config, None, torch.device("cpu"), World(), resume=False))


def test_a_run_with_views_goes_on_to_the_same_end(pretrain: Run):
    whole = pretrain("whole", repeated_aug=4, accumulate=2)
    cut = pretrain("cut", repeated_aug=4, accumulate=2, checkpoint_keep_every=2)
    (cut.folder / "summary.json").unlink()
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(cut.folder / "checkpoints" / step)
    again = mae.pretrain(out=cut.folder, resume=True, quiet=True)
    assert again.finished and losses(cut.folder)[6] == losses(whole.folder)[6]
    one, other = whole.load_model().state_dict(), again.load_model().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_images_on_the_device_train_as_others_do(pretrain: Run):
    there, elsewhere = pretrain("there", cache_on_device=True), pretrain("elsewhere")
    assert losses(there.folder) == pytest.approx(losses(elsewhere.folder), rel=1e-2)
    assert losses(there.folder) == losses(pretrain("again", cache_on_device=True).folder)


def test_a_run_may_go_on_with_its_images_elsewhere(finished: Path):
    (finished / "summary.json").unlink()
    shutil.rmtree(finished / "checkpoints" / "step-00000006")
    assert mae.pretrain(out=finished, resume=True, quiet=True, cache_on_device=True).finished


def test_images_of_several_sizes_are_refused_before_a_run_begins(photos: Path, tmp_path: Path, capsys):
    out = tmp_path / "run"
    model = "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --batch-size 4 --steps 200 --device cpu"
    assert main(["pretrain", str(photos), *model.split(), "--cache-on-device", "--no-doctor", "--out", str(out)]) == 2
    assert "--cache-on-device needs images of one size" in capsys.readouterr().err and not out.exists()
