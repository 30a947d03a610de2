"""`mae plan finetune`: what is measured, what is made of it, and that nothing is written."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_masks import drawn_masks
from drawn_objects import drawn_objects
from PIL import Image
from tiny_task import evaluator, small_model, striped

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.evaluation.protocols.finetune_detection import FinetuneDetection
from mae.evaluation.run import evaluate
from mae.pretraining.estimate import finetuning
from mae.pretraining.estimate.finetuning import plan_finetuning
from mae.pretraining.estimate.profile import StepCost

COLOUR: dict[str, Any] = {"in_chans": 3, "mean": (0.3,) * 3, "std": (0.2,) * 3}
SHORT: dict[str, Any] = {"iterations": 20, "size": 32, "channels": 8}
WORDS = "--iterations 20 --size 32 --channels 8 --device cpu".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and labels of every kind."""
    folder = tmp_path_factory.mktemp("planned")
    mae.save(small_model(depth=2, **COLOUR), folder / "model.safetensors")
    drawn_objects(folder / "objects", train=6, test=3)
    drawn_masks(folder / "masks")
    for part, count in (("train", 24), ("test", 12)):
        pixels, labels = striped(count, seed=count)
        for number, (image, label) in enumerate(zip(pixels[..., 0], labels.tolist(), strict=True)):
            path = folder / "classes" / part / str(label) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).convert("RGB").save(path)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(finetuning, "_STEP_SECONDS", 0.01)
    monkeypatch.chdir(place)


def plan_of(place: Path, **options: Any) -> finetuning.FinetuningPlan:
    judging = evaluator(place / "model.safetensors", place / "objects", place / "aside")
    return plan_finetuning(judging, FinetuneDetection(**{**SHORT, **options}))


