"""Runs with more in their objective than the plain one: what is hidden, what is added, what is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mae
from mae.cli import main
from mae.masks.random import RandomMasking
from mae.training.log import loss_rows, read_rows

Run = Callable[..., mae.PretrainResult]
IMPROVED = {"recipe": "improved", "mask_warmup": 0.5, "batch_size": 128, "steps": 11}


def weights(result: mae.PretrainResult) -> dict[str, torch.Tensor]:
    return result.load_model().state_dict()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Images and visible patches of each mask that was drawn."""
    drawn: list[tuple[int, int]] = []
    plain = RandomMasking.plan

    def plan(self: RandomMasking, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        drawn.append(tuple(found.visible.shape))
        return found

    monkeypatch.setattr(RandomMasking, "plan", plan)
    return drawn


def trained_lengths(seen: list[tuple[int, int]], images: int) -> list[int]:
    return [visible for batch, visible in seen if batch == images]


@pytest.mark.digits
def test_the_curriculum_hides_more_and_more(pretrain: Run, seen: list[tuple[int, int]]):
    """11 steps an epoch: half of it is the way from 8 visible patches of 16 to 4."""
    pretrain(**IMPROVED, compile="off")
    found = trained_lengths(seen, 128)
    assert len(found) == 11 and found[0] == 8 and found[6:] == [4] * 5
    assert found == sorted(found, reverse=True) and len(set(found)) > 3


def test_every_part_of_a_batch_hides_alike(pretrain: Run, seen: list[tuple[int, int]]):
    pretrain(**IMPROVED, accumulate=2)
    found = trained_lengths(seen, 64)[-22:]  # baselines come in batches of 64 too, before
    assert found[::2] == found[1::2] and found[0] == 8 and found[-1] == 4


def test_baselines_and_pictures_hide_what_the_run_hides_at_its_end(pretrain: Run, seen: list[tuple[int, int]]):
    pretrain(**IMPROVED)
    assert {visible for batch, visible in seen if batch not in (1, 128)} == {4}  # 1: a checkpoint's probe


def test_terms_are_logged_by_name_and_the_baseline_stands_beside_the_reconstruction(pretrain: Run):
    result = pretrain(**IMPROVED)
    for row in loss_rows(read_rows(result.folder / "metrics.jsonl")):
        terms = row["terms"]
        assert list(terms) == ["reconstruction", "laplacian", "uniformity"]
        expected = terms["reconstruction"] + 0.05 * terms["laplacian"] + 0.01 * terms["uniformity"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
    summary = json.loads((result.folder / "summary.json").read_text())
    share = summary["terms"]["reconstruction"] / summary["baselines"]["mean_of_visible"]
    assert summary["loss_over_mean_predictor"] == pytest.approx(share)


def test_weights_of_zero_are_the_plain_run_bit_for_bit(pretrain: Run):
    plain = pretrain("plain")
    off = pretrain("off", laplacian=0.0, uniformity=0.0, focal_frequency=0.0, mask_schedule="const", mask_start=0.3)
    assert_same(weights(plain), weights(off))


def test_each_addition_changes_what_is_learned(pretrain: Run):
    plain = weights(pretrain("plain", steps=2))
    for number, options in enumerate(
        ({"laplacian": 0.05}, {"uniformity": 0.01}, {"focal_frequency": 1.0}, {"loss": "l1"},
     {"target": "low_pass", "target_cutoff": 0.5},
         {"mask_schedule": "random"})
    ):  # fmt: skip
        other = weights(pretrain(f"run{number}", steps=2, **options))
        assert any(not torch.equal(plain[name], other[name]) for name in plain), options


@pytest.mark.parametrize(
    "options",
    [IMPROVED, {"cls_tokens": 4, "mask": "grid", "decoder": "cross", "steps": 11}],
    ids=["curriculum", "tokens"],
)
def test_a_resumed_run_goes_on_where_it_was(options: dict[str, Any], pretrain: Run):
    whole = pretrain("whole", **options, checkpoint_keep_every=3)
    cut = whole.folder.with_name("cut")
    shutil.copytree(whole.folder, cut)
    (cut / "summary.json").unlink()
    kept = sorted(path.name for path in (cut / "checkpoints").glob("step-*"))
    assert kept[:3] == ["step-00000003", "step-00000006", "step-00000009"]
    for name in kept[1:]:
        shutil.rmtree(cut / "checkpoints" / name)
    mae.pretrain(resume=True, out=cut, quiet=True)
    assert_same(weights(whole), mae.load(cut).state_dict())


def test_baselines_at_the_end_are_of_masks_by_the_teacher_at_the_end(pretrain: Run):
    moving = {"teacher": "ema", "teacher_momentum": 0.01, "teacher_final_momentum": 0.01}
    run = pretrain(mask="attention", **moving, lr=0.1, warmup_epochs=0)
    first = next(row["baselines"] for row in read_rows(run.folder / "metrics.jsonl") if "baselines" in row)
    assert run.summary["baselines"] != first


def test_the_baseline_is_in_the_units_of_the_loss(pretrain: Run):
    squared = pretrain("mse", norm_pix_loss=False).summary["baselines"]
    absolute = pretrain("l1", norm_pix_loss=False, loss="l1").summary["baselines"]
    assert squared["zero"] == pytest.approx(1.0, abs=0.1)  # the mean square of standardised pixels
    assert absolute["zero"] < squared["zero"] and absolute["zero"] ** 2 < squared["zero"]


def test_the_objective_is_part_of_the_model_and_of_the_header(
    tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    mae.pretrain("builtin:digits", **{**tiny, **IMPROVED, "quiet": False}, out=tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "50% to 75% masked, linear over 0.5 epochs" in said
    assert "mse reconstruction + 0.05 x laplacian + 0.01 x uniformity over 128 images" in said
    config = mae.load(tmp_path / "run").config
    assert config is not None and config.mask.ratio == 0.75
    assert [(term.kind, term.weight) for term in config.terms] == [("laplacian", 0.05), ("uniformity", 0.01)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("--recipe improved --epochs 3", "(--mask-warmup) is 5 epochs, but the whole run has 3 epochs"),
        ("--mask-schedule cosine --mask-start 0.99 --mask-warmup 1", "mask_ratio 0.99 on a grid of 4x4"),
        (
            "--decoder cross --no-cls-token --mask-schedule random --mask-start 0.9",
            "--mask-start, which the run begins with: decoder cross chooses among visible tokens, and mask_ratio 0.9 ",
        ),
        ("--uniformity 0.01 --batch-size 4 --accumulate 4", "--uniformity compares the images of a batch"),
        ("--uniformity 0.01 --repeated-aug 2", "some are views of the same image"),
        ("--batch-size 32 --repeated-aug 64", "--batch-size is 32, --repeated-aug 64; expected"),
        ("--batch-size 64 --repeated-aug 3", "--batch-size is 64, --repeated-aug 3; expected"),
        ("--crop-scale 0.5 0.2", "--crop-scale is (0.5, 0.2); expected the smaller one first"),
        ("--crop-scale 0 1", "--crop-scale is (0.0, 1.0)"),
        ("--repeated-aug 0", "--repeated-aug is 0; expected greater than 0"),
        ("--laplacian -1", "laplacian is -1.0; expected greater than or equal to 0"),
        ("--target low_pass --target-cutoff 2", "target_cutoff is 2.0; expected less than or equal to 1"),
        ("--mask-start 0", "--mask-start is 0.0"),
        ("--mask-warmup -1", "--mask-warmup is -1.0; expected greater than or equal to 0"),
        ("--checkpoint-keep-every 0", "--checkpoint-keep-every is 0"),
        ("--decoder-depth 0", "decoder_depth is 0"),
    ],
)
def test_wrong_requests(args: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    model = "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --device cpu --workers 0"
    code = main(["pretrain", "builtin:digits", *model.split(), *args.split(), "--out", str(out)])
    assert code == 2 and says in capsys.readouterr().err and not out.exists()


def test_the_header_tells_another_decoder(tmp_path: Path, tiny: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    options = {**tiny, "quiet": False, "steps": 2}
    for given, told in (
        ({}, []),
        ({"decoder": "cross", "mask_predicted": 0.25}, [", decoder cross", "some of the masked patches predicted"]),
    ):
        mae.pretrain("builtin:digits", out=tmp_path / str(len(told)), **{**options, **given})
        header = " ".join(capsys.readouterr().out.split())
        assert all(words in header for words in told) and ("decoder cross" in header) is bool(told)


@pytest.mark.parametrize(
    ("options", "says", "colour"),
    [
        ({}, "predicting the mean colour alone gives", True),
        ({"target": "hog", "target_cell": 2}, "predicting the mean target of the visible patches alone gives", False),
        ({"target": "random_projection"}, "predicting the mean target of the visible patches alone gives", False),
    ],
    ids=["pixels", "hog", "projection"],
)
def test_a_run_that_learns_nothing_is_told_in_words_of_its_target(
    options: dict[str, Any], says: str, colour: bool, pretrain: Run
):
    result = pretrain("a run", lr=1e-12, steps=10, checkpoint_every=1, **options)
    rows = read_rows(result.folder / "metrics.jsonl")
    told = [row["warning"] for row in rows if "warning" in row]
    (text,) = (warning["text"] for warning in told[:1] if warning["name"] == "no better than the mean")
    assert says in text and text.endswith(f"check the run with: mae doctor '{result.folder}'")
    assert ("newest panel" in text) == colour


@pytest.mark.pictures
def test_a_cross_decoder_trains_goes_on_is_judged_and_draws(pretrain: Run, tmp_path: Path):
    options = {"decoder": "cross", "mask_predicted": 0.25, "checkpoint_keep_every": 3}
    whole = pretrain("whole", **options)
    assert whole.finished
    model = whole.load_model()
    assert model.config is not None and (model.config.decoder.kind, model.config.mask.predicted) == ("cross", 0.25)
    shutil.copytree(whole.folder, tmp_path / "stopped")
    for name in ("step-00000006", "step-00000004"):
        shutil.rmtree(tmp_path / "stopped" / "checkpoints" / name)
    again = mae.pretrain(out=tmp_path / "stopped", resume=True, quiet=True)
    assert_same(weights(whole), weights(again))
    found = mae.evaluate("reconstruction", whole.folder, data="builtin:digits", device="cpu", quiet=True, count=20)
    assert found.result["model"]["psnr"] > 0 and (whole.folder / whole.summary["panel"]).is_file()
    with torch.no_grad():  # pictures show every patch, whatever was predicted in training
        output = model(torch.randn(2, 1, 8, 8), generator=torch.Generator().manual_seed(0))
    assert output.prediction.shape[1] == 16
