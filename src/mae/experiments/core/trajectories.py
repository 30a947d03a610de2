"""Accuracy of a study's variants over time and over arithmetic, and when each reaches the reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mae.experiments.core.metrics import KNN, LINEAR_PROBE, Metric
from mae.experiments.core.results import CheckpointMetrics, RunResult, StudyResult
from mae.report.figures.curves import Line, draw_lines
from mae.report.html.page import Section
from mae.report.terminal.console import duration

_PETA = 1e15
_METRICS = (LINEAR_PROBE, KNN)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """A metric of a variant's checkpoints, mean over its seeds.

    Attributes:
        variant: its name.
        seconds: of training before each checkpoint.
        operations: floating-point operations before each checkpoint.
        mean: of the metric.
        std: sample standard deviation over the seeds; 0 for one seed.
        seeds: how many.
    """

    variant: str
    seconds: list[float]
    operations: list[float]
    mean: list[float]
    std: list[float]
    seeds: int


def trajectory(variant: str, runs: Sequence[RunResult], metric: str) -> Trajectory | None:
    """A metric of the variant's checkpoints, which all its runs have at the same steps; None where there are none."""
    by_run: list[tuple[CheckpointMetrics, ...]] = [run.checkpoints for run in runs if run.checkpoints]
    if not by_run or any(metric not in each.numbers for checkpoints in by_run for each in checkpoints):
        return None
    values = np.array(
        [[each.numbers[metric] for each in checkpoints] for checkpoints in by_run]
    )  # [seeds, checkpoints]
    return Trajectory(
        variant=variant,
        seconds=np.mean([[each.seconds for each in checkpoints] for checkpoints in by_run], axis=0).tolist(),
        operations=np.mean([[each.operations for each in checkpoints] for checkpoints in by_run], axis=0).tolist(),
        mean=values.mean(axis=0).tolist(),
        std=(values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])).tolist(),
        seeds=len(values),
    )


def cost_to_reach(goal: float, cost: Sequence[float], reached: Sequence[float]) -> float | None:
    """The cost at which a goal is reached, interpolated linearly between checkpoints; None where it never is.

    Args:
        goal: a value to reach or exceed.
        cost: of each checkpoint, rising.
        reached: the value at each checkpoint.
    """
    for number, value in enumerate(reached):
        if value >= goal:
            if number == 0:
                return cost[0]
            before = reached[number - 1]
            return float(np.interp(goal, [before, value], [cost[number - 1], cost[number]]))
    return None


def sections(result: StudyResult, folder: Path) -> list[Section]:
    """Plots, a table, and when each variant reaches the reference's final value; nothing without checkpoints."""
    found: list[Section] = []
    for metric in _METRICS:
        measured = [
            each
            for variant in result.variants
            if (each := trajectory(variant.name, result.runs_of(variant.name), metric.name))
        ]
        if measured:
            text = "\n\n".join(_speed_ups(result.reference, measured, metric))
            found.append(
                Section(
                    title=f"Over training: {metric.title}",
                    text=text,
                    header=("variant", "minutes", "petaflop", f"{metric.title}, {metric.unit}", "seeds"),
                    rows=[row for each in measured for row in _rows(each, metric)],
                    pictures=_plots(measured, metric, folder),
                )
            )
    return found


def _speed_ups(reference: str, trajectories: Sequence[Trajectory], metric: Metric) -> list[str]:
    """A sentence per variant: when it is as good as the reference at its end."""
    known = next((each for each in trajectories if each.variant == reference), None)
    if known is None:
        return []
    goal, sentences = known.mean[-1], []
    for each in trajectories:
        if each.variant == reference:
            continue
        seconds = cost_to_reach(goal, each.seconds, each.mean)
        operations = cost_to_reach(goal, each.operations, each.mean)
        target = f"{metric.digits(goal)} {metric.unit}, which {reference} has after {duration(known.seconds[-1])}"
        if seconds is None or operations is None:
            sentences.append(f"{each.variant} does not reach {target}; it ends at {metric.digits(each.mean[-1])}.")
        else:
            sentences.append(
                f"{each.variant} reaches {target}, in {duration(seconds)}: {seconds / known.seconds[-1]:.0%} of the "
                f"time and {operations / known.operations[-1]:.0%} of the arithmetic."
            )
    return sentences


def _rows(trajectory: Trajectory, metric: Metric) -> list[tuple[str, ...]]:
    return [
        (
            trajectory.variant if number == 0 else "",
            f"{trajectory.seconds[number] / 60:.1f}",
            f"{trajectory.operations[number] / _PETA:.3g}",
            metric.digits(mean) + (f" ± {metric.gap_digits(trajectory.std[number])}" if trajectory.seeds > 1 else ""),
            str(trajectory.seeds),
        )
        for number, mean in enumerate(trajectory.mean)
    ]


def _plots(trajectories: Sequence[Trajectory], metric: Metric, folder: Path) -> list[Path]:
    """Over minutes and over arithmetic."""
    drawn = []
    for name, axis in (
        ("time", "minutes of training"),
        ("arithmetic", "10\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT FIVE} floating-point operations"),
    ):
        lines = []
        for each in trajectories:
            x = [value / 60 for value in each.seconds] if name == "time" else [v / _PETA for v in each.operations]
            low = [100 * (mean - std) for mean, std in zip(each.mean, each.std, strict=True)]
            high = [100 * (mean + std) for mean, std in zip(each.mean, each.std, strict=True)]
            lines.append(Line(label=each.variant, x=x, y=[100 * value for value in each.mean], band=(low, high)))
        drawn.append(folder / f"{metric.name}-{name}.png")
        draw_lines(
            lines,
            levels={},
            names=(axis, f"{metric.title}, %"),
            show=lambda value: f"{value:.1f} %",
            path=drawn[-1],
            title=f"{metric.title} over {name}",
            from_zero=False,
        )
    return drawn
