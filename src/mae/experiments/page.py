"""The report of a study: one page that answers first and then shows what the answer rests on, and the same as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mae import records
from mae.experiments import course
from mae.experiments.results import Metric, RunResult, StudyResult
from mae.experiments.verdict import Difference, Spread, Verdict, caveat, differences, sentence, summarise
from mae.report.canvas import readable
from mae.report.curves import Line, draw_lines, read_line
from mae.report.page import Section, write_page
from mae.report.tradeoff import Panel, Series, draw_tradeoff
from mae.training.log import loss_rows, read_rows

_NONE = "–"
_MAX_SENTENCES = 12  # more of them are a wall, and the table below holds them all

Differences = Mapping[tuple[str, str], Difference]


def write_report(result: StudyResult, *, folder: Path, pictures: Mapping[str, Sequence[Path]] | None = None) -> Path:
    """Write `report.html` and, with every number, difference and verdict, `result.json`.

    A study that is not finished is reported as far as it is. Losses are read from `metrics.jsonl` in the folders of
    the runs; a run without that file is left out of their plot.

    Args:
        result: what was found.
        folder: of the study; it is made, and gets `losses.png` and `tradeoff.png` too where there is what they show.
        pictures: PNG files under the heading they are shown with.

    Returns:
        The page.

    Raises:
        MAEError: a picture cannot be read, or a file cannot be written.
    """
    found = differences(result)
    page = folder / "report.html"
    sections = [
        answer(result, found),
        comparison(result, found),
        Section(
            title="How to read this",
            text="\n\n".join([*result.warnings, caveat(result), *_left_out(result), *result.notes]),
        ),
        *course.sections(result, folder),
        *_tradeoff(result, folder / "tradeoff.png"),
        *(Section(title=title, pictures=paths) for title, paths in (pictures or {}).items()),
        *_losses(result, folder / "losses.png"),
        *_time(result),
        *_arms(result),
        Section(title="Set-up", header=("part", "value"), rows=result.facts),
        _every_run(result),
        *_commands(result),
    ]
    write_page(
        page,
        title=f"Study: {result.name}",
        facts=[
            ("question", result.question),
            ("arms", ", ".join(arm.name for arm in result.arms)),
            ("seeds", ", ".join(map(str, result.seeds))),
            ("runs", _progress(result)),
        ],
        sections=sections,
    )
    records.write_json(folder / "result.json", _as_json(result, found))
    return page


def _progress(result: StudyResult) -> str:
    done = f"{len(result.runs)} of {result.planned} runs done"
    return done if len(result.runs) >= result.planned else f"{done}: the study is not finished"


def _left_out(result: StudyResult) -> list[str]:
    return [f"Not finite and left out: {title} of {arm}, seed {seed}." for arm, seed, title in result.broken()]


def answer(result: StudyResult, found: Differences) -> Section:
    """The verdict on each arm: a sentence a metric, or in short where that would be a wall."""
    judged = [metric for metric in result.metrics if metric.better is not None]
    parts = [f"{_progress(result)}. What follows is of those."] if len(result.runs) < result.planned else []
    for arm in result.others:
        lines = [f"{arm.name} against {result.reference}"]
        if len(judged) * len(result.others) <= _MAX_SENTENCES:
            lines += [
                sentence(metric, found[metric.name, arm.name], arm=arm.name, reference=result.reference)
                for metric in judged
            ]
        else:
            for verdict in get_args(Verdict):
                alike = [metric for metric in judged if found[metric.name, arm.name].verdict == verdict]
                titles = "; ".join(_short(metric, found[metric.name, arm.name]) for metric in alike)
                lines += [f"{verdict.replace(':', ',')}: {titles}"] if titles else []
        parts.append("\n• ".join(lines))
    return Section(title="Answer", text="\n\n".join(parts) or "One arm: nothing is compared.")


def _short(metric: Metric, against: Difference) -> str:
    """The metric's title, and by how much where there is a verdict."""
    if against.mean is None or against.verdict not in ("better", "worse"):
        return metric.title
    return f"{metric.title} ({metric.gap_digits(against.mean, sign=True)} {metric.gap_unit}".rstrip() + ")"


