"""Fine-tuning to segmentation: what it learns, what is trained beside it, what is resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_masks import drawn_masks
from PIL import Image
from resuming import stop_in_step
from scipy import stats
from tiny_task import by_function, evaluator, small_model

import mae
from mae.cli import main
from mae.errors import Stopped, UsageError
from mae.evaluation.common import supervised
from mae.evaluation.common.beside import used_images
from mae.evaluation.common.over_seeds import over_seeds, paired_difference
from mae.evaluation.run import evaluate
from mae.models.segmenter import Segmenter
from mae.training.schedule import WarmupLinear

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True, "pictures": 0}
SHORT: dict[str, Any] = {**QUICK, "iterations": 3, "batch_size": 4, "channels": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_masks(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    mae.save(small_model(depth=2), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("noise", [False, True])
def test_it_learns_what_is_there_and_nothing_of_noise(tmp_path: Path, saved: Path, noise: bool):
    folder = drawn_masks(tmp_path / "data")
    if noise:  # and nothing in the place: half of the blocks are of one class, wherever they lie
        rng = np.random.default_rng(1)
        for path in folder.glob("*/images/*.png"):
            Image.fromarray(rng.integers(0, 256, (24, 40), dtype=np.uint8)).save(path)
            blocks = rng.choice(3, size=(3, 5), p=(0.5, 0.25, 0.25)).repeat(8, axis=0).repeat(8, axis=1)
            Image.fromarray(blocks.astype(np.uint8)).save(folder / path.parts[-3] / "masks" / path.name)
    options: dict[str, Any] = {"iterations": 120, "batch_size": 6, "lr": 3e-3, "channels": 16}
    record = evaluate("finetune_segmentation", saved, data=folder, out=tmp_path, **QUICK, **options)
    ours, commonest = record.result["this model"], record.result["commonest class"]
    if noise:
        assert ours["accuracy"] < commonest["accuracy"] + 0.02
        assert record.verdict is not None and record.verdict["answer"] != "better"
    else:
        assert ours["accuracy"] > commonest["accuracy"] + 0.2
        assert ours["mean_iou"] > commonest["mean_iou"] + 0.2


def test_other_weights_and_seeds_stand_beside_it(data: Path, saved: Path, tmp_path: Path):
    other = tmp_path / "other.safetensors"
    mae.save(small_model(depth=2, seed=3, img_size=24), other)
    beside = ["scratch", str(other)]
    record = evaluate(
        "finetune_segmentation", saved, data=data, out=tmp_path, **SHORT, beside=beside, seeds=2, head="linear"
    )
    seeds = record.result["seeds"]
    assert list(seeds) == ["this model", *beside]
    assert all(len(of["values"]) == 2 and of["low"] < of["mean"] < of["high"] for of in seeds.values())
    ours, theirs = (np.array(seeds[who]["values"]) for who in ("this model", "scratch"))
    assert seeds["scratch"]["this_model_over_it"]["values"] == pytest.approx(list(ours - theirs))
    assert len(list((tmp_path / "evaluation" / "finetune_segmentation").iterdir())) == 6
    assert record.result["this model"]["mean_iou"] == pytest.approx(ours[0])
    assert record.verdict is not None  # over the seeds as the table: one that goes by the first alone may differ
    (gap,) = record.verdict["differences"]
    over_it = seeds["scratch"]["this_model_over_it"]
    assert (gap["baseline"], gap["share"]) == ("scratch", pytest.approx((ours - theirs).mean()))
    assert (gap["low"], gap["high"]) == pytest.approx((over_it["low"], over_it["high"]))
    assert (tmp_path / "evaluation" / "finetune_segmentation-linear.json").is_file()


def test_the_file_predicts_what_was_evaluated(data: Path, saved: Path, tmp_path: Path):
    record = evaluate("finetune_segmentation", saved, data=data, out=tmp_path, **SHORT, beside=[])
    model = mae.load(Path(record.result["training"]["folder"]) / "segmenter.safetensors")
    assert isinstance(model, Segmenter) and model.described.kind == "upernet" and model.described.channels == 8
    right = total = 0
    images = sorted((data / "val/images").glob("*.png"))
    for image, found in zip(images, model.predict(images), strict=True):
        truth = np.array(Image.open(data / "val/masks" / image.name))
        right += int((found.numpy() == truth)[truth != 255].sum())
        total += int((truth != 255).sum())
    assert right / total == pytest.approx(record.result["this model"]["accuracy"])
    assert record.result["training"]["curve"][-1]["mean_iou"] == record.result["this model"]["mean_iou"]


def test_a_share_of_the_labels_lies_within_a_larger_one(data: Path, tmp_path: Path):
    task = evaluator(small_model(), data, tmp_path).segmentation_task(())
    found = [used_images(task, share).tolist() for share in (0.25, 0.5, 1.0)]
    assert [len(numbers) for numbers in found] == [3, 6, 12]
    assert set(found[0]) < set(found[1]) < set(found[2])


def test_a_stopped_training_resumes_to_the_same_weights(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {**SHORT, "iterations": 6, "beside": []}

    def weights(out: Path) -> bytes:
        record = evaluate("finetune_segmentation", saved, data=data, out=out, **options)
        return (Path(record.result["training"]["folder"]) / "segmenter.safetensors").read_bytes()

    whole = weights(tmp_path / "whole")
    stop_in_step(monkeypatch, 3)
    with pytest.raises(Stopped):
        weights(tmp_path / "stopped")
    assert weights(tmp_path / "stopped") == whole


class Captured(Exception):
    """Carries what a training would have been given."""


def test_rates_and_schedule_are_those_of_the_recipe(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(task: Any, plan: Any, module: Any, optimizer: Any, *, batches: Any, evaluate: Any) -> None:
        raise Captured(plan, module, optimizer, batches)

    monkeypatch.setattr(supervised, "train_with_labels", stop)
    found = []
    for beside in ([], ["scratch"]):
        with pytest.raises(Captured) as caught:
            evaluate("finetune_segmentation", saved, data=data, out=tmp_path, **SHORT, beside=beside)
        found.append(caught.value.args)
    plan, module, optimizer, batches = found[0]
    assert plan.schedule == "linear" and plan.rate == 1e-4 and plan.min_rate == 0 and plan.batch_size == 4
    scales = {}
    for group in optimizer.param_groups:
        for name in group["param_names"]:
            scales[name] = (group["lr_scale"], group["weight_decay"])
    assert scales["encoder.pos_embed.table"] == (0.65**3, 0.0) and scales["encoder.patch_embed.proj.weight"][1] == 0.05
    assert scales["encoder.blocks.0.mlp.fc1.weight"] == (0.65**2, 0.05)
    assert scales["head.classes.weight"] == (1.0, 0.05) and scales["head.fuse.norm.weight"] == (1.0, 0.0)
    assert round(plan.epochs * batches.steps_per_epoch) == 3


def test_the_rate_falls_straight_to_its_floor():
    schedule = WarmupLinear(peak=2.0, floor=0.5, warmup_samples=100, total_samples=1100)
    assert [schedule(samples) for samples in (0, 50, 100, 600, 1100, 2000)] == [0.0, 1.0, 2.0, 1.25, 0.5, 0.5]


def test_intervals_are_students():
    values, others = [0.31, 0.35, 0.36], [0.30, 0.31, 0.35]
    found = over_seeds(values)
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))
    gap, expected = paired_difference(values, others), stats.ttest_rel(values, others).confidence_interval()
    assert (gap.low, gap.high) == pytest.approx((expected.low, expected.high))
    assert over_seeds([0.5]).low is None and str(over_seeds([0.5])) == "50.0"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"iterations": 9, "warmup": 9}, "warmup is 9 steps of 9"),
        ({"labels_used": "0%"}, "is not a share of the labels"),
        ({"layer_decay": 1.5}, "expected shares up to 1"),
        ({"beside": ["scratch", "scratch"]}, "expected different weights"),
        ({"seeds": 0}, "seeds is 0"),
        ({"beside": ["nowhere"]}, "nowhere"),
        ({"head": "dense"}, "head"),
    ],
)
def test_wrong_options_are_refused(data: Path, saved: Path, tmp_path: Path, options: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        evaluate("finetune_segmentation", saved, data=data, out=tmp_path, **{**SHORT, **options})


def test_what_is_no_model_of_ours_is_refused(data: Path, tmp_path: Path):
    flat = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    with pytest.raises(UsageError, match="bring it in with 'mae import"):
        evaluate("finetune_segmentation", flat, data=data, out=tmp_path, **SHORT)


def test_the_command(data: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = f"finetune segmentation {saved} --data {data} --out {tmp_path} --iterations 2 --batch-size 3 --channels 4"
    assert main([*words.split(), "--labels", "50%", "--pictures", "1", "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 steps on 6 images (50 % of the labels)" in shown and "paired" in shown
    record = json.loads((tmp_path / "evaluation" / "finetune_segmentation-50percent.json").read_text())
    assert record["result"]["scratch"]["mean_iou"] >= 0
    assert (tmp_path / "evaluation" / "finetune_segmentation.html").is_file()
