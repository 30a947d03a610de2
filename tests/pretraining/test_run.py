import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mae
from mae.config import RunConfig
from mae.errors import UsageError
from mae.training.log import loss_rows, read_rows

Run = Callable[..., mae.PretrainResult]


def weights(path: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in mae.load(path).state_dict().values()])


@pytest.mark.digits
@pytest.mark.pictures
def test_a_run_leaves_what_the_docs_promise(pretrain: Run, tmp_path: Path):
    result = pretrain()
    assert result.finished and result.folder == tmp_path / "run"
    run = tmp_path / "run"
    assert {path.name for path in run.iterdir()} == {
        "config.json", "data.json", "metrics.jsonl", "summary.json", "loss.png", "checkpoints", "panels", "tensorboard",
        ".lock", "ended.json", "summary.html",
    }  # fmt: skip
    assert [row["step"] for row in loss_rows(read_rows(run / "metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-00000004", "step-00000006"}
    for panel in (run / "panels").iterdir():
        Image.open(panel).verify()
    summary = json.loads((run / "summary.json").read_text())
    assert summary == result.summary
    assert summary["loss_over_mean_predictor"] == summary["loss"] / summary["baselines"]["mean_of_visible"]
    assert (run / summary["panel"]).is_file() and (run / summary["curve"]).is_file()
    assert (run / summary["checkpoint"]).is_dir()
    found = json.loads((run / "data.json").read_text())
    assert found["images"] == 1438 and found["channels"] == 1


def test_everything_chosen_stands_in_the_configuration(finished: Path):
    config = RunConfig.read(finished / "config.json")
    assert (config.source, config.model) == ("builtin:digits", "mae_vit_lesson_patch4")
    assert config.resolved.layout.channels == 1 and config.resolved.encoder.mlp_ratio == 0.5
    assert config.optim.batch_size == 32


def test_a_run_can_be_repeated_from_its_configuration_alone(finished: Path, tmp_path: Path):
    mae.pretrain(recipe=str(finished / "config.json"), out=tmp_path / "again", quiet=True)
    assert torch.equal(weights(tmp_path / "again"), weights(finished))


def test_the_seed_decides(pretrain: Run, tmp_path: Path):
    for seed in (0, 1):
        pretrain(f"seed{seed}", seed=seed, steps=1)
    assert not torch.equal(weights(tmp_path / "seed0"), weights(tmp_path / "seed1"))


def test_workers_and_callers_random_numbers_change_nothing(pretrain: Run, tmp_path: Path):
    pretrain("one")
    torch.manual_seed(123)
    before = torch.get_rng_state()
    pretrain("two", workers=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(tmp_path / "one"), weights(tmp_path / "two"))


def test_accumulation_changes_only_the_rounding(pretrain: Run, tmp_path: Path):
    pretrain("whole")
    pretrain("parts", accumulate=4)
    rows = [loss_rows(read_rows(tmp_path / name / "metrics.jsonl")) for name in ("whole", "parts")]
    for whole, parts in zip(*rows, strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)


def test_the_loaded_model_is_the_trained_one(finished: Path):
    model = mae.PretrainResult(folder=finished, finished=True, summary={}).load_model()
    assert not model.training and model.config is not None
    assert model.config.layout.size == (8, 8) and model.config.layout.channels == 1
    assert model.config.tokenizer.mean == tuple(json.loads((finished / "data.json").read_text())["mean"])
    newest = finished / "checkpoints" / "step-00000006"
    for path in (newest, newest / "model.safetensors", str(finished)):
        assert torch.equal(weights(Path(path)), weights(finished))


def test_any_folder_of_images(pretrain: Run, photos: Path):
    result = pretrain(source=photos, img_size=32, patch_size=4, batch_size=8)
    assert result.summary["unreadable"] == []
    assert result.load_model().config.layout.channels == 3


def test_rectangles_from_the_command_line(photos: Path, tmp_path: Path):
    from mae.cli import main

    args = "--model mae_vit_lesson_patch4 --img-size 16x32 --patch-size 4x8 --steps 2 --batch-size 4 --device cpu"
    assert main(["pretrain", str(photos), *args.split(), "--out", str(tmp_path / "run")]) == 0
    model = mae.load(tmp_path / "run")
    assert model.encoder.grid == (4, 4)
    features = model.encode(torch.randn(2, 3, 16, 32))
    assert features.patches.shape == (2, 16, 256)


def test_what_is_not_said_is_chosen_to_suit(tmp_path: Path):
    result = mae.pretrain("builtin:digits", steps=1, out=tmp_path / "run", quiet=True, device="cpu")
    config = RunConfig.read(tmp_path / "run" / "config.json")
    assert (config.model, config.optim.batch_size) == ("mae_vit_lesson_patch4", 64)
    assert (config.resolved.layout.size, config.resolved.layout.patch) == ((8, 8), (2, 2))
    assert result.finished


def test_the_header_tells_what_will_happen(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from mae.cli import main

    args = "--model mae_vit_lesson_patch4 --img-size 32 --steps 2 --batch-size 4 --device cpu --lr 1e-3 --accumulate 2"
    assert main(["pretrain", str(photos), *args.split(), "--out", str(tmp_path / "run")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "mae_vit_lesson_patch4: encoder 3.1", "14 of", "mean 0.", "32x32 pixels in a grid of 8x8 patches, 75% masked",
        "4 = 1 process(es) x 2 micro-batch(es) x 2 images", "peak 0.001", "2 steps, 3 an epoch",
        f"cpu, {torch.get_num_threads()} thread(s)", ", fp32; ",
        "mean_of_visible", "mean predictor", "images/s", "waiting for data", "ETA", "Finished",
    ):  # fmt: skip
        assert part in shown, part


NARROW = {"norm_pix_loss": False, "embed_dim": 96, "depth": 2, "num_heads": 3, "decoder_embed_dim": 48}


def test_learning_beats_the_mean_on_structure(tmp_path: Path, photos: Path):
    """The whole path learns: from files to a loss clearly below what the mean colour reaches."""
    options = {
        "img_size": 32,
        "patch_size": 8,
        "batch_size": 14,
        "steps": 150,
        "lr": 2e-3,
        "norm_pix_loss": False,
        **NARROW,
    }
    result = mae.pretrain(
        photos, model="mae_vit_lesson_patch4", out=tmp_path / "run", quiet=True, device="cpu", **options
    )
    assert result.summary["loss_over_mean_predictor"] < 0.7


def test_noise_teaches_nothing(tmp_path: Path):
    """The same on noise must not beat the mean: a check that learning is not an artefact of the baseline."""
    folder = tmp_path / "noise"
    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(14):
        pixels = torch.randint(0, 256, (48, 48, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(folder / f"{number}.png")
    options = {
        "img_size": 32,
        "patch_size": 8,
        "batch_size": 14,
        "steps": 60,
        "lr": 2e-3,
        "norm_pix_loss": False,
        **NARROW,
    }
    result = mae.pretrain(
        folder, model="mae_vit_lesson_patch4", out=tmp_path / "run", quiet=True, device="cpu", **options
    )
    assert result.summary["loss_over_mean_predictor"] > 0.95


@pytest.mark.pictures
def test_panels_show_the_same_images_under_the_same_masks(pretrain: Run, tmp_path: Path):
    """The first two columns of every picture, input and masked, are the same to the pixel."""
    pretrain()
    pictures = [Image.open(path).convert("RGB") for path in sorted((tmp_path / "run" / "panels").iterdir())]
    assert len(pictures) > 3
    rows = range(int(0.1 * pictures[0].height), int(0.9 * pictures[0].height))
    parts = [np.asarray(picture)[rows, : int(0.3 * picture.width)] for picture in pictures]
    whole = [np.asarray(picture)[rows] for picture in pictures]
    assert all(np.array_equal(part, parts[0]) for part in parts)
    assert not np.array_equal(whole[0], whole[-1])


def test_images_of_one_colour_have_no_baseline(tmp_path: Path):
    folder = tmp_path / "plain"
    folder.mkdir()
    for number in range(8):
        Image.new("RGB", (32, 32), (number * 30, 100, 50)).save(folder / f"{number}.png")
    options = {"img_size": 32, "patch_size": 8, "batch_size": 8, "steps": 1, "norm_pix_loss": False, "device": "cpu"}
    result = mae.pretrain(folder, model="mae_vit_lesson_patch4", out=tmp_path / "run", quiet=True, **options)
    assert result.summary["loss_over_mean_predictor"] is None


@pytest.mark.parametrize("options", [{}, {"optimizer": "muon"}, {"cache_on_device": True}, {"workers": 1}])
def test_a_batch_may_hold_one_image(pretrain: Run, options: dict[str, Any]):
    result = pretrain(batch_size=1, steps=3, **options)
    assert result.finished and result.summary["samples"] == 3 and isfinite(result.summary["loss"])
    assert mae.pretrain(out=result.folder, resume=True, quiet=True).finished


def test_a_batch_of_one_image_cannot_be_shared(pretrain: Run):
    for options, told in (({"accumulate": 2}, "multiple of 2"), ({"repeated_aug": 2}, "multiple of 2"),
                          ({"uniformity": 0.1}, "leaves 1; expected 2 at least")):  # fmt: skip
        with pytest.raises(UsageError, match=told):
            pretrain(batch_size=1, steps=3, **options)
