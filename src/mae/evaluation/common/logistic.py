"""Multinomial logistic regression on frozen features, its penalty chosen on a part of the training samples."""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from mae.errors import MAEError
from mae.evaluation.common.hold_out import check_labels, hold_out
from mae.evaluation.common.principal_axes import principal_axes

PENALTIES = tuple(10.0**-power for power in range(9))
"""Strong to weak. With features of std 1, a penalty of 1 leaves little more than the difference of the class means;
1e-8 is next to none."""

_CHUNK = 4096
_VALUES = 1 << 24  # held at once in 64 bits, where a row is wide
_KEPT_BYTES = 1 << 30
"""Standardised features up to this size stay in memory, which halves the time of a fit; larger ones are made anew."""
_MAX_ITERATIONS = 1000
_FINE, _ROUGH = 1.0, 100.0
"""Tolerances: of the last fit, and near enough to choose a penalty by, at a third of the cost."""
_SMALLEST_STD = 1e-35
"""What is left of a dimension that weight decay took away; 1 over less, or a weight over it, would not be finite."""
_FLAT = 1e-4
"""A largest slope at which no step may go lower by more than float32 can tell: the optimizer calls that a failure."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Logistic:
    """A classifier of features, fitted with a penalty.

    Attributes:
        weight: of the standardised features.
        bias: of each class.
        mean: of each feature in training.
        std: of each feature in training; 0 where it is constant or next to it, and such a feature counts as 0.
        penalty: with which it was fitted.
        converged: False if the optimizer gave up first: the classifier is then not the best of its penalty.
    """

    weight: Float32[Tensor, "K D"]
    bias: Float32[Tensor, " K"]
    mean: Float32[Tensor, " D"]
    std: Float32[Tensor, " D"]
    penalty: float
    converged: bool

    def logits(self, features: Float[Tensor, "m D"]) -> Float32[Tensor, "m K"]:
        """A score for each class, computed chunk by chunk where the weights are, returned on the CPU."""
        chunks = (standardise(chunk, self.mean, self.std) for chunk in features.split(_CHUNK))
        parts = [torch.addmm(self.bias, chunk, self.weight.T).cpu() for chunk in chunks]
        return torch.cat([torch.empty(0, len(self.bias)), *parts])

    def folded(self) -> tuple[Float32[Tensor, "K D"], Float32[Tensor, " K"]]:
        """Weight and bias that give the same logits of features as they are, without standardising them."""
        weight = torch.where(self.std > 0, self.weight.double() / self.std.double(), 0.0)
        return weight.float(), (self.bias.double() - weight @ self.mean.double()).float()


@dataclass(frozen=True, kw_only=True, eq=False)
class PenaltyChoice:
    """The result of `choose_penalty`.

    Attributes:
        best: fitted on all training samples with the best penalty.
        penalties: those tried, strong to weak.
        accuracies: of each on the held-out training samples, in [0, 1].
        converged: whether each fit converged.
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
    device: torch.device,
) -> Logistic:
    """The minimum of mean cross-entropy + penalty / 2 * ||weight||^2 over weight and bias, by L-BFGS.

    The features are standardised first. They may be mapped from a file larger than memory: they are read in order,
    chunk by chunk.

    Args:
        features: of the training samples.
        labels: classes in `[0, num_classes)`.
        num_classes: number of classes.
        penalty: above 0; scikit-learn's `C` is `1 / (penalty * n)`.
        device: where products are computed, in float32; they are summed in float64.

    Raises:
        UsageError: no samples, or labels out of range.
        MAEError: features that are not finite.
    """
    check_labels(labels, num_classes)
    standard, rows = _Standard(features, device), torch.arange(len(labels))
    samples = _Samples(features=features, labels=labels, rows=rows, num_classes=num_classes, standard=standard)
    return samples.fit(penalty, None, tolerance=_FINE)


