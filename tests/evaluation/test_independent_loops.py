"""Trainings with labels, from the request to the last weights, against loops written out from the papers.

What each step was given is recorded as the training goes, and the loops see the same in float64. Nothing else is
shared: forward, loss, optimizer and schedule are written here.
"""

from collections.abc import Callable, Mapping
from math import cos, pi
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from slow_probe import slow_probe
from tiny_task import make_task, small_model, striped
from torch import Tensor
from torch.testing import assert_close

from mae.evaluation.common import attentive_training
from mae.evaluation.common.metrics import top_k_accuracy
from mae.evaluation.common.probe_heads import ProbeHeads
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.layers.attention_pooling import AttentionPooling
from mae.models.classifier import ImageClassifier
from mae.training.log import loss_rows, read_rows

HEADS, PATCH = 3, 4
Weights = Mapping[str, Tensor]


@pytest.fixture
def task(tmp_path: Path) -> LabelledTask:
    return make_task(tmp_path, small_model(), train=striped(64, seed=1), test=striped(30, seed=2))


def recorded(monkeypatch: pytest.MonkeyPatch, kind: type[torch.nn.Module]) -> tuple[dict[str, Tensor], list[Any]]:
    """The weights a module begins to train with, and images and target of each step."""
    start: dict[str, Tensor] = {}
    batches: list[tuple[Tensor, Tensor]] = []
    forward = kind.forward

    def noted(self: Any, images: Tensor, target: Tensor | None = None) -> Any:
        if target is None:  # no step: the test images are ranked
            return forward(self, images)
        if not start:
            start.update({name: weight.detach().clone() for name, weight in self.state_dict().items()})
        batches.append((images.clone(), target.clone()))
        return forward(self, images, target)

    monkeypatch.setattr(kind, "forward", noted)
    return start, batches


def half_cosine(step: int, *, steps: int, warmup: float, peak: float, floor: float) -> float:
    """The rate of a step, as the official code sets it before each."""
    if step < warmup:
        return peak * step / warmup
    return floor + (peak - floor) * 0.5 * (1 + cos(pi * (step - warmup) / (steps - warmup)))


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt() * weight + bias