def comparison(result: StudyResult, found: Differences) -> Section:
    """Each metric in each arm, beside the reference."""
    rows = []
    for metric in result.metrics:
        names = [_with_unit(metric), "" if metric.better is None else f"{metric.better} is better"]
        for number, arm in enumerate(result.arms):
            spread = summarise(result.values(metric.name, arm.name).values())
            against = found.get((metric.name, arm.name))
            judgement = (_NONE, _NONE, "reference") if against is None else _judgement(metric, against)
            name = names[number] if number < len(names) else ""
            rows.append((name, _unbroken(arm.name), _mean(metric, spread), str(spread.count), *judgement))
    return Section(
        title="All metrics",
        text=f"Differences are to {result.reference}, paired by seed; those of percentages are in points.",
        header=("metric", "arm", "mean ± deviation", "seeds", "difference", "95 % interval", "verdict"),
        rows=rows,
        marks={"better": "good", "worse": "bad"},
    )


def _judgement(metric: Metric, against: Difference) -> tuple[str, str, str]:
    gap = _NONE if against.mean is None else metric.gap_digits(against.mean, sign=True)
    interval = _NONE
    if against.low is not None and against.high is not None:
        ends = (metric.gap_digits(end, sign=True) for end in (against.low, against.high))
        interval = _unbroken(" to ".join(ends))
    return gap, interval, "identical" if against.identical else against.verdict


def _mean(metric: Metric, spread: Spread) -> str:
    if spread.mean is None:
        return _NONE
    mean = metric.digits(spread.mean)
    return mean if spread.deviation is None else f"{mean} ± {metric.gap_digits(spread.deviation)}"


def _with_unit(metric: Metric) -> str:
    return f"{metric.title},\N{NO-BREAK SPACE}{metric.unit}" if metric.unit else metric.title


def _unbroken(text: str) -> str:
    """In one line: a table would rather break a short text than a long one."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _tradeoff(result: StudyResult, path: Path) -> list[Section]:
    """Qualities over time, where the arms have places; of the times the first one."""
    quality = [metric for metric in result.metrics if metric.better is not None]
    times = [metric for metric in result.metrics if metric.kind == "seconds"]
    panels = [
        _panel(result, [metric for metric in quality if metric.kind == "share"], "share, %"),
        _panel(result, [metric for metric in quality if metric.kind == "decibel"], "dB"),
        _panel(result, times[:1], "seconds"),
    ]
    drawn = [panel for panel in panels if panel is not None]
    if not drawn:
        return []
    draw_tradeoff(drawn, axis=result.axis, title=f"{result.name}: quality and speed over {result.axis}", path=path)
    return [Section(title=f"Quality and speed over {result.axis}", pictures=[path])]


def _panel(result: StudyResult, metrics: Sequence[Metric], name: str) -> Panel | None:
    """The metrics over the arms' places; None where there is nothing to show."""
    lines = []
    for metric in metrics:
        scale = 100 if metric.kind == "share" else 1
        points = {
            arm.place: [scale * value for value in values]
            for arm in result.arms
            if arm.place is not None and (values := result.values(metric.name, arm.name).values())
        }
        if points:
            lines.append(Series(label=metric.title, points=points))
    if not lines:
        return None
    unit, digits = f" {metrics[0].unit}", 2 if metrics[0].kind == "decibel" else 1
    return Panel(
        name=name, series=lines, show=lambda value: f"{value:.{digits}f}{unit}", from_zero=metrics[0].kind == "seconds"
    )


def _losses(result: StudyResult, path: Path) -> list[Section]:
    """The reconstruction loss of each arm, mean over its seeds."""
    lines = [line for arm in result.arms if (line := _loss_line(arm.name, result.runs_of(arm.name))) is not None]
    if not lines:
        return []
    names = ("samples seen", "reconstruction loss")
    draw_lines(lines, levels={}, names=names, show=readable, path=path, title=f"{result.name}: loss in training")
    text = (
        "Reconstruction term alone, mean over the seeds; shaded: one sample deviation up and down. Losses tell arms "
        "apart only where target, loss and masks are the same."
    )
    return [Section(title="Loss in training", text=text, pictures=[path])]


