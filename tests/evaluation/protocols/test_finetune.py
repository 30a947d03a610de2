"""Fine-tuning: that it learns, its constants, what each way of training a part changes, and going on after a stop."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_task import by_function, make_task, small_model, striped
from torch.testing import assert_close

from mae.errors import MAEError, UsageError
from mae.evaluation.common import finetuning, supervised
from mae.evaluation.common.classified_images import ClassifiedImages, LabelledBatch
from mae.evaluation.common.finetuning import CLASSIFIER_FILE, rank
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocols.finetune import Finetune
from mae.models.classifier import ImageClassifier
from mae.models.file import load_with_report
from mae.models.presets import model_config
from mae.training.engine import Trainer
from mae.training.log import read_rows

SHORT: dict[str, Any] = {"epochs": 2.0, "batch_size": 16, "base_lr": 0.05, "warmup_epochs": 0.5}
PLAIN: dict[str, Any] = {"augment": False, "mixing": False}


@pytest.fixture
def task(tmp_path: Path) -> LabelledTask:
    return make_task(tmp_path, small_model(), train=striped(64, seed=1), test=striped(30, seed=2))


def folders(task: LabelledTask) -> list[Path]:
    return sorted((task.folder / "evaluation" / "finetune").iterdir())


def last_weights(task: LabelledTask) -> dict[str, torch.Tensor]:
    (folder,) = folders(task)
    return load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")


def untimed(result: Mapping[str, Any]) -> dict[str, Any]:
    """The result without where the training is and how long it took."""
    return {**result, "training": result["training"]["curve"]}


class Captured(Exception):
    """Carries what a training would have been given."""


def captured(
    monkeypatch: pytest.MonkeyPatch, task: LabelledTask, **options: Any
) -> tuple[Any, Any, Any, ClassifiedImages]:
    """Plan, module, optimizer and batches of a request that is then not trained."""

    def stop(task: Any, plan: Any, module: Any, optimizer: Any, *, batches: Any, evaluate: Any) -> None:
        raise Captured(plan, module, optimizer, batches)

    monkeypatch.setattr(supervised, "train_with_labels", stop)
    with pytest.raises(Captured) as caught:
        Finetune(**options).run(task)
    return caught.value.args  # type: ignore[return-value]


def test_it_learns_what_is_there_and_nothing_from_shuffled_labels(tmp_path: Path):
    train, test = striped(240, seed=1), striped(200, seed=2)
    shuffled = train[0], train[1][torch.randperm(240, generator=torch.Generator().manual_seed(0))]
    options: dict[str, Any] = {**SHORT, **PLAIN, "epochs": 6.0, "batch_size": 32}
    learned, guessed = (
        Finetune(**options).run(make_task(tmp_path / name, small_model(), train=given, test=test))
        for name, given in (("true", train), ("shuffled", shuffled))
    )
    majority = float((test[1] == 0).double().mean())
    assert learned.numbers["top1"] > majority + 0.3
    assert guessed.numbers["top1"] < majority + 4 * (0.25 / 200) ** 0.5  # four standard errors
    assert learned.ranking is not None and learned.ranking.shape == (200, 3) and learned.numbers["top5"] == 1
    assert top_k_accuracy(learned.ranking[:, :1], test[1]) == learned.numbers["top1"] == learned.curve[-1]["test"]
    assert [row["epoch"] for row in learned.curve] == list(range(7))


@pytest.mark.parametrize(
    ("name", "epochs", "base_lr", "layer_decay", "drop_path"),
    [
        ("mae_vit_base_patch16", 100, 5e-4, 0.65, 0.1),
        ("mae_vit_large_patch16", 50, 1e-3, 0.75, 0.2),
        ("mae_vit_huge_patch14", 50, 1e-3, 0.75, 0.3),
    ],
)
def test_the_official_constants(name: str, epochs: int, base_lr: float, layer_decay: float, drop_path: float):
    resolved = Finetune()._resolved(model_config(name), images=1_281_167)
    assert resolved == {
        "epochs": epochs,
        "batch_size": 1024,
        "base_lr": base_lr,
        "warmup_epochs": 5,
        "layer_decay": layer_decay,
        "drop_path": drop_path,
    }
    scratch = Finetune(from_scratch=True)._resolved(model_config(name), images=1_281_167)
    assert scratch == {**resolved, "layer_decay": 1}
    for options in ({"lora": 4}, {"bitfit": True}):  # what is added or is small learns everywhere alike
        assert Finetune(**options)._resolved(model_config(name), images=1_281_167) == scratch  # type: ignore[arg-type]
        asked = Finetune(**options, layer_decay=0.5)._resolved(model_config(name), images=1_281_167)  # type: ignore[arg-type]
        assert asked["layer_decay"] == 0.5
    assert Finetune(blocks=2)._resolved(model_config(name), images=1_281_167) == resolved
    given = {"epochs": 7.0, "batch_size": 8, "base_lr": 0.3, "warmup_epochs": 2.0, "layer_decay": 0.9, "drop_path": 0.0}
    assert Finetune(**given)._resolved(model_config(name), images=9) == given  # type: ignore[arg-type]
    assert Finetune(epochs=20)._resolved(model_config(name), images=9)["warmup_epochs"] == 2
    fixed = Finetune()
    assert (fixed.min_lr, fixed.weight_decay, fixed.label_smoothing) == (1e-6, 0.05, 0.1)


@pytest.mark.parametrize("decay", [0.65, 0.8])
def test_rates_decay_and_regularisation_reach_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, decay: float
):
    task = make_task(tmp_path, small_model(depth=4), train=striped(40, seed=1), test=striped(9, seed=2))
    options = {"layer_decay": decay, "drop_path": 0.3, "label_smoothing": 0.2, "weight_decay": 0.07}
    plan, module, optimizer, _ = captured(monkeypatch, task, batch_size=8, base_lr=0.5, epochs=3, **options)
    found = {
        name: (group["lr_scale"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    expected = {}
    for name, weight in module.named_parameters():
        place = int(name.split(".")[2]) + 1 if ".blocks." in name else 0 if name.startswith("encoder.") else 5
        no_decay = weight.ndim == 1 or "cls_token" in name or "pos_embed" in name
        expected[name] = (decay ** (5 - place), 0.0 if no_decay else 0.07)
    assert found == {name: pytest.approx(value) for name, value in expected.items()}
    assert {"encoder.cls_token", "encoder.pos_embed.table", "fc_norm.weight"} <= set(found)
    assert isinstance(optimizer, torch.optim.AdamW) and optimizer.defaults["betas"] == (0.9, 0.999)
    assert [block.drop_path.rate for block in module.encoder.blocks] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert module.label_smoothing == 0.2 and module.training and plan.precision == "fp32"
    assert (plan.rate, plan.min_rate, plan.epochs) == (0.5 * 8 / 256, 1e-6, 3)
    assert plan.warmup_epochs == pytest.approx(0.3)


def test_the_rate_of_each_layer_is_the_schedules_times_its_share(monkeypatch: pytest.MonkeyPatch, task: LabelledTask):
    seen: list[set[float]] = []
    step = torch.optim.AdamW.step

    def noted(self: Any, *args: Any) -> Any:
        assert all(group["lr"] / group["lr_scale"] == pytest.approx(rates(self)) for group in self.param_groups)
        seen.append({group["lr_scale"] for group in self.param_groups})
        return step(self, *args)

    def rates(optimizer: Any) -> float:
        return max(group["lr"] for group in optimizer.param_groups)  # the head's, whose share is 1

    monkeypatch.setattr(torch.optim.AdamW, "step", noted)
    Finetune(**SHORT).run(task)
    assert len(seen) == 8 and all(shares == {0.65**k for k in range(4)} for shares in seen)


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("mixing", [True, False])
def test_what_is_done_to_images_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, task: LabelledTask, augment: bool, mixing: bool
):
    *_, batches = captured(monkeypatch, task, augment=augment, mixing=mixing)
    assert batches.augmentation.rand_augment is augment and batches.augmentation.scale == (0.08, 1.0)
    images, labels = torch.rand(32, 1, 16, 16), torch.arange(32) % 3
    keys = torch.arange(32)
    given = batches.prepare(LabelledBatch(images=images.clone(), labels=labels, keys=keys, first_key=keys[:1]))
    same = (given["images"] == images).flatten(1).all(1)
    if mixing:
        assert given["target"].shape == (32, 3) and given["images"].shape == images.shape and not same.all()
        assert_close(given["target"].sum(1), torch.ones(32))
        assert ((given["target"] > 0).sum(1) == 2).sum() > 20
    else:
        assert given["target"] is labels
        assert same.all() if not augment else 16 < int(same.sum()) < 32  # a quarter loses a rectangle


Changed = Callable[[str], bool]


@pytest.mark.parametrize(
    ("options", "variant", "trains"),
    [
        ({}, "", lambda name: True),
        ({"blocks": 1}, "blocks1", lambda name: ".blocks.1." in name or not name.startswith("encoder.")),
        ({"blocks": 0}, "blocks0", lambda name: not name.startswith("encoder.")),
        ({"lora": 2}, "lora2", lambda name: name.endswith((".up", ".down")) or not name.startswith("encoder.")),
        ({"bitfit": True}, "bitfit", lambda name: name.endswith(".bias") or name == "head.weight"),
    ],
)
def test_only_what_should_train_has_changed(task: LabelledTask, options: dict[str, Any], variant: str, trains: Changed):
    model = task.extractor.model
    assert model is not None
    before = {f"encoder.{name}": weight.clone() for name, weight in model.encoder.state_dict().items()}
    before["encoder.pos_embed.table"] = model.encoder.pos_embed(model.encoder.grid)
    result = Finetune(**SHORT, **options).run(task)
    after = last_weights(task)
    started = {"fc_norm.weight": torch.ones(24), "fc_norm.bias": torch.zeros(24), "head.bias": torch.zeros(3)}
    for name, weight in after.items():
        start = before.get(name, started.get(name))
        if start is None:  # drawn: the head's weights, and `down`; `up` begins at zero
            assert name == "head.weight" or name.endswith((".down", ".up")), name
            assert weight.abs().max() > (1e-3 if name == "head.weight" else 0), name
            continue
        assert torch.equal(weight, start) != trains(name), name
    assert result.variant == variant
    assert before.keys() - {"encoder.norm.weight", "encoder.norm.bias"} <= after.keys()
    trained = sum(weight.numel() for name, weight in after.items() if trains(name))
    assert result.numbers["trained_parameters"] == trained
    assert result.rows[0][0] == (variant or "all of the encoder") and f"{trained:,} of" in result.rows[0][3]
    unchanged = {f"encoder.{name}": weight for name, weight in model.encoder.state_dict().items()}
    assert all(torch.equal(unchanged[name], before[name]) for name in unchanged)  # the model that is judged stays


def test_from_scratch_knows_nothing_of_the_pretrained_weights(tmp_path: Path):
    data = {"train": striped(40, seed=1), "test": striped(20, seed=2)}
    tasks = [make_task(tmp_path / str(seed), small_model(seed=seed), **data) for seed in (0, 1)]
    options: dict[str, Any] = {**SHORT, **PLAIN}
    first, second = (Finetune(**options, from_scratch=True).run(task) for task in tasks)
    assert first.variant == "from-scratch" and first.numbers["resolved"]["layer_decay"] == 1
    weights = [last_weights(task) for task in tasks]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert untimed(first.numbers) == untimed(second.numbers)
    for seed in (0, 1):
        tasks[seed] = make_task(tmp_path / f"tuned-{seed}", small_model(seed=seed), **data)
        Finetune(**options).run(tasks[seed])
    tuned = [last_weights(task) for task in tasks]
    name = "encoder.blocks.0.attn.qkv.weight"
    assert not torch.equal(tuned[0][name], tuned[1][name])


def interrupt_at(monkeypatch: pytest.MonkeyPatch, look: int) -> None:
    """Ctrl-C at a look at the test part, in the middle of the training."""
    calls: list[None] = []
    rank = finetuning.rank

    def interrupting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == look:
            os.kill(os.getpid(), signal.SIGINT)
        return rank(*args, **options)

    monkeypatch.setattr(finetuning, "rank", interrupting)


def told(task: LabelledTask) -> list[Any]:
    rows = read_rows(folders(task)[0] / "metrics.jsonl")
    return [(row["step"], row.get("loss"), row.get("evaluation")) for row in rows]


@pytest.mark.parametrize("options", [{}, {"lora": 2, "accumulate": 2}])
def test_resumed_training_matches_an_uninterrupted_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]
):
    data = {"train": striped(70, seed=1), "test": striped(20, seed=2)}
    through, cut = (make_task(tmp_path / name, small_model(), **data) for name in ("through", "cut"))
    asked = Finetune(**{**SHORT, "epochs": 4.0, "drop_path": 0.4, **options})
    expected = asked.run(through)
    steps: list[None] = []
    step = Trainer._train_step
    monkeypatch.setattr(Trainer, "_train_step", lambda *args: (steps.append(None), step(*args)))
    for look in (2, 1):  # in the first epoch after the start, and again when it goes on
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt, match="resumes when you rerun"):
            interrupt_at(patch, look)
            asked.run(cut)
    found = asked.run(cut)
    assert len(folders(cut)) == 1 and len(steps) == 16  # none was done twice
    ends = [last_weights(task) for task in (through, cut)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert untimed(found.numbers) == untimed(expected.numbers)
    assert told(cut) == told(through)
    looks = [step for step, _, evaluation in told(cut) if evaluation]
    assert looks == [0, 4, 8, 12, 16]
    assert [step for step, loss, _ in told(cut) if loss is not None] == list(range(1, 17))


def test_a_training_whose_checkpoints_are_damaged_is_not_begun_again(task: LabelledTask):
    asked = Finetune(**SHORT)
    asked.run(task)
    (folder,) = folders(task)
    damaged = list((folder / "checkpoints").glob("step-*/model.safetensors"))
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-8])
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(MAEError, match="every checkpoint in .* is damaged"):
        asked.run(task)
    assert damaged and (folder / "metrics.jsonl").read_bytes() == before


def test_finished_training_is_reused_and_another_gets_its_own_folder(
    monkeypatch: pytest.MonkeyPatch, task: LabelledTask
):
    asked = Finetune(**SHORT)
    first = asked.run(task)
    metrics = folders(task)[0] / "metrics.jsonl"
    before = metrics.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", lambda *_: pytest.fail("a step was done"))
        again = asked.run(task)
    (folder,) = folders(task)
    training = first.numbers["training"]
    assert training["folder"] == str(folder) and training["curve"] == first.curve and training["seconds"] > 0
    assert first.note.endswith(
        f"of training. The last weights are evaluated, not the best; they are in {folder / CLASSIFIER_FILE}."
    )
    assert again.numbers == first.numbers and again.ranking is not None and first.ranking is not None
    assert torch.equal(again.ranking, first.ranking) and metrics.read_bytes() == before
    Finetune(**{**SHORT, "weight_decay": 0.1}).run(task)
    assert len(folders(task)) == 2


@pytest.mark.parametrize("options", [{}, {"lora": 2}, {"from_scratch": True}], ids=["all", "LoRA", "from scratch"])
def test_the_classifier_is_left_as_a_models_file(options: dict[str, Any], task: LabelledTask):
    task = replace(task, extractor=replace(task.extractor, licence="CC-BY-NC-4.0"))
    found = Finetune(**{**SHORT, "base_lr": 0.1, **options}).run(task)
    (folder,) = folders(task)
    model, report = load_with_report(folder / CLASSIFIER_FILE)
    assert isinstance(model, ImageClassifier) and model.class_names == task.class_names
    assert not any("up" in name or "down" in name for name in model.state_dict())
    assert found.ranking is not None and torch.equal(rank(task, model, top=3), found.ranking)
    # What weights come under holds for what is made of them; a start from scratch owes them nothing.
    assert report.origin["licence"] == (None if options.get("from_scratch") else "CC-BY-NC-4.0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": 1, "lora": 2}, "blocks and lora are given"),
        ({"bitfit": True, "blocks": 0}, "blocks and bitfit are given"),
        ({"from_scratch": True, "bitfit": True}, "bitfit and from_scratch are given"),
        ({"epochs": 0.0}, "epochs is 0.0; expected a finite number above 0"),
        ({"base_lr": float("nan")}, "base_lr is nan"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"lora": 0}, "lora is 0"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5; expected a share up to 1"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; expected a share below 1"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; expected 0 or more"),
        ({"warmup_epochs": float("inf")}, "warmup_epochs is inf"),
        ({"drop_path": 1.0}, "drop_path is 1.0"),
        ({"blocks": -1}, "blocks is -1"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        Finetune(**options)


def test_what_cannot_be_tuned_is_refused(task: LabelledTask):
    function = by_function(lambda images: images.flatten(1), img_size=(16, 16))
    assert "function cannot be fine-tuned" in str(Finetune().why_not(function)) and not Finetune().why_not(
        task.extractor
    )
    with pytest.raises(UsageError, match="last 3 blocks; the encoder has 2"):
        Finetune(blocks=3).run(task)
    with pytest.raises(UsageError, match="--batch-size is 65; expected 1 to 64"):
        Finetune(batch_size=65).run(task)


@pytest.mark.parametrize(("channels", "dtype"), [(13, "uint8"), (3, "float32"), (1, "uint16")])
def test_images_that_rand_augment_cannot_change(tmp_path: Path, channels: int, dtype: str):
    rng = np.random.default_rng(0)
    top = 255 if dtype == "float32" else 1
    pixels = [(rng.integers(0, 255, (16, 16, 16, channels)) / top).astype(dtype) for _ in range(2)]
    parts = [(each, torch.arange(16) % 3) for each in pixels]
    model = small_model(in_chans=channels, mean=(0.5,) * channels, std=(0.25,) * channels)
    task = make_task(tmp_path, model, train=parts[0], test=parts[1])
    with pytest.raises(UsageError, match=rf"{channels} channels.*{dtype}.*--no-augment"):
        Finetune(epochs=1).run(task)
    assert 0 <= Finetune(epochs=1, batch_size=8, augment=False).run(task).numbers["top1"] <= 1
