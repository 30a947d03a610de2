"""Weighted k-nearest-neighbour classification of frozen features (Wu et al. 2018, section 3.4; DINO, section 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, stdev
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from mae.errors import MAEError, UsageError
from mae.evaluation.bench import THIS_MODEL, Bench, Outcome, headline
from mae.evaluation.scores import top_k_accuracy
from mae.randomness import permutation

_QUERY_BLOCK = 16384
"""Test samples held at once; the training features are read once for each block."""


@dataclass(frozen=True, kw_only=True)
class Knn:
    """The protocol of DINO: every training image votes, and its comparators are judged the same way.

    Raises:
        UsageError: values out of range.
    """

    ks: tuple[int, ...] = (1, 10, 20, 100, 200)
    """How many neighbours vote; all are judged in one pass."""
    temperature: float = 0.07
    """A vote weighs exp(cosine / temperature)."""
    shots: tuple[int, ...] = ()
    """Few-shot: so many training images of each class vote alone, several draws of them."""
    draws: int = 5
    """Draws for each number of shots."""
    comparators: bool = True
    """Judge random weights and raw pixels beside it."""

    def __post_init__(self) -> None:
        for name in ("ks", "shots"):
            numbers = getattr(self, name)
            if any(number < 1 for number in numbers) or len(set(numbers)) < len(numbers):
                raise UsageError(f"{name} is {list(numbers)}; expected different numbers of 1 or more")
        if not self.ks or self.draws < 1 or not 0 < self.temperature < inf:
            raise UsageError(
                f"ks {list(self.ks)}, draws {self.draws}, temperature {self.temperature}; expected one k or more, one "
                "draw or more, a finite temperature above 0"
            )

    def run(self, bench: Bench) -> Outcome:
        """Judge; see `EvaluationProtocol`."""
        labels, test_labels = bench.labels("train"), bench.labels("test")
        k = headline_k(self.ks, voters=len(labels))
        result: dict[str, dict[str, Any]] = {}
        rows: list[tuple[str, ...]] = []
        rankings: dict[str, Tensor] = {}
        for who, features in bench.contenders(beside=self.comparators).items():
            result[who] = {}
            for name, (train, test) in features.items():
                ranked = self._rank(bench, train, labels, test)
                found: dict[str, Any] = {str(k): _share(of, k, test_labels, len(labels)) for k, of in ranked.items()}
                rows.append((f"{who}, {name}", *(f"{of['top1']:.1%}" if of else "" for of in found.values())))
                if who == THIS_MODEL:
                    rankings[name] = ranked[k]
                for shots in self.shots:
                    few = self._few_shot(bench, train, test, shots)
                    found[f"{shots} shots"] = few
                    cells = [f"{of['mean']:.1%} ± {100 * of['std']:.1f}" if of else "" for of in few.values()]
                    rows.append((f"{who}, {name}, {shots} a class", *cells))
                result[who][name] = found
        name = headline(rankings)
        return Outcome(
            result=result,
            header=("features", *(f"k={k}" for k in self.ks)),
            rows=tuple(rows),
            note=self._note(k, result[THIS_MODEL], rankings),
            ranking=rankings[name],
            ranked_by=f"{name}, k={k}",
        )

    def _note(self, k: int, found: Mapping[str, Any], rankings: Mapping[str, Tensor]) -> str:
        top5 = {name: of[str(k)]["top5"] for name, of in found.items()}
        shares = ", ".join(f"{name} {share:.1%}" for name, share in top5.items() if share is not None)
        top = next(iter(rankings.values())).shape[1]
        draws = f" Few-shot: mean and deviation of {self.draws} draws." if self.shots else ""
        return f"Top-1{f'; top-{top} at k={k}: {shares}' if shares else ''}.{draws}"

    def _rank(self, bench: Bench, train: Tensor, labels: Tensor, test: Tensor) -> dict[int, Tensor]:
        return knn_rank(
            train,
            labels,
            test,
            ks=self.ks,
            num_classes=bench.num_classes,
            temperature=self.temperature,
            device=bench.device,
        )

    def _few_shot(self, bench: Bench, train: Tensor, test: Tensor, shots: int) -> dict[str, Any]:
        """Mean and deviation over the draws for each k; None where fewer images vote than k."""
        labels, test_labels = bench.labels("train"), bench.labels("test")
        draws = few_shot_draws(labels, shots=shots, draws=self.draws, seed=bench.seed, num_classes=bench.num_classes)
        shares: dict[int, list[float]] = {k: [] for k in self.ks}
        for rows in draws:
            ranked = self._rank(bench, train[rows], labels[rows], test)
            for k in self.ks:
                shares[k].append(top_k_accuracy(ranked[k][:, :1], test_labels))
        voters = draws.shape[1]
        return {
            str(k): {"mean": fmean(of), "std": stdev(of) if len(of) > 1 else 0.0} if k <= voters else None
            for k, of in shares.items()
        }


def _share(ranking: Int64[Tensor, "m top"], k: int, labels: Tensor, voters: int) -> dict[str, float | None] | None:
    """Top-1, and top-5 (of fewer classes all) where so many can have a vote; None where fewer images vote than k."""
    if k > voters:
        return None
    top5 = top_k_accuracy(ranking, labels) if k >= ranking.shape[1] else None
    return {"top1": top_k_accuracy(ranking[:, :1], labels), "top5": top5}


def headline_k(ks: Sequence[int], *, voters: int) -> int:
    """The number of neighbours a model is judged by in one number: 20, as the field does, or the nearest there is.

    Raises:
        UsageError: fewer images vote than the smallest k.
    """
    possible = [k for k in ks if k <= voters]
    if not possible:
        raise UsageError(f"ks is {list(ks)}, but {voters} training images vote; give a k up to {voters}")
    return min(possible, key=lambda k: (abs(k - 20), k))


@torch.no_grad()
def knn_rank(
    train_features: Float[Tensor, "n D"],
    train_labels: Int64[Tensor, " n"],
    test_features: Float[Tensor, "m D"],
    *,
    ks: Sequence[int],
    num_classes: int,
    temperature: float = 0.07,
    top: int = 5,
    chunk: int = 256,
    bank_chunk: int = 16384,
    device: torch.device,
) -> dict[int, Int64[Tensor, "m top"]]:
    """The classes of each test sample by the vote of its k nearest training samples, for each k from one pass.

    Nearness is the cosine similarity s of the features, a vote weighs exp(s / temperature). The search is exact.
    Equally near training samples come in the order of their numbers, classes with equal votes (or none) in the
    order of theirs. A k above n lets all n vote and keeps its own key.

    Features may be mapped from files larger than memory: they are read in order, chunk by chunk. How they are cut
    changes nothing in the result: similarities are summed in float64 and then rounded to float32, so that copies of
    a sample are equally near wherever they stand.

    Args:
        train_features: any scale; each is normalised to length 1.
        train_labels: classes in `[0, num_classes)`.
        test_features: likewise.
        ks: how many neighbours vote, each `>= 1`.
        num_classes: number of classes.
        temperature: the smaller, the more the very nearest count.
        top: classes to name, those of most votes first; at most `num_classes` are.
        chunk: test samples compared at a time.
        bank_chunk: training samples compared at a time; memory is `chunk * bank_chunk` similarities.
        device: where features are compared; MPS, which has no float64, leaves it to the CPU.

    Returns:
        For each k the `min(top, num_classes)` first classes, on the CPU.

    Raises:
        UsageError: no training sample, no k or one below 1, or labels out of range.
        MAEError: features that are not finite.
    """
    _check(train_features, train_labels, ks, num_classes)
    train_labels = train_labels.cpu()
    top, most = min(top, num_classes), min(max(ks), len(train_features))
    ranked: dict[int, list[Tensor]] = {k: [torch.empty(0, top, dtype=torch.int64)] for k in ks}
    for block in test_features.split(_QUERY_BLOCK):
        found = nearest(train_features, block, k=most, chunk=chunk, bank_chunk=bank_chunk, device=device)
        for similarity, neighbours in zip(*(part.split(chunk) for part in found), strict=True):
            # Relative to the nearest: the same vote, and no exponent can overflow.
            votes = ((similarity - similarity[:, :1]).double() / temperature).exp()
            labels = train_labels[neighbours]
            for k in ranked:
                tally = votes.new_zeros(len(votes), num_classes)
                ranked[k].append(_largest(tally.scatter_add_(1, labels[:, :k], votes[:, :k]), top)[1])
    return {k: torch.cat(parts) for k, parts in ranked.items()}


@torch.no_grad()
def nearest(
    bank: Float[Tensor, "n D"],
    queries: Float[Tensor, "m D"],
    *,
    k: int,
    chunk: int = 256,
    bank_chunk: int = 16384,
    device: torch.device,
) -> tuple[Float32[Tensor, "m k"], Int64[Tensor, "m k"]]:
    """The cosine similarities and numbers of the k nearest of a bank, nearest first, equal ones by number.

    The bank is read once, chunk by chunk; the queries are held. See `knn_rank`.

    Args:
        bank: any scale.
        queries: likewise.
        k: how many, between 1 and n.
        chunk: queries compared at a time.
        bank_chunk: samples of the bank compared at a time.
        device: where features are compared.

    Raises:
        MAEError: features that are not finite.
    """
    device = torch.device("cpu") if device.type == "mps" else device
    parts = _unit(queries, device).split(chunk)
    best: list[tuple[Tensor, Tensor]] = [
        (part.new_empty(len(part), 0, dtype=torch.float32), part.new_empty(len(part), 0, dtype=torch.int64))
        for part in parts
    ]
    for start in range(0, len(bank), bank_chunk):
        keys = _unit(bank[start : start + bank_chunk], device).T
        for number, part in enumerate(parts):
            values, found = _largest((part @ keys).float(), min(k, keys.shape[1]))
            values, found = (torch.cat(pair, dim=1) for pair in zip(best[number], (values, found + start), strict=True))
            values, order = values.sort(dim=1, descending=True, stable=True)  # stable: lower numbers stay before
            best[number] = values[:, :k], found.gather(1, order[:, :k])
    similarities, places = (torch.cat(columns).cpu() for columns in zip(*best, strict=True))
    return similarities, places


def few_shot_draws(
    labels: Int64[Tensor, " n"], *, shots: int, draws: int, seed: int, num_classes: int
) -> Int64[Tensor, "draws picked"]:
    """The numbers of `shots` samples of each class, drawn without replacement, for each of several draws.

    Args:
        labels: classes in `[0, num_classes)`.
        shots: samples of each class in a draw.
        draws: how many draws; each is a function of seed and number alone, on every machine.
        seed: of the draws, `0 <= seed < 2**63`.
        num_classes: number of classes.

    Returns:
        `shots * num_classes` numbers a draw, class by class.

    Raises:
        UsageError: a class has fewer samples than a draw takes.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    fewest = int(counts.argmin())
    if counts[fewest] < shots:
        raise UsageError(f"class {fewest} has {int(counts[fewest])} samples; a draw takes {shots}, so ask for fewer")
    first = (counts.cumsum(0) - counts).unsqueeze(1)  # of each class among the samples sorted by class

    def draw(number: int) -> Tensor:
        order = permutation(seed, number, len(labels))
        by_class = order[labels[order].argsort(stable=True)]
        return by_class[first + torch.arange(shots)].flatten()

    return torch.stack([draw(number) for number in range(draws)])


