"""Multinomial logistic regression on frozen features, its penalty chosen on a part of the training samples."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from scipy.optimize import minimize
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.randomness import permutation

PENALTIES = tuple(float(penalty) for penalty in np.logspace(0, -8, 9))
"""Strong to weak. With features of deviation 1, a penalty of 1 outweighs the curvature of the loss along all but the
largest principal axes, which leaves little more than the difference of the class means; 1e-8 is next to none."""

_CHUNK = 4096
_KEPT_BYTES = 1 << 30
"""Standardised features up to this size stay in memory, which halves the time of a fit; larger ones are made anew."""
_FINE, _ROUGH = 1.0, 100.0
"""How far a fit goes: to its end, or near enough to choose a penalty by, at a third of the cost."""

_FLAT = 1e-4
"""A largest slope at which no step may go lower by more than float32 can tell: the optimizer calls that a failure."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Logistic:
    """A fitted classifier of features; see `fit_logistic`.

    Attributes:
        weight: of the standardised features.
        bias: of each class.
        mean: of each feature in training.
        std: of each feature in training; 0 where it is constant, and such a feature counts as 0.
        penalty: with which it was fitted.
        converged: False if the optimizer gave up first: the classifier is then not the best of its penalty.
        iterations: of the optimizer.
    """

    weight: Float32[Tensor, "K D"]
    bias: Float32[Tensor, " K"]
    mean: Float32[Tensor, " D"]
    std: Float32[Tensor, " D"]
    penalty: float
    converged: bool
    iterations: int

    def logits(self, features: Float[Tensor, "m D"]) -> Float32[Tensor, "m K"]:
        """A score for each class, computed chunk by chunk where the weights are, handed back on the CPU."""
        parts = [self._score(chunk) for chunk in features.split(_CHUNK)]
        return torch.cat([torch.empty(0, len(self.bias)), *parts])

    def _score(self, chunk: Float[Tensor, "B D"]) -> Float32[Tensor, "B K"]:
        return (_standardise(chunk, self.mean, self.std) @ self.weight.T + self.bias).cpu()


@dataclass(frozen=True, kw_only=True, eq=False)
class PenaltyChoice:
    """The outcome of `choose_penalty`.

    Attributes:
        best: fitted on all training samples with the best penalty.
        penalties: those tried, strong to weak.
        accuracies: of each on the held-out training samples, in [0, 1].
        converged: whether each fit came to its end.
        at_end: the best penalty is the strongest or the weakest tried, so a still better one may lie beyond.
    """

    best: Logistic
    penalties: tuple[float, ...]
    accuracies: tuple[float, ...]
    converged: tuple[bool, ...]
    at_end: bool


def fit_logistic(
    features: Float[Tensor, "n D"],
    labels: Int64[Tensor, " n"],
    *,
    num_classes: int,
    penalty: float,
    start: Logistic | None = None,
    max_iterations: int = 1000,
    device: torch.device,
) -> Logistic:
    """The minimum of mean cross-entropy + penalty / 2 * ||weight||^2 over weight and bias, by L-BFGS.

    The features are standardised by their mean and deviation first. They may be mapped from a file larger than
    memory: they are read in order, chunk by chunk.

    Args:
        features: of the training samples.
        labels: classes in `[0, num_classes)`.
        num_classes: number of classes.
        penalty: above 0; scikit-learn's `C` is `1 / (penalty * n)`.
        start: where to begin, zeros by default; it changes how long it takes, not where it ends.
        max_iterations: after which it gives up.
        device: where products are computed, in float32; they are summed in float64 on the CPU.

    Raises:
        UsageError: no samples, labels out of range, or a penalty that is not above 0.
        MAEError: features that are not finite.
    """
    _check(labels, num_classes, [penalty])
    problem = _Problem.of(features, labels, num_classes=num_classes, device=device)
    return problem.fit(penalty, start, max_iterations, tolerance=_FINE)


