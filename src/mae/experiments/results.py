"""What a study found, as plain records: its arms, its runs and the numbers of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from mae.experiments.looks import Look
from mae.report.canvas import readable

Kind = Literal["share", "seconds", "number", "decibel"]

_UNITS: Mapping[Kind, str] = {"share": "%", "seconds": "s", "number": "", "decibel": "dB"}


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One number that is measured of each run.

    Attributes:
        name: its key in `RunResult.numbers`.
        title: in words, such as "linear probe, top-1".
        better: which direction is the better one; None for what is shown and never judged.
        kind: how it is printed: a share of 0.445 as 44.5 %, its differences in points.
    """

    name: str
    title: str
    better: Literal["higher", "lower"] | None
    kind: Kind

    @property
    def unit(self) -> str:
        """Of its values; empty for a plain number."""
        return _UNITS[self.kind]

    @property
    def gap_unit(self) -> str:
        """Of differences between its values: points for shares."""
        return "points" if self.kind == "share" else self.unit

    def digits(self, value: float) -> str:
        """The value as it is printed, without its unit; shares are given in [0, 1]."""
        match self.kind:
            case "share":
                return f"{100 * value:.1f}"
            case "decibel":
                return f"{value:.2f}"
            case _:  # a mean of 70 is 70.0, as its neighbours are 71.3 and 69.8
                return f"{value:#.3g}".removesuffix(".") if abs(value) < 999.5 else readable(value)

    def gap_digits(self, value: float, *, sign: bool = False) -> str:
        """A difference or a deviation as it is printed, without its unit.

        Args:
            value: in the units of the values.
            sign: with a plus before what is above zero.
        """
        short = self.kind in ("seconds", "number") and abs(value) < 99.5  # two digits tell enough
        text = f"{value:#.2g}".removesuffix(".") if short else self.digits(value)
        if not any(digit in text for digit in "123456789"):
            text = text.removeprefix("-")  # no "-0.0"
        return f"+{text}" if sign and value > 0 else text


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of training that is compared.

    Attributes:
        name: short, such as `original`.
        what: in words, for the report.
        options: what is told to this arm alone.
        place: its place on the x axis of a plot, such as its mask ratio, where the study has one.
    """

    name: str
    what: str
    options: Mapping[str, Any]
    place: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One finished run of an arm.

    Attributes:
        arm: its name.
        seed: of the run.
        folder: of the run; `metrics.jsonl` in it holds the losses.
        numbers: by the metric's name; one that was not measured is absent.
        commands: what a user would type to do the same.
        looks: how good it was on its way, where that was judged.
    """

    arm: str
    seed: int
    folder: Path
    numbers: Mapping[str, float]
    commands: tuple[str, ...]
    looks: tuple[Look, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A study, finished or not.

    Attributes:
        name: of the study.
        question: that it answers.
        reference: the arm that the others are compared with.
        arms: in the order in which they are shown.
        seeds: each arm is trained with each.
        metrics: in the order in which they are shown.
        runs: those that are done.
        facts: the set-up: data, model, length, what is locked, hardware, versions.
        notes: what a reader must know.
        warnings: what makes the numbers doubtful.
        axis: what `Arm.place` is, such as "mask ratio".
    """

    name: str
    question: str
    reference: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    runs: tuple[RunResult, ...]
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    axis: str = "place"

    @property
    def others(self) -> tuple[Arm, ...]:
        """The arms that are compared with the reference."""
        return tuple(arm for arm in self.arms if arm.name != self.reference)

    @property
    def planned(self) -> int:
        """How many runs the finished study has."""
        return len(self.arms) * len(self.seeds)

    def runs_of(self, arm: str) -> list[RunResult]:
        """The arm's runs that are done, by rising seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    def values(self, metric: str, arm: str) -> dict[int, float]:
        """The metric by seed, over the arm's runs that have it; a value that is not finite is left out."""
        measured = {run.seed: run.numbers[metric] for run in self.runs_of(arm) if metric in run.numbers}
        return {seed: float(value) for seed, value in measured.items() if isfinite(value)}

    def broken(self) -> list[tuple[str, int, str]]:
        """Arm, seed and metric's title of each value that is not finite."""
        return [
            (run.arm, run.seed, metric.title)
            for arm in self.arms
            for run in self.runs_of(arm.name)
            for metric in self.metrics
            if not isfinite(run.numbers.get(metric.name, 0.0))
        ]
