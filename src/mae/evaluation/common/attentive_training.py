"""Training of a linear classifier on an attention-weighted mean of frozen tokens (El-Nouby et al. 2024, AIM).

A masked autoencoder spreads what it knows of an image over the patch tokens; a mean of them can lose what a single
token holds, which a learned query finds.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Generic, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mae.errors import MAEError, UsageError
from mae.evaluation.common.hold_out import check_labels, hold_out
from mae.randomness import permutation
from mae.training.optimizer import make_optimizer
from mae.training.schedule import WarmupCosine

_TOP = 5
_WARMUP = 0.05
"""Share of the training over which the rate rises."""
_WEIGHT_DECAY = 0.05
_Probe = TypeVar("_Probe", bound=nn.Module)


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentiveResult(Generic[_Probe]):
    """The result of `train_attentive`.

    Attributes:
        ranking: the `min(5, K)` likeliest classes of each test sample, by the probe of the best rate.
        rates: learning rates tried.
        accuracies: of each rate's probe on the held-out training samples, in [0, 1].
        best_rate: the most accurate; of equal ones the first.
        at_end: the best rate is the lowest or the highest tried, so a still better one may lie beyond.
        curve: for each epoch and rate `epoch`, `rate`, `loss` (mean over the epoch) and `held_out_accuracy`.
        probe: that of the best rate, in evaluation mode.
    """

    ranking: Int64[Tensor, "m top"]
    rates: tuple[float, ...]
    accuracies: tuple[float, ...]
    best_rate: float
    at_end: bool
    curve: list[dict[str, float]]
    probe: _Probe


def train_attentive(  # noqa: PLR0913 - the data and options of a training
    tokens: Float[Tensor, "n N D"],
    labels: Int64[Tensor, " n"],
    test_tokens: Float[Tensor, "m N D"],
    *,
    make: Callable[..., _Probe],
    num_classes: int,
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3),
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> AttentiveResult[_Probe]:
    """Train a probe for each learning rate, choose the best on a tenth of the training samples, rank the test classes.

    The probes see the same batches side by side, so that the tokens are read once an epoch, in ascending numbers
    within a batch: they may be mapped from files larger than memory. AdamW; the rate rises over a twentieth of the
    training and falls to 0 by a cosine schedule. The
    result is a function of the arguments alone; PyTorch's generators are left as they were.

    Args:
        tokens: patch tokens of the training samples, any float type.
        labels: classes in `[0, num_classes)`.
        test_tokens: of the samples to classify; no choice depends on them.
        make: from `dim` of a token and `num_classes` to a probe, tokens `[B, N, D]` to logits `[B, K]`.
        num_classes: number of classes.
        rates: peak learning rates to try.
        epochs: over the training samples.
        batch_size: at most so many samples a step; the batches of an epoch differ by one at most.
        seed: of weights, order and held-out samples, `0 <= seed < 2**63`.
        device: where the probes are trained, in float32.
        progress: called after each step with the steps done and the steps in all.

    Raises:
        UsageError: no rate, fewer than one epoch or sample a batch, labels out of range, or no class with two
            samples.
        MAEError: the loss of the best probe is not finite.
    """
    _check(labels, num_classes, rates, epochs, batch_size)
    fitted, held = hold_out(labels, seed=seed)
    probe = _fresh(make, seed, dim=tokens.shape[2], num_classes=num_classes).to(device)
    runners = [_Runner(deepcopy(probe), rate, epochs * len(fitted)) for rate in rates]
    steps, curve = -(-len(fitted) // batch_size), []
    for epoch in range(epochs):
        order = fitted[permutation(seed, epoch, len(fitted))]
        for step, rows in enumerate(order.tensor_split(steps), start=1):
            rows = rows.sort().values
            batch, targets = tokens[rows].to(device, torch.float32), labels[rows].to(device)
            for runner in runners:
                runner.step(batch, targets)
            if progress is not None:
                progress(epoch * steps + step, epochs * steps)
        accuracies = _accuracies(runners, tokens, labels, held.split(batch_size))
        for runner, accuracy in zip(runners, accuracies, strict=True):
            loss = runner.mean_loss(len(fitted))
            curve.append({"epoch": epoch + 1, "rate": runner.rate, "loss": loss, "held_out_accuracy": accuracy})
    best = accuracies.index(max(accuracies))
    if not isfinite(curve[best - len(rates)]["loss"]):
        raise MAEError(
            "the loss of the best probe is not finite; look for such values in the tokens, or lower the rates"
        )
    return AttentiveResult(
        ranking=_rank(runners[best].probe, test_tokens, min(_TOP, num_classes), batch_size),
        rates=rates,
        accuracies=tuple(accuracies),
        best_rate=rates[best],
        at_end=rates[best] in (min(rates), max(rates)),
        curve=curve,
        probe=runners[best].probe,
    )


class _Runner(Generic[_Probe]):
    """A probe in training at its rate."""

    def __init__(self, probe: _Probe, rate: float, total: int) -> None:
        self.probe = probe
        self.rate = rate
        self.optimizer = make_optimizer(probe, weight_decay=_WEIGHT_DECAY, betas=(0.9, 0.999))
        self.schedule = WarmupCosine(peak=rate, floor=0.0, warmup_samples=_WARMUP * total, total_samples=total)
        self.seen = 0
        self.losses = next(probe.parameters()).new_zeros(())

    def step(self, tokens: Float[Tensor, "B N D"], labels: Int64[Tensor, " B"]) -> None:
        self.probe.train()
        loss = cross_entropy(self.probe(tokens), labels)
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.seen + len(labels) / 2)  # mid-step: neither end is a step of rate 0
        self.optimizer.step()
        self.seen += len(labels)
        self.losses += len(labels) * loss.detach()

    def mean_loss(self, samples: int) -> float:
        """Over the samples since it was last asked."""
        mean = float(self.losses) / samples
        self.losses.zero_()
        return mean


def _fresh(make: Callable[..., _Probe], seed: int, *, dim: int, num_classes: int) -> _Probe:
    """Weights from the seed, drawn on the CPU; the generator is put back."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make(dim=dim, num_classes=num_classes)


@torch.no_grad()
def _accuracies(runners: list[_Runner[_Probe]], tokens: Tensor, labels: Tensor, parts: Sequence[Tensor]) -> list[float]:
    """The accuracy of each on the samples of these numbers, which are read once."""
    right = [0] * len(runners)
    for rows in parts:
        batch = tokens[rows].to(runners[0].losses)
        for number, runner in enumerate(runners):
            right[number] += int((runner.probe.eval()(batch).argmax(dim=1).cpu() == labels[rows]).sum())
    return [count / sum(map(len, parts)) for count in right]


@torch.no_grad()
def _rank(probe: nn.Module, tokens: Tensor, top: int, batch_size: int) -> Int64[Tensor, "m top"]:
    probe.eval()
    like = next(probe.parameters())
    parts = [probe(batch.to(like)).topk(top, dim=1).indices.cpu() for batch in tokens.split(batch_size)]
    return torch.cat([torch.empty(0, top, dtype=torch.int64), *parts])


def _check(labels: Tensor, num_classes: int, rates: tuple[float, ...], epochs: int, batch_size: int) -> None:
    if not rates or not min(rates) > 0:
        raise UsageError(f"the rates are {list(rates)}; expected learning rates above 0")
    if epochs < 1 or batch_size < 1:
        raise UsageError(f"found {epochs} epochs and {batch_size} samples a batch; expected at least 1 of each")
    check_labels(labels, num_classes)
