"""The official probe against a slow one in NumPy, and what the quick one hands to the fit and tells of it."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slow_probe import slow_probe
from tiny_task import by_function, make_task, small_model, striped
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.common import joined_features, probe_heads, supervised
from mae.evaluation.common.logistic import choose_penalty
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.probe_heads import ProbeHeads
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.extractor import weights_digest
from mae.evaluation.protocols import linear_probe
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.lars import LARS
from mae.training.log import read_rows

NAMES = ["cls", "mean", "cls+mean"]
QUICK_TO_LEARN: dict[str, Any] = {"official": True, "epochs": 4.0, "batch_size": 16, "base_lr": 1000.0}


@pytest.fixture
def task(tmp_path: Path) -> LabelledTask:
    return make_task(tmp_path, small_model(), train=striped(64, seed=1), test=striped(60, seed=2))


def trained(task: LabelledTask) -> tuple[Path, dict[str, Tensor]]:
    (folder,) = (task.folder / "evaluation" / "linear_probe").iterdir()
    return folder, load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors")


class Captured(Exception):
    """Carries what a training would have been given."""


def captured(monkeypatch: pytest.MonkeyPatch, task: LabelledTask, **options: Any) -> tuple[Any, ProbeHeads, Any, Any]:
    def stop(task: Any, plan: Any, module: Any, optimizer: Any, *, batches: Any, **_: Any) -> None:
        raise Captured(plan, module, optimizer, batches)

    monkeypatch.setattr(supervised, "train_with_labels", stop)
    with pytest.raises(Captured) as caught:
        LinearProbe(official=True, **options).run(task)
    return caught.value.args  # type: ignore[return-value]


def test_the_official_probe_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch, task: LabelledTask):
    plan, probe, optimizer, fed = captured(monkeypatch, task, batch_size=16)
    features = task.extractor.named(torch.randn(96, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    x = {"cls": features["cls"].numpy(), "mean": features["mean"].numpy()}
    x["cls+mean"] = np.concatenate([x["cls"], x["mean"]], axis=1)
    labels = torch.arange(96) % 3
    starts = {name: head.weight.detach().numpy().astype(float) for name, head in probe.heads.items()}
    images = torch.randn(96, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    rates = [0.0, 5.0, 20.0, 40.0, 10.0, 3.0]
    for k, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        output = probe(images[16 * k : 16 * k + 16], labels[16 * k : 16 * k + 16])
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert list(probe.heads) == NAMES and len(optimizer.param_groups) == 1
    for name, start in starts.items():
        batches = [(x[name][k : k + 16].astype(float), labels[k : k + 16].numpy()) for k in range(0, 96, 16)]
        weight, bias, mean, variance = slow_probe(start, batches, rates)
        assert np.abs(weight - start).max() > 2e-3  # the steps were large enough to tell
        for found, expected in (
            (probe.heads[name].weight, weight),
            (probe.heads[name].bias, bias),
            (probe.norms[name].running_mean, mean),
            (probe.norms[name].running_var, variance),
        ):
            np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-4, atol=2e-5)
    augmentation = fed.augmentation
    assert (augmentation.scale, augmentation.draws, augmentation.rand_augment) == ((0.08, 1.0), 1, False)
    assert (plan.rate, plan.min_rate, plan.epochs, plan.warmup_epochs) == (0.1 / 16, 0.0, 90, 10)


def test_the_heads_start_as_the_official_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    task = make_task(tmp_path, small_model(embed_dim=192), train=striped(64, seed=1), test=striped(9, seed=2))
    _, probe, optimizer, _ = captured(monkeypatch, task)
    for name, width in zip(NAMES, (192, 192, 384), strict=True):
        head, norm = probe.heads[name], probe.norms[name]
        assert head.weight.shape == (3, width) and not head.bias.any()
        assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.15)
        assert norm.eps == 1e-6 and not norm.affine and norm.momentum == 0.1 and norm.track_running_stats
    assert optimizer.defaults == {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.0, "trust": 0.001}
    assert probe.training and {name.split(".")[0] for name, _ in probe.named_parameters()} == {"heads"}


def test_the_official_constants_for_imagenet():
    options = LinearProbe(official=True)
    assert supervised.largest_batch(options.batch_size, 16384, images=1_281_167, steps_per_epoch=16) == 16384
    assert options.base_lr * 16384 / 256 == pytest.approx(6.4)


def test_heads_side_by_side_train_as_each_would_alone():
    images, labels = torch.randn(40, 1, 1, 6, generator=torch.Generator().manual_seed(1)), torch.arange(40) % 3

    def encode(images: Tensor) -> Mapping[str, Tensor]:
        return {"cls": images[:, 0, 0, :2], "mean": images[:, 0, 0, 2:]}

    def train(widths: dict[str, int]) -> ProbeHeads:
        probe = ProbeHeads(encode=encode, widths=widths, num_classes=3, world=World())
        for head in probe.heads.values():
            torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(0))
        optimizer = LARS(probe.parameters(), lr=5.0)
        for _ in range(5):
            optimizer.zero_grad()
            probe(images, labels).loss.backward()
            optimizer.step()
        return probe

    widths = {"cls": 2, "mean": 4, "cls+mean": 6}
    together = train(widths).state_dict()
    for name, width in widths.items():
        alone = train({name: width}).state_dict()
        assert all(torch.equal(together[key], value) for key, value in alone.items()), name


def test_the_encoder_stays_as_it_was_and_only_sees(task: LabelledTask):
    model = task.extractor.model
    assert model is not None
    before, modes = weights_digest(model), []
    norm = model.encoder.norm
    norm.register_forward_hook(lambda module, *_: modes.append((module.training, torch.is_grad_enabled())))
    LinearProbe(**QUICK_TO_LEARN).run(task)
    assert weights_digest(model) == before and not any(
        weight.requires_grad and weight.grad is not None for weight in model.parameters()
    )
    assert set(modes) == {(False, False)} and len(modes) >= 16
    _, weights = trained(task)
    assert all(int(weights[f"norms.{name}.num_batches_tracked"]) == 16 for name in NAMES)
    assert {name.split(".")[0] for name in weights} == {"norms", "heads"}


def test_result_is_the_accuracy_of_the_last_weights(task: LabelledTask):
    result = LinearProbe(**QUICK_TO_LEARN).run(task)
    _, weights = trained(task)
    found = result.numbers["this model"]
    for name in NAMES:
        both = task.features("test")
        x = torch.cat([both[part] for part in name.split("+")], dim=1)
        z = (x - weights[f"norms.{name}.running_mean"]) / (weights[f"norms.{name}.running_var"] + 1e-6).sqrt()
        logits = z @ weights[f"heads.{name}.weight"].T + weights[f"heads.{name}.bias"]
        expected = top_k_accuracy(logits.argmax(1, keepdim=True), task.labels("test"))
        assert found[name] == {"top1": pytest.approx(expected), "top5": 1.0}
        assert result.curve[-1][name] == found[name]["top1"] != result.curve[0][name]
    assert [row["epoch"] for row in result.curve] == [0, 1, 2, 3, 4]
    assert [row[0] for row in result.rows] == [f"this model, {name}" for name in NAMES]
    folder, training = trained(task)[0], result.numbers["training"]
    assert training["folder"] == str(folder) and training["curve"] == result.curve and training["seconds"] > 0
    assert result.note.endswith(f"the heads are in {folder}.")
    assert result.variant == "official" and result.ranking is not None
    assert top_k_accuracy(result.ranking[:, :1], task.labels("test")) == found["mean"]["top1"]


def test_resumed_probe_matches_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = {"train": striped(64, seed=1), "test": striped(20, seed=2)}
    through, cut = (make_task(tmp_path / name, small_model(), **data) for name in ("through", "cut"))
    expected = LinearProbe(**QUICK_TO_LEARN).run(through)
    rank, calls = probe_heads.rank_by_heads, []

    def interrupting(*args: Any, **options: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return rank(*args, **options)

    with (
        monkeypatch.context() as patch,
        pytest.raises(KeyboardInterrupt, match="resumes when you rerun"),
    ):
        patch.setattr(probe_heads, "rank_by_heads", interrupting)
        LinearProbe(**QUICK_TO_LEARN).run(cut)
    found = LinearProbe(**QUICK_TO_LEARN).run(cut)
    ends = [trained(task) for task in (through, cut)]
    assert all(torch.equal(ends[0][1][name], ends[1][1][name]) for name in ends[0][1])  # running moments too
    for name in ("this model", "resolved"):
        assert found.numbers[name] == expected.numbers[name]
    assert found.numbers["training"]["curve"] == expected.numbers["training"]["curve"]
    rows = [[(row["step"], row.get("loss")) for row in read_rows(end[0] / "metrics.jsonl")] for end in ends]
    assert rows[0] == rows[1] and len(rows[0]) == 16 + 5
    monkeypatch.setattr(Trainer, "_train_step", lambda *_: pytest.fail("a step was done"))
    assert LinearProbe(**QUICK_TO_LEARN).run(cut).numbers == found.numbers  # the time too is that of the training


@pytest.mark.parametrize(("base_lr", "warns"), [(39.9, True), (40.1, False)])
def test_a_rate_that_cannot_train_a_head_is_told(task: LabelledTask, base_lr: float, warns: bool):
    """Eight steps at a rate of base_lr / 16, half of it in the mean, each 0.001 of the weights and ten with momentum:
    base_lr / 400."""
    options = LinearProbe(official=True, epochs=2, batch_size=16, base_lr=base_lr * 100)
    note = options.run(task).note
    assert ("give a higher --base-lr" in note) is warns
    assert ("all 8 together come to" in note) is warns


def test_what_the_note_warns_of_is_so(tmp_path: Path):
    def roughness(images: Tensor) -> Mapping[str, Tensor]:
        return {"mean": torch.cat([images.diff(dim=axis).abs().mean(dim=axis).flatten(1) for axis in (2, 3)], dim=1)}

    function = by_function(roughness, img_size=(16, 16))
    task = make_task(tmp_path, function, train=striped(200, seed=1), test=striped(150, seed=2))
    told, silent = (LinearProbe(official=True, epochs=5, batch_size=20, base_lr=rate).run(task) for rate in (1, 600))
    assert "--base-lr" in told.note and "--base-lr" not in silent.note
    assert silent.numbers["this model"]["mean"]["top1"] > told.numbers["this model"]["mean"]["top1"] + 0.1


def test_the_quick_probe_hands_its_features_to_the_fit(task: LabelledTask):
    result = LinearProbe().run(task)
    train, test = task.features("train"), task.features("test")
    assert list(result.numbers) == ["this model", "random weights", "raw pixels"]
    assert list(result.numbers["this model"]) == list(result.numbers["random weights"]) == NAMES
    assert list(result.numbers["raw pixels"]) == ["pixels"]
    for name in NAMES:
        joined = [torch.cat([part[each] for each in name.split("+")], dim=1) for part in (train, test)]
        choice = choose_penalty(joined[0], task.labels("train"), num_classes=3, seed=0, device=task.device)
        expected = top_k_accuracy(choice.best.logits(joined[1]).argmax(1, keepdim=True), task.labels("test"))
        found = result.numbers["this model"][name]
        assert found["top1"] == pytest.approx(expected) and found["penalty"] == choice.best.penalty
        assert list(found["held_out"].values()) == pytest.approx(choice.accuracies)
    assert len(result.rows) == 7 and {len(row) for row in result.rows} == {len(result.header)} == {4}
    assert result.ranking is not None
    shown = top_k_accuracy(result.ranking[:, :1], task.labels("test"))
    assert shown == result.numbers["this model"]["mean"]["top1"]
    assert list(LinearProbe(baselines=False).run(task).numbers) == ["this model"]


def test_test_labels_never_reach_the_choice(tmp_path: Path):
    train, test = striped(100, seed=1), striped(80, seed=2)
    permuted = test[0], test[1][torch.randperm(80, generator=torch.Generator().manual_seed(0))]
    first, second = (
        LinearProbe(baselines=False).run(make_task(tmp_path / name, small_model(), train=train, test=part)).numbers
        for name, part in (("true", test), ("permuted", permuted))
    )
    scores = ("top1", "top5")
    for name in NAMES:
        found, other = first["this model"][name], second["this model"][name]
        assert {key: found[key] for key in found if key not in scores} == {
            key: other[key] for key in other if key not in scores
        }
    assert any(first["this model"][name]["top1"] > second["this model"][name]["top1"] + 0.1 for name in NAMES)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 1}, "a batch of 1 in 1"),
        ({"batch_size": 16, "accumulate": 16}, "a batch of 16 in 16"),
    ],
)
def test_micro_batches_of_one_image_are_refused(task: LabelledTask, options: dict[str, Any], says: str):
    with pytest.raises(UsageError, match=rf"{says} micro-batch\(es\) leaves a micro-batch of one image.*--batch-size"):
        LinearProbe(official=True, epochs=1, **options).run(task)
    assert not (task.folder / "evaluation").exists()


def test_micro_batches_of_two_images_work(task: LabelledTask, tmp_path: Path):
    LinearProbe(official=True, epochs=1, batch_size=16, accumulate=8).run(task)
    few = make_task(tmp_path / "few", small_model(), train=striped(20, seed=1), test=striped(9, seed=2))
    with pytest.raises(UsageError, match="a batch of 1 in 1"):  # 20 images are too few for 16 steps of two
        LinearProbe(official=True, epochs=1).run(few)


def test_features_are_joined_in_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is mapped while it is written ends the process without a word where the disk is full."""
    monkeypatch.setattr(joined_features, "_CHUNK", 7)
    modes: list[str] = []
    open_memmap = np.lib.format.open_memmap

    def noted(path: Path, mode: str = "r+", **given: Any) -> np.memmap:
        modes.append(mode)
        return open_memmap(path, mode=mode, **given)

    monkeypatch.setattr(np.lib.format, "open_memmap", noted)
    features = {
        name: (torch.randn(20, width), torch.randn(15, width))
        for name, width in (("cls", 3), ("mean", 5), ("other", 2))
    }
    with joined_features.with_joined(features) as joined:
        assert list(joined) == ["cls", "mean", "other", "cls+mean"] and modes == ["c", "c"]
        for part in (0, 1):
            expected = torch.cat([features["cls"][part], features["mean"][part]], dim=1)
            assert torch.equal(joined["cls+mean"][part], expected)
    with joined_features.with_joined({"mean": features["mean"]}) as alone:
        assert list(alone) == ["mean"]


