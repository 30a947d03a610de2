"""The results of a study as plain records: its variants, its runs and the numbers of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from mae.experiments.core.metrics import Metric


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way of training that is compared.

    Attributes:
        name: short, such as `original`.
        what: a description for the report.
        options: of this variant alone.
        x: its position on the x axis of a plot, such as its mask ratio, where the study has one.
    """

    name: str
    what: str
    options: Mapping[str, Any]
    x: float | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointMetrics:
    """A run after some steps.

    Attributes:
        step: optimizer steps done.
        samples: images seen.
        seconds: of training, without periodic tasks and checkpoints.
        operations: floating-point operations of matrix products in them; a multiply-add counts as 2.
        numbers: what was measured, by metric.
    """

    step: int
    samples: int
    seconds: float
    operations: float
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One finished run of a variant.

    Attributes:
        variant: its name.
        seed: of the run.
        folder: of the run; `metrics.jsonl` in it holds the losses.
        numbers: by the metric's name; one that was not measured is absent.
        commands: what a user would type to repeat it.
        checkpoints: how good it was on the way, where checkpoints were evaluated.
    """

    variant: str
    seed: int
    folder: Path
    numbers: Mapping[str, float]
    commands: tuple[str, ...]
    checkpoints: tuple[CheckpointMetrics, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study, finished or not.

    Attributes:
        name: of the study.
        question: that it answers.
        reference: the variant that the others are compared with.
        variants: in the order in which they are shown.
        seeds: each variant is trained with each.
        metrics: in the order in which they are shown.
        runs: those that are done.
        facts: the set-up: data, model, length, what is held fixed, hardware, versions.
        notes: what a reader must know.
        warnings: reasons to doubt the numbers.
        axis: what `Variant.x` is, such as "mask ratio".
    """

    name: str
    question: str
    reference: str
    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    runs: tuple[RunResult, ...]
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    axis: str = ""

    @property
    def others(self) -> tuple[Variant, ...]:
        """The variants that are compared with the reference."""
        return tuple(variant for variant in self.variants if variant.name != self.reference)

    @property
    def planned(self) -> int:
        """How many runs the finished study has."""
        return len(self.variants) * len(self.seeds)

    def runs_of(self, variant: str) -> list[RunResult]:
        """The variant's runs that are done, by rising seed."""
        return sorted((run for run in self.runs if run.variant == variant), key=lambda run: run.seed)

    def values(self, metric: str, variant: str) -> dict[int, float]:
        """The metric by seed, over the variant's runs that have it; a value that is not finite is left out."""
        measured = {run.seed: run.numbers[metric] for run in self.runs_of(variant) if metric in run.numbers}
        return {seed: float(value) for seed, value in measured.items() if isfinite(value)}

    def broken(self) -> list[tuple[str, int, str]]:
        """Variant, seed and metric's title of each value that is not finite."""
        return [
            (run.variant, run.seed, metric.title)
            for variant in self.variants
            for run in self.runs_of(variant.name)
            for metric in self.metrics
            if not isfinite(run.numbers.get(metric.name, 0.0))
        ]