def classify(w: Weights, images: Tensor) -> Tensor:
    """Logits of a vision transformer that means its patch tokens; grey images, pre-norm blocks."""
    batch, _, height, width = images.shape
    patches = images.reshape(batch, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 1, 3, 2, 4).flatten(3)
    x = patches.flatten(1, 2) @ w["encoder.patch_embed.proj.weight"].T + w["encoder.patch_embed.proj.bias"]
    x = torch.cat([w["encoder.cls_token"].expand(batch, -1, -1), x + w["encoder.pos_embed.table"]], dim=1)
    for block in range(2):
        b = {name.partition(f"blocks.{block}.")[2]: tensor for name, tensor in w.items()}
        y = norm(x, b["norm1.weight"], b["norm1.bias"]) @ b["attn.qkv.weight"].T + b["attn.qkv.bias"]
        q, k, v = y.reshape(batch, -1, 3, HEADS, y.shape[-1] // 3 // HEADS).permute(2, 0, 3, 1, 4)
        mixed = ((q @ k.mT) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + mixed.transpose(1, 2).flatten(2) @ b["attn.proj.weight"].T + b["attn.proj.bias"]
        y = norm(x, b["norm2.weight"], b["norm2.bias"]) @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"]
        y = y * 0.5 * (1 + torch.erf(y / 2**0.5))
        x = x + y @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"]
    return norm(x[:, 1:].mean(1), w["fc_norm.weight"], w["fc_norm.bias"]) @ w["head.weight"].T + w["head.bias"]


def smoothed(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """Cross-entropy with a share of each target spread over all classes."""
    wanted = torch.nn.functional.one_hot(target, logits.shape[1]) * (1 - smoothing) + smoothing / logits.shape[1]
    return -(wanted * logits.log_softmax(1)).sum(1).mean()


class AdamW:
    """Loshchilov and Hutter 2019, a tensor at a time."""

    def __init__(self) -> None:
        self.first, self.second, self.steps = {}, {}, 0

    def step(self, weights: Weights, rate: Callable[[str], float], decay: Callable[[str], float]) -> None:
        self.steps += 1
        for name, weight in weights.items():
            slope = weight.grad
            self.first[name] = 0.9 * self.first.get(name, 0) + 0.1 * slope
            self.second[name] = 0.999 * self.second.get(name, 0) + 0.001 * slope**2
            size = (self.second[name] / (1 - 0.999**self.steps)).sqrt() + 1e-8
            with torch.no_grad():
                weight *= 1 - rate(name) * decay(name)
                weight -= rate(name) * self.first[name] / (1 - 0.9**self.steps) / size
            weight.grad = None


def merged(w: Weights) -> dict[str, Tensor]:
    """With what LoRA learned added to the weights beside it."""
    plain = {name: tensor for name, tensor in w.items() if not name.endswith((".up", ".down"))}
    for name in [name.removesuffix(".up") for name in w if name.endswith(".up")]:
        plain[f"{name}.weight"] = w[f"{name}.weight"] + w[f"{name}.up"] @ w[f"{name}.down"]
    return plain


def last_checkpoint(task: LabelledTask, protocol: str) -> tuple[dict[str, Tensor], list[float]]:
    """The last weights, and the loss of each step."""
    (folder,) = (task.folder / "evaluation" / protocol).iterdir()
    losses = [row["loss"] for row in loss_rows(read_rows(folder / "metrics.jsonl"))]
    return load_file(max((folder / "checkpoints").iterdir()) / "model.safetensors"), losses


def keyless(name: str, weight: Tensor) -> Tensor:
    """Without the bias of attention's keys: it changes nothing, so that its gradient is rounding alone."""
    if not name.endswith("qkv.bias"):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat([query, value])


@pytest.mark.parametrize("lora", [None, 2])
def test_fine_tuning_is_the_papers(monkeypatch: pytest.MonkeyPatch, task: LabelledTask, lora: int | None):
    start, batches = recorded(monkeypatch, ImageClassifier)
    options = {"augment": False, "mixing": False, "drop_path": 0.0, "lora": lora, "weight_decay": 0.3}
    found = Finetune(epochs=4, batch_size=16, base_lr=0.1, warmup_epochs=1, **options).run(task)
    assert len(batches) == 16

    w = {name: tensor.double() for name, tensor in start.items()}
    trained = {
        n: t.requires_grad_() for n, t in w.items() if not lora or n.endswith((".up", ".down")) or "enc" not in n
    }

    def share(name: str) -> float:  # a layer learns with 0.65 of the rate of the one behind it; LoRA's all alike
        layer = int(name.split(".")[2]) + 1 if ".blocks." in name else 0 if name.startswith("encoder.") else 3
        return 1.0 if lora else 0.65 ** (3 - layer)

    def decay(name: str) -> float:
        return 0.0 if w[name].ndim == 1 or "cls_token" in name or "pos_embed" in name else 0.3

    optimizer, losses = AdamW(), []
    for step, (images, target) in enumerate(batches):
        loss = smoothed(classify(merged(w), images.double()), target)
        loss.backward()
        losses.append(loss.item())
        rate = half_cosine(step, steps=16, warmup=4, peak=0.1 * 16 / 256, floor=1e-6)
        optimizer.step(trained, lambda name, rate=rate: rate * share(name), decay)

    weights, told = last_checkpoint(task, "finetune")
    assert told == pytest.approx(losses, rel=1e-4)
    assert weights.keys() == w.keys()
    moved = {name: float((weights[name] - start[name]).abs().max()) for name in w}
    assert all((moved[name] > 2e-3) == (name in trained) for name in w), moved
    for name, weight in weights.items():
        assert_close(
            keyless(name, weight.double()),
            keyless(name, w[name]),
            rtol=1e-3,
            atol=2e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    pixels = torch.stack([task.images("test").get(number) for number in range(30)]).double() / 255
    with torch.no_grad():
        logits = classify(merged(w), (pixels - 0.5) / 0.25)
    assert found.numbers["top1"] == top_k_accuracy(logits.topk(1).indices, task.labels("test"))


def test_the_official_probe_is_the_papers_from_end_to_end(monkeypatch: pytest.MonkeyPatch, task: LabelledTask):
    start, batches = recorded(monkeypatch, ProbeHeads)
    found = LinearProbe(official=True, epochs=4, batch_size=16, base_lr=800, warmup_epochs=1).run(task)
    assert len(batches) == 16
    rates = [half_cosine(step, steps=16, warmup=4, peak=50.0, floor=0.0) for step in range(16)]
    weights, _ = last_checkpoint(task, "linear_probe")
    pixels = torch.stack([task.images("test").get(number) for number in range(30)]).float() / 255
    tested = task.extractor.named((pixels - 0.5) / 0.25)
    for name in ("cls", "mean"):
        seen = [(task.extractor.named(images)[name].double().numpy(), labels.numpy()) for images, labels in batches]
        weight, bias, mean, variance = slow_probe(start[f"heads.{name}.weight"].double().numpy(), seen, rates)
        for key, expected in (
            (f"heads.{name}.weight", weight),
            (f"heads.{name}.bias", bias),
            (f"norms.{name}.running_var", variance),
        ):
            np.testing.assert_allclose(weights[key].numpy(), expected, rtol=2e-3, atol=2e-4, err_msg=key)
        logits = (tested[name].double().numpy() - mean) / np.sqrt(variance + 1e-6) @ weight.T + bias
        expected = top_k_accuracy(torch.from_numpy(logits).topk(1).indices, task.labels("test"))
        assert found.numbers["this model"][name]["top1"] == expected


def test_the_attentive_probe_is_its_papers_from_end_to_end(monkeypatch: pytest.MonkeyPatch):
    """BatchNorm over all tokens, keys and values made of each token, one query; AdamW, the rate taken in mid-step."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(60, 5, 64, generator=generator)
    labels = (tokens[:, :, 0].amax(dim=1) > 1.1).long()
    start: dict[str, Tensor] = {}
    batches: list[tuple[Tensor, Tensor]] = []
    step = attentive_training._Runner.step

    def noted(self: Any, seen: Tensor, targets: Tensor) -> None:
        if not start:
            start.update({name: weight.detach().double() for name, weight in self.probe.state_dict().items()})
        batches.append((seen.double(), targets))
        step(self, seen, targets)

    monkeypatch.setattr(attentive_training._Runner, "step", noted)
    found = attentive_training.train_attentive(
        tokens,
        labels,
        tokens,
        make=AttentionPooling,
        num_classes=2,
        rates=(1e-2,),
        epochs=4,
        batch_size=16,
        seed=3,
        device=torch.device("cpu"),
    )
    total, seen = sum(len(targets) for _, targets in batches), 0
    w = {name: weight.requires_grad_() for name, weight in start.items() if not name.startswith("norm.")}
    mean, variance = torch.zeros(64).double(), torch.ones(64).double()
    optimizer, losses = AdamW(), []

    def forward(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        x = (x - mean) / (variance + 1e-6).sqrt()
        keys, values = x @ w["key.weight"].T, x @ w["value.weight"].T
        share = (keys @ w["query"] / 8).softmax(dim=1)  # one head of 64
        return (share[:, :, None] * values).sum(dim=1) @ w["head.weight"].T + w["head.bias"]

    for x, targets in batches:
        flat = x.flatten(0, 1)
        loss = smoothed(forward(x, flat.mean(0), flat.var(0, unbiased=False)), targets, 0.0)
        loss.backward()
        losses.append(len(targets) * loss.item())
        mean, variance = 0.9 * mean + 0.1 * flat.mean(0), 0.9 * variance + 0.1 * flat.var(0)
        rate = half_cosine(seen + len(targets) / 2, steps=total, warmup=0.05 * total, peak=1e-2, floor=0.0)
        optimizer.step(w, lambda name, rate=rate: rate, lambda name: 0.05 if w[name].ndim == 2 else 0.0)
        seen += len(targets)
    of_epochs = np.array(losses).reshape(4, -1).sum(axis=1) / (total / 4)
    assert [row["loss"] for row in found.curve] == pytest.approx(of_epochs, rel=1e-4) and of_epochs[-1] < of_epochs[
        0
    ] / 2
    for name, weight in w.items():
        assert_close(found.probe.state_dict()[name].double(), weight.detach(), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        logits = forward(tokens.double(), mean, variance)
    assert torch.equal(found.ranking[:, 0], logits.argmax(dim=1))