def _loss_line(arm: str, runs: Sequence[RunResult]) -> Line | None:
    """Mean and deviation over the runs, as far as all of them go; rows need not stand at the same samples."""
    curves = []
    for run in runs:
        logged = loss_rows(read_rows(run.folder / "metrics.jsonl"))
        rows = [{"samples": row["samples"], **row.get("terms", {})} for row in logged]
        curve = read_line(rows, x="samples", y="reconstruction", label=arm)
        curves += [curve] if curve is not None else []
    if len(curves) < 2:
        return curves[0] if curves else None
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    grid = [place for place in curves[0].x if start <= place <= end]
    if not grid:
        return None
    values = np.array([np.interp(grid, curve.x, curve.y) for curve in curves])  # [runs, places]
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1)
    line = Line(label=arm, x=grid, y=mean.tolist(), band=((mean - deviation).tolist(), (mean + deviation).tolist()))
    return line if np.isfinite(mean).any() else None


def _time(result: StudyResult) -> list[Section]:
    """Times of each arm, and as a ratio to the reference of the same seed."""
    rows = []
    for metric in (metric for metric in result.metrics if metric.kind == "seconds"):
        by_arm = {arm.name: result.values(metric.name, arm.name) for arm in result.arms}
        name = _with_unit(metric)
        for arm, times in by_arm.items():
            rows.append(
                (
                    name,
                    _unbroken(arm),
                    _mean(metric, summarise(times.values())),
                    _ratio(by_arm[result.reference], times),
                )
            )
            name = ""
    text = f"The ratio is to {result.reference} of the same seed, mean ± deviation: 1.10 is a tenth more."
    header = ("what", "arm", "mean ± deviation", "ratio")
    return [Section(title="Time", text=text, header=header, rows=rows)] if rows else []


def _ratio(reference: Mapping[int, float], other: Mapping[int, float]) -> str:
    ratios = summarise(other[seed] / reference[seed] for seed in sorted(other) if reference.get(seed))
    if ratios.mean is None:
        return _NONE
    return f"{ratios.mean:.2f}" + ("" if ratios.deviation is None else f" ± {ratios.deviation:.2f}")


def _arms(result: StudyResult) -> list[Section]:
    """What each arm is, and the options in which they differ."""
    text = "\n\n".join(f"{arm.name}: {arm.what}" for arm in result.arms)
    missing = object()
    names = dict.fromkeys(name for arm in result.arms for name in arm.options)
    given = {name: [arm.options.get(name, missing) for arm in result.arms] for name in names}
    rows = [
        (name, *("not set" if value is missing else str(value) for value in values))
        for name, values in given.items()
        if any(value != values[0] for value in values[1:])
    ]
    header = ("option", *(arm.name for arm in result.arms)) if rows else ()
    sections = [Section(title="What each arm changes", text=text, header=header, rows=rows)]
    return sections if text else []


def _every_run(result: StudyResult) -> Section:
    """All numbers of all runs."""

    def shown(metric: Metric, run: RunResult) -> str:
        return metric.digits(run.numbers[metric.name]) if metric.name in run.numbers else _NONE

    return Section(
        title="Every run",
        text=_progress(result),
        header=("arm", "seed", *map(_with_unit, result.metrics)),
        rows=[
            (_unbroken(run.arm), str(run.seed), *(shown(metric, run) for metric in result.metrics))
            for arm in result.arms
            for run in result.runs_of(arm.name)
        ],
    )


def _commands(result: StudyResult) -> list[Section]:
    """What a user would type, run by run."""
    lines: list[str] = []
    for arm in result.arms:
        for run in result.runs_of(arm.name):
            lines += ["", f"# {run.arm}, seed {run.seed}", *run.commands] if run.commands else []
    return [Section(title="To do the same", commands=lines[1:])] if lines else []


def _as_json(result: StudyResult, found: Differences) -> dict[str, Any]:
    """The study with its means and verdicts; what is not finite becomes null, which every reader of JSON takes."""
    means = [
        {"metric": metric.name, "arm": arm.name, **asdict(summarise(result.values(metric.name, arm.name).values()))}
        for metric in result.metrics
        for arm in result.arms
    ]
    compared = [
        {
            "metric": metric.name,
            "arm": arm.name,
            **asdict(found[metric.name, arm.name]),
            "sentence": sentence(metric, found[metric.name, arm.name], arm=arm.name, reference=result.reference),
        }
        for metric in result.metrics
        for arm in result.others
    ]
    return _finite({**records.to_json(result), "means": means, "differences": compared, "caveat": caveat(result)})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value
