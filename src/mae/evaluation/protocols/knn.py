"""Weighted k-nearest-neighbour classification of frozen features (Wu et al. 2018, section 3.4; DINO, section 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult, against_baselines

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.task import LabelledTask


_DRAWS = 5


@dataclass(frozen=True, kw_only=True)
class Knn(EvaluationProtocol):
    """DINO's protocol: the nearest training images vote, for the model and for its baselines.

    Raises:
        UsageError: values out of range.
    """

    name = "knn"
    title = "Weighted k-NN on frozen features"
    summary = "the nearest training images vote on each test image"
    cheap = True

    ks: tuple[int, ...] = (1, 10, 20, 100, 200)
    """Numbers of neighbours that vote; all are evaluated in one search."""
    temperature: float = 0.07
    """A vote weighs exp(cosine / temperature)."""
    shots: tuple[int, ...] = ()
    """Few-shot: only this many training images of each class vote, in several draws."""
    draws: int = _DRAWS
    """Draws for each number of shots."""
    baselines: bool = True
    """Evaluate random weights and raw pixels too."""

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

        if not self.shots and self.draws != _DRAWS:
            raise UsageError(f"draws is {self.draws}, and no shots are asked for; give shots too, or leave draws out")

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Evaluate; see `EvaluationProtocol`."""
        labels = task.labels("train")
        k = headline_k(self.ks, voters=len(labels))
        drawn = self._drawn(task)  # before any feature: a class may have too few images
        numbers: dict[str, dict[str, Any]] = {}
        rows: list[tuple[str, ...]] = []
        rankings: dict[str, dict[str, Tensor]] = {}
        for who, features in task.contenders(baselines=self.baselines).items():
            numbers[who], rankings[who] = {}, {}
            for name, (train, test) in features.items():
                ranked = self._rank(task, train, labels, test)
                of_each = {str(k): _accuracies(task, ranking, k, len(labels)) for k, ranking in ranked.items()}
                rows.append((f"{who}, {name}", *(f"{of['top1']:.1%}" if of else "" for of in of_each.values())))
                rankings[who][name] = ranked[k]
                few = {f"{shots} shots": self._few_shot(task, train, test, draws) for shots, draws in drawn.items()}
                for shots, by_k in few.items():
                    cells = (f"{of['mean']:.1%} ± {100 * of['std']:.1f}" if of else "" for of in by_k.values())
                    rows.append((f"{who}, {name}, {shots}", *cells))
                numbers[who][name] = {**of_each, **few}
        ranking, name, others = against_baselines(rankings)
        return ProtocolResult(
            numbers=numbers,
            header=("features", *(f"k={k}" for k in self.ks)),
            rows=tuple(rows),
            note=self._note(k, numbers[THIS_MODEL], ranking.shape[1]),
            ranking=ranking,
            ranked_by=f"{name}, k={k}",
            baselines=others,
        )

    def _note(self, k: int, by_name: Mapping[str, Any], top: int) -> str:
        top5 = {name: of[str(k)]["top5"] for name, of in by_name.items()}
        shares = ", ".join(f"{name} {share:.1%}" for name, share in top5.items() if share is not None)
        draws = f" Few-shot: mean and std of {self.draws} draws." if self.shots else ""
        return f"Top-1{f'; top-{top} at k={k}: {shares}' if shares else ''}.{draws}"

    def _rank(self, task: "LabelledTask", train: "Tensor", labels: "Tensor", test: "Tensor") -> "dict[int, Tensor]":
        from mae.evaluation.common.neighbours import knn_rank

        return knn_rank(
            train,
            labels,
            test,
            ks=self.ks,
            num_classes=task.num_classes,
            temperature=self.temperature,
            device=task.device,
        )

    def _drawn(self, task: "LabelledTask") -> dict[int, "Tensor"]:
        """The rows of each draw, by the number of shots."""
        from mae.evaluation.common.neighbours import few_shot_draws

        labels = task.labels("train")
        draw = partial(few_shot_draws, labels, draws=self.draws, seed=task.seed, num_classes=task.num_classes)
        return {shots: draw(shots=shots) for shots in self.shots}

    def _few_shot(self, task: "LabelledTask", train: "Tensor", test: "Tensor", draws: "Tensor") -> dict[str, Any]:
        """Mean and std over the draws for each k; None where fewer images vote than k."""
        from mae.evaluation.common.metrics import top_k_accuracy

        labels, test_labels = task.labels("train"), task.labels("test")
        accuracies: dict[int, list[float]] = {k: [] for k in self.ks}
        for rows in draws:
            for k, ranking in self._rank(task, train[rows], labels[rows], test).items():
                accuracies[k].append(top_k_accuracy(ranking[:, :1], test_labels))
        return {
            str(k): {"mean": fmean(of), "std": stdev(of) if len(of) > 1 else 0.0} if k <= draws.shape[1] else None
            for k, of in accuracies.items()
        }


def _accuracies(task: "LabelledTask", ranking: "Tensor", k: int, voters: int) -> dict[str, float | None] | None:
    """Top-1, and top-5 (all classes if fewer) where so many can get a vote; None where fewer images vote than k."""
    from mae.evaluation.common.metrics import top_k_accuracy

    if k > voters:
        return None
    labels = task.labels("test")
    top5 = top_k_accuracy(ranking, labels) if k >= ranking.shape[1] else None
    return {"top1": top_k_accuracy(ranking[:, :1], labels), "top5": top5}


def headline_k(ks: Sequence[int], *, voters: int) -> int:
    """The k whose accuracy stands for a model: 20, as in the field, or the nearest that is evaluated.

    Raises:
        UsageError: fewer images vote than the smallest k.
    """
    possible = [k for k in ks if k <= voters]
    if not possible:
        raise UsageError(f"ks is {list(ks)}, but {voters} training images vote; give a k up to {voters}")
    return min(possible, key=lambda k: (abs(k - 20), k))