def _unit(features: Float[Tensor, "n D"], device: torch.device) -> Float64[Tensor, "n D"]:
    if not features.isfinite().all():
        raise MAEError("the features hold values that are not finite; the model that made them is broken")
    return normalize(features.to(device, torch.float64), dim=1)


def _largest(values: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Int64[Tensor, "m k"]]:
    """The k largest of each row, equal ones in the order of their numbers, which `topk` alone leaves open."""
    largest, found = values.topk(k, dim=1)
    # Where more are as large as the last one, topk may have taken any of them.
    open_rows = ((values >= largest[:, -1:]).sum(dim=1) > k).nonzero().flatten()
    if len(open_rows):
        found[open_rows] = values[open_rows].argsort(dim=1, descending=True, stable=True)[:, :k]
    found = found.sort(dim=1).values
    largest, order = values.gather(1, found).sort(dim=1, descending=True, stable=True)
    return largest, found.gather(1, order)


def _check(
    train_features: Float[Tensor, "n D"], train_labels: Int64[Tensor, " n"], ks: Sequence[int], num_classes: int
) -> None:
    if len(train_features) == 0:
        raise UsageError("no training samples to vote; give at least one")
    if not ks or min(ks) < 1:
        raise UsageError(f"k is {list(ks)}; expected numbers of neighbours, each at least 1")
    lowest, highest = int(train_labels.min()), int(train_labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UsageError(f"labels lie between {lowest} and {highest}; expected 0 to {num_classes - 1}")