@pytest.mark.parametrize(
    ("kind", "data", "words", "weights"),
    [
        ("detection", "objects", WORDS, 2),
        ("segmentation", "masks", [*WORDS[:2], *WORDS[4:], "--beside", "scratch", "model.safetensors"], 3),
        ("classes", "classes", ["--epochs", "2", "--batch-size", "8", "--device", "cpu"], 1),
    ],
)
def test_every_kind_is_planned_and_nothing_written(
    place: Path, kind: str, data: str, words: list[str], weights: int, capsys: pytest.CaptureFixture[str]
):
    before = sorted(place.rglob("*"))
    assert main(["plan", "finetune", kind, "model.safetensors", "--data", data, *words, "--json"]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert len(plan["weights"]) == weights and plan["weights"][0] == "this model"
    assert plan["steps"] == (6 if kind == "classes" else 20) and plan["accumulate"] == 1
    assert plan["step_seconds"] > 0 and plan["evaluation_seconds"] > 0 and plan["available_bytes"] > 0
    training = plan["steps"] * plan["step_seconds"] + plan["evaluations"] * plan["evaluation_seconds"]
    assert plan["training_seconds"] == pytest.approx(training) and plan["seconds"] > training
    assert sorted(place.rglob("*")) == before


def test_the_table_ends_with_the_command(capsys: pytest.CaptureFixture[str]):
    words = ["detection", "model.safetensors", "--data", "objects", *WORDS, "--seeds", "2"]
    assert main(["plan", "finetune", *words]) == 0
    shown = capsys.readouterr().out
    for part in ("6 training images and 3 test images", "20 steps of 4", "micro-batch(es)", "4 training(s)", "GB"):
        assert part in " ".join(shown.split()), part
    assert shown.splitlines()[-1] == f"mae finetune {' '.join(words)}"


def test_times_are_those_of_all_weights_seeds_and_evaluations(place: Path, monkeypatch: pytest.MonkeyPatch):
    def cost(protocol: Any, task: Any, size: int) -> tuple[StepCost, float]:
        return StepCost(part_size=size, seconds=0.5 + size, peak_bytes=100 + 10 * size), 2.0

    monkeypatch.setattr(finetuning, "_cost", cost)
    monkeypatch.setattr(finetuning, "available_memory", lambda device: 1000)
    plan = plan_of(place, seeds=2, beside=("scratch", "model.safetensors"))
    # 20 steps of 4.5 s; before them, after each quarter: 5 evaluations of 3 images.
    assert (plan.steps, plan.evaluations, plan.step_seconds, plan.evaluation_seconds) == (20, 5, 4.5, 6)
    assert plan.training_seconds == 20 * 4.5 + 5 * 6
    assert plan.seconds == 3 * (2 * plan.training_seconds + 6)
    assert (plan.largest_part, plan.accumulate, plan.peak_bytes) == (80, 1, 140) and not plan.advice


@pytest.mark.parametrize(("available", "accumulate"), [(156, 1), (134, 2), (124, 4)])
def test_a_batch_that_does_not_fit_is_divided(
    place: Path, available: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
):
    def cost(protocol: Any, task: Any, size: int) -> tuple[StepCost, float]:
        return StepCost(part_size=size, seconds=size, peak_bytes=100 + 10 * size), 0.0

    monkeypatch.setattr(finetuning, "_cost", cost)
    monkeypatch.setattr(finetuning, "available_memory", lambda device: available)
    plan = plan_of(place)
    told = any(f"--accumulate {accumulate}" in line for line in plan.advice)
    assert plan.accumulate == accumulate and told is (accumulate > 1)
    assert plan.step_seconds == 4 and plan.peak_bytes == 100 + 40 // accumulate


def test_a_classifier_is_planned_in_micro_batches_of_one_image(capsys: pytest.CaptureFixture[str]):
    """It has no norm over a batch, and trains so."""
    words = ["--data", "classes", "--epochs", "2", "--batch-size", "4", "--accumulate", "4", "--device", "cpu"]
    assert main(["plan", "finetune", "classes", "model.safetensors", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accumulate"] == 4


def test_what_fits_in_no_way_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(finetuning, "available_memory", lambda device: 1000)
    with pytest.raises(UsageError, match="0 image.s. fit at once; take a smaller model or a smaller --size"):
        plan_of(place)


@pytest.mark.parametrize("iterations", [1, 7])
def test_as_many_evaluations_are_counted_as_a_training_makes(place: Path, tmp_path: Path, iterations: int):
    plan = plan_of(place, iterations=iterations)
    record = evaluate(
        "finetune_detection", place / "model.safetensors", data=place / "objects", out=tmp_path, device="cpu",
        quiet=True, **{**SHORT, "iterations": iterations, "beside": (), "pictures": 0, "doctor": False},
    )  # fmt: skip
    assert plan.evaluations == len(record.result["training"]["curve"])


def test_measuring_leaves_weights_and_random_numbers_alone(place: Path):
    before = torch.random.get_rng_state()
    judging = evaluator(place / "model.safetensors", place / "objects", place / "aside")
    assert judging.extractor.model is not None
    weights = {name: value.clone() for name, value in judging.extractor.model.state_dict().items()}
    plan_finetuning(judging, FinetuneDetection(**SHORT))
    after = judging.extractor.model.state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(value, after[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["detectoin", "model.safetensors", "--data", "objects"], "detection"),
        (["detection", "model.safetensors", "--data", "nowhere"], "nowhere"),
        (["detection", "nowhere", "--data", "objects"], "nowhere"),
        (["detection", "model.safetensors", "--data", "objects", "--gpus", "2"], "--gpus"),
        (["detection", "model.safetensors", "--data", "objects", "--batch-size", "9"], "--batch-size is 9"),
        (["detection", "model.safetensors", "--data", "masks"], "masks holds no labels of a known kind"),
    ],
)
def test_mistakes_are_told_in_a_line(words: list[str], told: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "finetune", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("mae: error") and told in error


def test_kinds_are_listed(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "finetune"]) == 0
    shown = capsys.readouterr().out
    assert "mae plan finetune KIND MODEL" in shown and "detection" in shown