def choose_penalty(
    features: Float[Tensor, "n D"],
    labels: Int64[Tensor, " n"],
    *,
    num_classes: int,
    seed: int,
    penalties: tuple[float, ...] = PENALTIES,
    max_iterations: int = 1000,
    device: torch.device,
) -> PenaltyChoice:
    """Fit each penalty on nine tenths of the samples, judge it on the rest (`hold_out`), refit the best on all.

    Features are standardised as all training samples are, in every fit: a penalty then means the same in all. Each fit
    starts from that of the next stronger penalty and goes near enough to its end to be judged; the last one goes all
    the way. Of penalties equally accurate the strongest is best.

    Args:
        features: as for `fit_logistic`.
        labels: classes in `[0, num_classes)`.
        num_classes: number of classes.
        seed: of the division, `0 <= seed < 2**63`.
        penalties: to try, each above 0.
        max_iterations: after which a fit gives up.
        device: as for `fit_logistic`.

    Raises:
        UsageError: no class has two samples, labels out of range, or no penalty or one that is not above 0.
        MAEError: features that are not finite.
    """
    _check(labels, num_classes, penalties)
    penalties = tuple(sorted(penalties, reverse=True))
    fitted, held = hold_out(labels, seed=seed)
    whole = _Problem.of(features, labels, num_classes=num_classes, device=device)
    part = whole.of_rows(fitted)
    fits: list[Logistic] = []
    for penalty in penalties:
        fits.append(part.fit(penalty, fits[-1] if fits else None, max_iterations, tolerance=_ROUGH))
    accuracies = tuple(_accuracy(fit, features, labels, held) for fit in fits)
    best = accuracies.index(max(accuracies))
    return PenaltyChoice(
        best=whole.fit(penalties[best], fits[best], max_iterations, tolerance=_FINE),
        penalties=penalties,
        accuracies=accuracies,
        converged=tuple(fit.converged for fit in fits),
        at_end=best in (0, len(penalties) - 1),
    )


