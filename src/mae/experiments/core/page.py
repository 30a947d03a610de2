"""The report of a study: one page, the answer first and then what it rests on, and the same as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mae import records
from mae.experiments.core import trajectories
from mae.experiments.core.metrics import Metric
from mae.experiments.core.results import RunResult, StudyResult
from mae.experiments.core.stats import Difference, SampleSummary, Verdict, caveat, differences, sentence, summarise
from mae.report.figures.canvas import readable
from mae.report.figures.curves import Line, draw_lines, read_line
from mae.report.figures.tradeoff import Panel, Series, draw_tradeoff
from mae.report.html.page import Section, write_page
from mae.training.log import loss_rows, read_rows

_NONE = "–"
_MAX_SENTENCES = 12  # more would be unreadable, and the table below holds them all

Differences = Mapping[tuple[str, str], Difference]


def write_report(result: StudyResult, *, folder: Path, pictures: Sequence[Section] = ()) -> Path:
    """Write `report.html` and, with every number, difference and verdict, `result.json`.

    A study that is not finished is reported as far as it is. Losses are read from `metrics.jsonl` in the folders of
    the runs; a run without that file is left out of their plot.

    Args:
        result: of the study.
        folder: of the study; it is made, and gets `losses.png` and `tradeoff.png` too where there is what they show.
        pictures: sections that show what the models predict.

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
        *trajectories.sections(result, folder),
        *_tradeoff(result, folder / "tradeoff.png"),
        *pictures,
        *_losses(result, folder / "losses.png"),
        *_time(result),
        *_variants(result),
        Section(title="Set-up", header=("part", "value"), rows=result.facts),
        _every_run(result),
        *_commands(result),
    ]
    write_page(
        page,
        title=f"Study: {result.name}",
        facts=[
            ("question", result.question),
            ("variants", ", ".join(variant.name for variant in result.variants)),
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
    return [f"Not finite and left out: {title} of {variant}, seed {seed}." for variant, seed, title in result.broken()]


def answer(result: StudyResult, found: Differences) -> Section:
    """The verdict on each variant: a sentence per metric, or in short where that would be unreadable."""
    compared = [metric for metric in result.metrics if metric.better is not None]
    parts = [f"{_progress(result)}. What follows covers these."] if len(result.runs) < result.planned else []
    for variant in result.others:
        lines = [f"{variant.name} against {result.reference}"]
        if len(compared) * len(result.others) <= _MAX_SENTENCES:
            lines += [
                sentence(metric, found[metric.name, variant.name], variant=variant.name, reference=result.reference)
                for metric in compared
            ]
        else:
            for verdict in get_args(Verdict):
                alike = [metric for metric in compared if found[metric.name, variant.name].verdict == verdict]
                titles = "; ".join(_short(metric, found[metric.name, variant.name]) for metric in alike)
                lines += [f"{verdict.replace(':', ',')}: {titles}"] if titles else []
        parts.append("\n• ".join(lines))
    return Section(title="Answer", text="\n\n".join(parts) or "One variant: nothing is compared.")


def _short(metric: Metric, against: Difference) -> str:
    """The metric's title, and by how much where there is a verdict."""
    if against.mean is None or against.verdict not in ("better", "worse"):
        return metric.title
    return f"{metric.title} ({metric.gap_digits(against.mean, sign=True)} {metric.gap_unit}".rstrip() + ")"


def comparison(result: StudyResult, found: Differences) -> Section:
    """Each metric in each variant, beside the reference."""
    rows = []
    for metric in result.metrics:
        name = "\n".join(filter(None, [_with_unit(metric), metric.better and f"{metric.better} is better"]))
        for variant in result.variants:
            summary = summarise(result.values(metric.name, variant.name).values())
            against = found.get((metric.name, variant.name))
            difference = (_NONE, _NONE, "reference") if against is None else _difference(metric, against)
            rows.append((name, _unbroken(variant.name), _mean(metric, summary), str(summary.count), *difference))
            name = ""
    return Section(
        title="All metrics",
        text=f"Differences are to {result.reference}, paired by seed; those of percentages are in points.",
        header=("metric", "variant", "mean ± std", "seeds", "difference", "95 % interval", "verdict"),
        rows=rows,
        marks={"better": "good", "worse": "bad"},
    )


def _difference(metric: Metric, against: Difference) -> tuple[str, str, str]:
    gap = _NONE if against.mean is None else metric.gap_digits(against.mean, sign=True)
    interval = _NONE
    if against.low is not None and against.high is not None:
        ends = (metric.gap_digits(end, sign=True) for end in (against.low, against.high))
        interval = _unbroken(" to ".join(ends))
    return gap, interval, "identical" if against.identical else against.verdict


def _mean(metric: Metric, summary: SampleSummary) -> str:
    if summary.mean is None:
        return _NONE
    mean = metric.digits(summary.mean)
    return mean if summary.std is None else f"{mean} ± {metric.gap_digits(summary.std)}"


def _with_unit(metric: Metric) -> str:
    return f"{metric.title},\N{NO-BREAK SPACE}{metric.unit}" if metric.unit else metric.title


def _unbroken(text: str) -> str:
    """On one line: tables break short cells before long ones."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _tradeoff(result: StudyResult, path: Path) -> list[Section]:
    """Quality metrics and the first time metric over `axis`, where the variants have an `x`."""
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
    """The metrics over the variants' `x`; None where there is nothing to show."""
    lines = []
    for metric in metrics:
        scale = 100 if metric.kind == "share" else 1
        points = {
            variant.x: [scale * value for value in values]
            for variant in result.variants
            if variant.x is not None and (values := result.values(metric.name, variant.name).values())
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
    """The reconstruction loss of each variant, mean over its seeds."""
    lines = [
        line
        for variant in result.variants
        if (line := _loss_line(variant.name, result.runs_of(variant.name))) is not None
    ]
    if not lines:
        return []
    names = ("samples seen", "reconstruction loss")
    draw_lines(lines, levels={}, names=names, show=readable, path=path, title=f"{result.name}: loss in training")
    text = (
        "Reconstruction term alone, mean over the seeds; shaded: one sample std up and down. Losses are comparable "
        "only where target, loss and masks are the same."
    )
    return [Section(title="Loss in training", text=text, pictures=[path])]


def _loss_line(variant: str, runs: Sequence[RunResult]) -> Line | None:
    """Mean and std over the runs, as far as all of them go; rows need not be at the same samples."""
    curves = []
    for run in runs:
        logged = loss_rows(read_rows(run.folder / "metrics.jsonl"))
        rows = [{"samples": row["samples"], **row.get("terms", {})} for row in logged]
        curve = read_line(rows, x="samples", y="reconstruction", label=variant)
        curves += [curve] if curve is not None else []
    if len(curves) < 2:
        return curves[0] if curves else None
    start, end = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    grid = [x for x in curves[0].x if start <= x <= end]
    if not grid:
        return None
    values = np.array([np.interp(grid, curve.x, curve.y) for curve in curves])  # [runs, samples]
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1)
    line = Line(label=variant, x=grid, y=mean.tolist(), band=((mean - std).tolist(), (mean + std).tolist()))
    return line if np.isfinite(mean).any() else None


def _time(result: StudyResult) -> list[Section]:
    """Times of each variant, and as a ratio to the reference of the same seed."""
    rows = []
    for metric in (metric for metric in result.metrics if metric.kind == "seconds"):
        by_variant = {variant.name: result.values(metric.name, variant.name) for variant in result.variants}
        name = _with_unit(metric)
        for variant, times in by_variant.items():
            rows.append(
                (
                    name,
                    _unbroken(variant),
                    _mean(metric, summarise(times.values())),
                    _ratio(by_variant[result.reference], times),
                )
            )
            name = ""
    text = f"The ratio is to {result.reference} of the same seed, mean ± std: 1.10 is a tenth more."
    header = ("what", "variant", "mean ± std", "ratio")
    return [Section(title="Time", text=text, header=header, rows=rows)] if rows else []


def _ratio(reference: Mapping[int, float], other: Mapping[int, float]) -> str:
    ratios = summarise(other[seed] / reference[seed] for seed in sorted(other) if reference.get(seed))
    if ratios.mean is None:
        return _NONE
    return f"{ratios.mean:.2f}" + ("" if ratios.std is None else f" ± {ratios.std:.2f}")


def _variants(result: StudyResult) -> list[Section]:
    """What each variant is, and the options in which they differ."""
    text = "\n\n".join(f"{variant.name}: {variant.what}" for variant in result.variants)
    missing = object()
    names = dict.fromkeys(name for variant in result.variants for name in variant.options)
    given = {name: [variant.options.get(name, missing) for variant in result.variants] for name in names}
    rows = [
        (name, *("not set" if value is missing else str(value) for value in values))
        for name, values in given.items()
        if any(value != values[0] for value in values[1:])
    ]
    header = ("option", *(variant.name for variant in result.variants)) if rows else ()
    sections = [Section(title="What each variant changes", text=text, header=header, rows=rows)]
    return sections if text else []


def _every_run(result: StudyResult) -> Section:
    """All numbers of all runs."""

    def shown(metric: Metric, run: RunResult) -> str:
        return metric.digits(run.numbers[metric.name]) if metric.name in run.numbers else _NONE

    return Section(
        title="Every run",
        text=_progress(result),
        header=("variant", "seed", *map(_with_unit, result.metrics)),
        rows=[
            (_unbroken(run.variant), str(run.seed), *(shown(metric, run) for metric in result.metrics))
            for variant in result.variants
            for run in result.runs_of(variant.name)
        ],
    )


def _commands(result: StudyResult) -> list[Section]:
    """The commands that repeat each run."""
    lines: list[str] = []
    for variant in result.variants:
        for run in result.runs_of(variant.name):
            lines += ["", f"# {run.variant}, seed {run.seed}", *run.commands] if run.commands else []
    return [Section(title="Commands", commands=lines[1:])] if lines else []


def _as_json(result: StudyResult, found: Differences) -> dict[str, Any]:
    """The study with its means and verdicts; values that are not finite become null, which every JSON reader takes."""
    means = [
        {
            "metric": metric.name,
            "variant": variant.name,
            **asdict(summarise(result.values(metric.name, variant.name).values())),
        }
        for metric in result.metrics
        for variant in result.variants
    ]
    verdicts = [
        {
            "metric": metric.name,
            "variant": variant.name,
            **asdict(found[metric.name, variant.name]),
            "sentence": sentence(
                metric, found[metric.name, variant.name], variant=variant.name, reference=result.reference
            ),
        }
        for metric in result.metrics
        for variant in result.others
    ]
    return _finite({**records.to_json(result), "means": means, "differences": verdicts, "caveat": caveat(result)})


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value
