"""A study's runs on their way: accuracy against time and against arithmetic, and how soon each arm is how good."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mae.experiments.looks import Look
from mae.experiments.plan import KNN, LINEAR_PROBE
from mae.experiments.results import Metric, RunResult, StudyResult
from mae.report.console import duration
from mae.report.curves import Line, draw_lines
from mae.report.page import Section

_PETA = 1e15
_METRICS = (LINEAR_PROBE, KNN)


@dataclass(frozen=True, kw_only=True)
class Course:
    """An arm on its way, mean over its seeds look by look.

    Attributes:
        arm: its name.
        seconds: of training before each look.
        operations: floating-point operations before each look.
        mean: what was measured.
        deviation: sample deviation over the seeds; 0 for one seed.
        seeds: how many.
    """

    arm: str
    seconds: list[float]
    operations: list[float]
    mean: list[float]
    deviation: list[float]
    seeds: int


def course_of(arm: str, runs: Sequence[RunResult], metric: str) -> Course | None:
    """The arm's course by its runs' looks; None where none was taken. All runs of an arm are looked at alike."""
    looked: list[tuple[Look, ...]] = [run.looks for run in runs if run.looks]
    if not looked or any(metric not in look.numbers for looks in looked for look in looks):
        return None
    values = np.array([[look.numbers[metric] for look in looks] for looks in looked])  # [seeds, looks]
    return Course(
        arm=arm,
        seconds=np.mean([[look.seconds for look in looks] for looks in looked], axis=0).tolist(),
        operations=np.mean([[look.operations for look in looks] for looks in looked], axis=0).tolist(),
        mean=values.mean(axis=0).tolist(),
        deviation=(values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])).tolist(),
        seeds=len(values),
    )


def cost_to_reach(goal: float, cost: Sequence[float], reached: Sequence[float]) -> float | None:
    """What it costs until a goal is reached, on a straight line between two looks; None where it never is.

    Args:
        goal: a value to reach or better.
        cost: rising, one a look.
        reached: the value at each look.
    """
    for number, value in enumerate(reached):
        if value >= goal:
            if number == 0:
                return cost[0]
            before = reached[number - 1]
            return float(np.interp(goal, [before, value], [cost[number - 1], cost[number]]))
    return None


def sections(result: StudyResult, folder: Path) -> list[Section]:
    """Pictures, every look, and when each arm is as good as the reference is at its end; nothing where none looked."""
    found: list[Section] = []
    for metric in _METRICS:
        courses = [
            course for arm in result.arms if (course := course_of(arm.name, result.runs_of(arm.name), metric.name))
        ]
        if courses:
            text = "\n\n".join(_sooner(result.reference, courses, metric))
            found.append(
                Section(
                    title=f"On the way: {metric.title}",
                    text=text,
                    header=("arm", "minutes", "petaflop", f"{metric.title}, {metric.unit}", "seeds"),
                    rows=[row for course in courses for row in _rows(course, metric)],
                    pictures=_drawn(courses, metric, folder),
                )
            )
    return found


def _sooner(reference: str, courses: Sequence[Course], metric: Metric) -> list[str]:
    """A sentence an arm: when it is as good as the reference at its end."""
    known = next((course for course in courses if course.arm == reference), None)
    if known is None:
        return []
    goal, told = known.mean[-1], []
    for course in courses:
        if course.arm == reference:
            continue
        seconds = cost_to_reach(goal, course.seconds, course.mean)
        operations = cost_to_reach(goal, course.operations, course.mean)
        whole = f"{metric.digits(goal)} {metric.unit}, which {reference} has after {duration(known.seconds[-1])}"
        if seconds is None or operations is None:
            told.append(f"{course.arm} does not reach {whole}; it ends at {metric.digits(course.mean[-1])}.")
        else:
            told.append(
                f"{course.arm} reaches {whole}, in {duration(seconds)}: {seconds / known.seconds[-1]:.0%} of the time "
                f"and {operations / known.operations[-1]:.0%} of the arithmetic."
            )
    return told


def _rows(course: Course, metric: Metric) -> list[tuple[str, ...]]:
    return [
        (
            course.arm if number == 0 else "",
            f"{course.seconds[number] / 60:.1f}",
            f"{course.operations[number] / _PETA:.3g}",
            metric.digits(mean) + (f" ± {metric.gap_digits(course.deviation[number])}" if course.seeds > 1 else ""),
            str(course.seeds),
        )
        for number, mean in enumerate(course.mean)
    ]


def _drawn(courses: Sequence[Course], metric: Metric, folder: Path) -> list[Path]:
    """Against minutes and against arithmetic."""
    drawn = []
    for name, axis in (
        ("time", "minutes of training"),
        ("arithmetic", "10\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT FIVE} floating-point operations"),
    ):
        lines = []
        for course in courses:
            x = [value / 60 for value in course.seconds] if name == "time" else [v / _PETA for v in course.operations]
            low = [100 * (mean - spread) for mean, spread in zip(course.mean, course.deviation, strict=True)]
            high = [100 * (mean + spread) for mean, spread in zip(course.mean, course.deviation, strict=True)]
            lines.append(Line(label=course.arm, x=x, y=[100 * value for value in course.mean], band=(low, high)))
        drawn.append(folder / f"{metric.name}-{name}.png")
        draw_lines(
            lines,
            levels={},
            names=(axis, f"{metric.title}, %"),
            show=lambda value: f"{value:.1f} %",
            path=drawn[-1],
            title=f"{metric.title} against {name}",
            from_zero=False,
        )
    return drawn