def hold_out(labels: Int64[Tensor, " n"], *, seed: int) -> tuple[Int64[Tensor, " fitted"], Int64[Tensor, " held"]]:
    """The numbers of the samples to fit on and of those to judge by, ascending: a tenth of each class is held out.

    A tenth is rounded up, but a class's only sample is not held out. The division is a function of labels and seed
    alone, on every machine.

    Raises:
        UsageError: no class has two samples.
    """
    order = permutation(seed, 0, len(labels))
    by_class = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]  # of a sample in its class
    tenth = ((counts + 9) // 10).where(counts > 1, 0)[labels[by_class]]
    held = by_class[place < tenth]
    if len(held) == 0:
        raise UsageError("no class has two samples, so none can be held out; give more training samples")
    return by_class[place >= tenth].sort().values, held.sort().values


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """Samples to fit on, with what is known of their features before any fit."""

    features: Float[Tensor, "n D"]
    labels: Int64[Tensor, " n"]
    rows: Int64[Tensor, " r"]
    num_classes: int
    mean: Float32[Tensor, " D"]
    std: Float32[Tensor, " D"]
    axes: Float64[Tensor, "D A"]
    variances: Float64[Tensor, " A"]
    kept: list[Tensor]

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, *, num_classes: int, device: torch.device) -> "_Problem":
        """Measure the features: their moments, and the principal axes of what they are when standardised."""
        mean, std = (moment.to(device) for moment in _moments(features))
        variances, axes = _principal_axes(features, mean, std)
        problem = cls(
            features=features,
            labels=labels,
            rows=torch.arange(len(features)),
            num_classes=num_classes,
            mean=mean,
            std=std,
            axes=axes,
            variances=variances,
            kept=[],
        )
        return problem.of_rows(problem.rows)

    def of_rows(self, rows: Int64[Tensor, " r"]) -> "_Problem":
        """Some of the samples, their features standardised as those of all."""
        kept: list[Tensor] = []
        if len(rows) * self.mean.nbytes <= _KEPT_BYTES:
            kept = [_standardise(self.features[part], self.mean, self.std) for part in rows.split(_CHUNK)]
        return replace(self, rows=rows, kept=kept)

    def fit(self, penalty: float, start: Logistic | None, max_iterations: int, *, tolerance: float) -> Logistic:
        """L-BFGS over `weight = (v / steepness) @ axes.T`, in which no direction is much steeper than another.

        The Hessian of the cross-entropy is at most half the covariance of the features (Boehning 1992), so the root
        of that, with the penalty, evens the slopes; without it weak penalties take many hundred iterations.
        """
        steepness = (self.variances / 2 + penalty).sqrt()
        shape = (self.num_classes, len(steepness) + 1)

        def weight_and_bias(flat: np.ndarray) -> tuple[Tensor, Tensor]:
            v, bias = torch.from_numpy(flat).reshape(shape).split([shape[1] - 1, 1], dim=1)
            return (v / steepness) @ self.axes.T, bias.squeeze(1)

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            weight, bias = weight_and_bias(flat)
            loss, to_weight, to_bias = self._cross_entropy(weight, bias)
            loss += penalty / 2 * float(weight.square().sum())
            to_v = (to_weight + penalty * weight) @ self.axes / steepness
            return loss, torch.cat([to_v, to_bias], dim=1).flatten().numpy()

        first = torch.zeros(shape, dtype=torch.float64)
        if start is not None:
            v = start.weight.cpu().double() @ self.axes * steepness
            first = torch.cat([v, start.bias.cpu().double().unsqueeze(1)], dim=1)
        ends = {"ftol": 1e-8 * tolerance, "gtol": 1e-6 * tolerance}
        options = {"maxiter": max_iterations, "maxfun": 2 * max_iterations, "maxcor": 20, **ends}
        found = minimize(objective, first.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
        weight, bias = weight_and_bias(found.x)
        return Logistic(
            weight=weight.float().to(self.mean.device),
            bias=bias.float().to(self.mean.device),
            mean=self.mean,
            std=self.std,
            penalty=penalty,
            converged=bool(found.success or np.abs(found.jac).max() < _FLAT),
            iterations=int(found.nit),
        )

    def _cross_entropy(
        self, weight: Float64[Tensor, "K D"], bias: Float64[Tensor, " K"]
    ) -> tuple[float, Float64[Tensor, "K D"], Float64[Tensor, "K 1"]]:
        """The mean over the samples and its slopes."""
        device = self.mean.device
        weight32, bias32 = weight.float().to(device), bias.float().to(device)
        # Summed where it is computed and read once; MPS has no float64.
        sums = torch.float32 if device.type == "mps" else torch.float64
        loss = torch.zeros((), dtype=sums, device=device)
        to_weight, to_bias = (torch.zeros_like(part, dtype=sums, device=device) for part in (weight, bias))
        for number, part in enumerate(self.rows.split(_CHUNK)):
            z = self.kept[number] if self.kept else _standardise(self.features[part], self.mean, self.std)
            labels = self.labels[part].to(device)
            # Samples stand in columns: along them a softmax of few classes is several times as fast.
            log_share = torch.addmm(bias32.unsqueeze(1), weight32, z.T).log_softmax(dim=0)
            column = torch.arange(len(z), device=device)
            loss -= log_share[labels, column].sum(dtype=sums)
            slope = log_share.exp()
            slope[labels, column] -= 1
            to_weight += slope @ z
            to_bias += slope.sum(dim=1, dtype=sums)
        num = len(self.rows)
        return float(loss) / num, to_weight.cpu().double() / num, to_bias.cpu().double().unsqueeze(1) / num


def _standardise(
    chunk: Float[Tensor, "B D"], mean: Float32[Tensor, " D"], std: Float32[Tensor, " D"]
) -> Float32[Tensor, "B D"]:
    return (chunk.to(mean) - mean).mul_(torch.where(std > 0, 1 / std, 0))


def _principal_axes(
    features: Float[Tensor, "n D"], mean: Float32[Tensor, " D"], std: Float32[Tensor, " D"]
) -> tuple[Float64[Tensor, " A"], Float64[Tensor, "D A"]]:
    """The variances of the standardised features along orthogonal axes, and these, at most as many as samples.

    Of fewer samples than features, only the axes in the samples' span: across it the best weights are 0.
    """
    num = len(features)
    if num < len(mean):
        z = _standardise(features, mean, std).cpu().double()
        _, spread, axes = torch.linalg.svd(z, full_matrices=False)
        return spread.square() / num, axes.T
    covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for chunk in features.split(_CHUNK):
        z = _standardise(chunk, mean, std)
        covariance += (z.T @ z).cpu().double()
    variances, axes = torch.linalg.eigh(covariance / num)
    return variances.clamp(min=0), axes


def _moments(features: Float[Tensor, "n D"]) -> Iterator[Float32[Tensor, " D"]]:
    """Mean and deviation of each feature, merged chunk by chunk in float64 (Chan, Golub & LeVeque 1979)."""
    mean = squares = torch.zeros(features.shape[1], dtype=torch.float64)
    seen = 0
    for part in features.split(_CHUNK):
        chunk = part.cpu().double()
        if not chunk.isfinite().all():
            raise MAEError("the features hold values that are not finite; the model that made them is broken")
        seen += len(chunk)
        shift = chunk.mean(dim=0) - mean
        squares = squares + (chunk - chunk.mean(dim=0)).square().sum(dim=0)
        squares = squares + shift.square() * (seen - len(chunk)) * len(chunk) / seen
        mean = mean + shift * len(chunk) / seen
    yield mean.float()
    yield (squares / seen).sqrt().float()  # exactly 0 where all are equal: their sums are exact in float64


def _accuracy(fit: Logistic, features: Tensor, labels: Tensor, rows: Int64[Tensor, " r"]) -> float:
    right = sum(int((fit.logits(features[part]).argmax(1) == labels[part]).sum()) for part in rows.split(_CHUNK))
    return right / len(rows)


def _check(labels: Int64[Tensor, " n"], num_classes: int, penalties: tuple[float, ...] | list[float]) -> None:
    if len(labels) == 0:
        raise UsageError("no training samples to fit; give at least one")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UsageError(f"labels lie between {lowest} and {highest}; expected 0 to {num_classes - 1}")
    if not penalties or not min(penalties) > 0:
        raise UsageError(f"the penalty is {list(penalties)}; expected numbers above 0")