def choose_penalty(
    features: Float[Tensor, "n D"], labels: Int64[Tensor, " n"], *, num_classes: int, seed: int, device: torch.device
) -> PenaltyChoice:
    """Fit each of `PENALTIES` on nine tenths of the samples, compare them on the rest, refit the best on all.

    Features are standardised as all training samples are, in every fit: a penalty then means the same in all. Each fit
    starts from that of the next stronger penalty. Of penalties equally accurate the strongest is best.

    Args:
        features: as for `fit_logistic`.
        labels: classes in `[0, num_classes)`.
        num_classes: number of classes.
        seed: of the division, see `hold_out`.
        device: as for `fit_logistic`.

    Raises:
        UsageError: no class has two samples, or labels out of range.
        MAEError: features that are not finite.
    """
    check_labels(labels, num_classes)
    fitted, held = hold_out(labels, seed=seed)
    standard = _Standard(features, device)
    part = _Samples(features=features, labels=labels, rows=fitted, num_classes=num_classes, standard=standard)
    fits: list[Logistic] = []
    for penalty in PENALTIES:
        fits.append(part.fit(penalty, fits[-1] if fits else None, tolerance=_ROUGH))
    accuracies = tuple(_accuracy(fit, features, labels, held) for fit in fits)
    best = accuracies.index(max(accuracies))
    return PenaltyChoice(
        best=replace(part, rows=torch.arange(len(labels))).fit(PENALTIES[best], fits[best], tolerance=_FINE),
        penalties=PENALTIES,
        accuracies=accuracies,
        converged=tuple(fit.converged for fit in fits),
        at_end=best in (0, len(PENALTIES) - 1),
    )