def test_joined_features_are_gone_after_the_fit(task: LabelledTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    LinearProbe(baselines=False).run(task)
    assert not list(tmp_path.glob("mae-joined-*"))


def test_a_remark_is_made_once_and_names_its_probes():
    fine = {"penalty_at_end_of_grid": False, "converged": True}
    assert linear_probe._remarks({"a": fine, "b": fine}) == []
    at_end, gave_up = {**fine, "penalty_at_end_of_grid": True}, {**fine, "converged": False}
    (remark,) = linear_probe._remarks({"a": fine, "b": at_end, "c": at_end})
    assert remark.endswith("end of the grid: b; c.")
    assert len(linear_probe._remarks({"a": gave_up, "b": at_end})) == 2
    (remark,) = linear_probe._remarks({"a": gave_up, "b": gave_up})
    assert remark.endswith("converged: all.")


def test_models_with_other_class_tokens_and_a_function_have_the_heads_they_can(tmp_path: Path):
    data = {"train": striped(40, seed=1), "test": striped(20, seed=2)}
    plain = make_task(tmp_path / "plain", small_model(cls_token=False), **data)
    function = by_function(lambda images: images[:, 0, ::4].flatten(1), img_size=(16, 16))
    four = make_task(tmp_path / "four", small_model(cls_tokens=4), **data)
    cases = (
        (plain, ["mean"]),
        (four, ["cls", "mean", "cls+mean"]),
        (make_task(tmp_path / "function", function, **data), ["features"]),
    )
    for task, names in cases:
        for official in (False, True):
            probe = LinearProbe(official=True, epochs=1, batch_size=8) if official else LinearProbe()
            assert list(probe.run(task).numbers["this model"]) == names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0.0}, "epochs is 0.0; expected a finite number above 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 8}, "batch_size is of the official recipe, which is not asked for; give official too"),
        ({"warmup_epochs": 1.0}, "warmup_epochs is of the official recipe"),
        ({"accumulate": -1}, "accumulate is -1"),
        ({"base_lr": float("inf")}, "base_lr is inf"),
        ({"warmup_epochs": -1.0}, "warmup_epochs is -1.0; expected 0 or more"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        LinearProbe(**options)