class _Standard:
    """Mean and std of features, and the variances of the standardised ones along their principal axes."""

    def __init__(self, features: Float[Tensor, "n D"], device: torch.device) -> None:
        num, chunks = len(features), features.split(_CHUNK)
        mean, std = moments(features)
        self.mean, self.std = mean.to(device), std.to(device)
        if num < len(mean):  # across the samples' span the best weights are 0
            z = standardise(features, self.mean, self.std).cpu().double()
            squares, axes = principal_axes(z)
            self.variances, self.axes = squares / num, axes.T
            return
        covariance = torch.zeros(len(mean), len(mean), dtype=torch.float64)
        for chunk in chunks:
            z = standardise(chunk, self.mean, self.std)
            covariance += (z.T @ z).cpu().double()
        variances, self.axes = torch.linalg.eigh(covariance / num)
        self.variances = variances.clamp(min=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Samples:
    """Rows to fit on."""

    features: Float[Tensor, "n D"]
    labels: Int64[Tensor, " n"]
    rows: Int64[Tensor, " r"]
    num_classes: int
    standard: _Standard

    @cached_property
    def _kept(self) -> list[Tensor]:
        """The standardised features of each chunk; none of larger ones."""
        fits = len(self.rows) * self.standard.mean.nbytes <= _KEPT_BYTES
        return [self._chunk(rows) for rows in self.rows.split(_CHUNK)] if fits else []

    def _chunk(self, rows: Int64[Tensor, " B"]) -> Float32[Tensor, "B D"]:
        return standardise(self.features[rows], self.standard.mean, self.standard.std)

    def fit(self, penalty: float, start: Logistic | None, *, tolerance: float) -> Logistic:
        """L-BFGS over `weight = (v / steepness) @ axes.T`, in which no direction is much steeper than another.

        The Hessian of the cross-entropy is at most half the covariance of the features (Boehning 1992), so the root
        of that, with the penalty, evens the slopes; without it weak penalties take many hundred iterations.
        """
        axes, mean = self.standard.axes, self.standard.mean
        steepness = (self.standard.variances / 2 + penalty).sqrt()
        shape = (self.num_classes, len(steepness) + 1)

        def weight_and_bias(flat: np.ndarray) -> tuple[Tensor, Tensor]:
            v = torch.from_numpy(flat).reshape(shape)
            return (v[:, :-1] / steepness) @ axes.T, v[:, -1]

        def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
            weight, bias = weight_and_bias(flat)
            loss, to_weight, to_bias = self._cross_entropy(weight, bias)
            to_v = (to_weight + penalty * weight) @ axes / steepness
            slopes = torch.cat([to_v, to_bias.unsqueeze(1)], dim=1).flatten().numpy()
            return loss + penalty / 2 * float(weight.square().sum()), slopes

        from scipy.optimize import minimize  # slow to import, and a run without labels needs none of it

        first = torch.zeros(shape, dtype=torch.float64)
        if start is not None:
            first[:, :-1], first[:, -1] = start.weight.cpu().double() @ axes * steepness, start.bias.cpu()
        ends = {"ftol": 1e-8 * tolerance, "gtol": 1e-6 * tolerance}
        options = {"maxiter": _MAX_ITERATIONS, "maxfun": 2 * _MAX_ITERATIONS, "maxcor": 20, **ends}
        end = minimize(objective, first.flatten().numpy(), jac=True, method="L-BFGS-B", options=options)
        weight, bias = (part.float().to(mean.device) for part in weight_and_bias(end.x))
        converged = bool(end.success or np.abs(end.jac).max() < _FLAT)
        std = self.standard.std
        return Logistic(weight=weight, bias=bias, mean=mean, std=std, penalty=penalty, converged=converged)

    def _cross_entropy(
        self, weight: Float64[Tensor, "K D"], bias: Float64[Tensor, " K"]
    ) -> tuple[float, Float64[Tensor, "K D"], Float64[Tensor, " K"]]:
        """The mean over the samples and its slopes."""
        device = self.standard.mean.device
        weight32, bias32 = weight.float().to(device), bias.float().to(device).unsqueeze(1)
        sums = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        loss = torch.zeros((), dtype=sums, device=device)
        to_weight, to_bias = (torch.zeros_like(part, dtype=sums, device=device) for part in (weight, bias))
        for number, rows in enumerate(self.rows.split(_CHUNK)):
            z, labels = self._kept[number] if self._kept else self._chunk(rows), self.labels[rows].to(device)
            # Samples stand in columns: along them a softmax of few classes is several times as fast.
            log_share = torch.addmm(bias32, weight32, z.T).log_softmax(dim=0)
            column = torch.arange(len(z), device=device)
            loss -= log_share[labels, column].sum(dtype=sums)
            slope = log_share.exp()
            slope[labels, column] -= 1
            to_weight += slope @ z
            to_bias += slope.sum(dim=1, dtype=sums)
        num = len(self.rows)
        return float(loss) / num, to_weight.cpu().double() / num, to_bias.cpu().double() / num


def moments(features: Float[Tensor, "n D"]) -> tuple[Float32[Tensor, " D"], Float32[Tensor, " D"]]:
    """Mean and std of each dimension, read chunk by chunk and summed in float64; a std next to nothing is 0.

    Raises:
        MAEError: features that are not finite.
    """
    num, chunks = len(features), features.split(max(1, min(_CHUNK, _VALUES // features.shape[1])))
    mean = sum((chunk.double().sum(dim=0) for chunk in chunks), torch.zeros(features.shape[1]).double()) / num
    if not mean.isfinite().all():
        raise MAEError("the features hold values that are not finite; the model that made them is broken")
    # Exactly 0 where all are equal: sums of float32 values are exact in float64.
    variance = sum(((chunk.double() - mean).square().sum(dim=0) for chunk in chunks), torch.zeros_like(mean)) / num
    std = variance.sqrt().float()
    return mean.float(), std.where(std > _SMALLEST_STD, 0)


def standardise(
    chunk: Float[Tensor, "B D"], mean: Float32[Tensor, " D"], std: Float32[Tensor, " D"]
) -> Float32[Tensor, "B D"]:
    """The features with mean and std taken off; a dimension that never changes becomes 0."""
    return (chunk.to(mean) - mean).mul_(torch.where(std > 0, 1 / std, 0))


def _accuracy(fit: Logistic, features: Tensor, labels: Tensor, rows: Int64[Tensor, " r"]) -> float:
    right = sum(int((fit.logits(features[part]).argmax(1) == labels[part]).sum()) for part in rows.split(_CHUNK))
    return right / len(rows)
