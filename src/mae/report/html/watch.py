"""The state of a run, live or finished, in the terminal and as a page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mae.errors import UsageError
from mae.meanings import meaning_of
from mae.report.figures.canvas import readable, save_png
from mae.report.figures.curves import Line, lines_figure
from mae.report.figures.learning_curve import learning_figure
from mae.report.html.page import Section, write_page
from mae.report.terminal.console import against, duration
from mae.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR, _SPARKLINE = 40, 40  # characters
_NUM_WARNINGS = 3  # in the terminal; the page has them all
_BLOCKS = "▁▂▃▄▅▆▇█"
_HELD_OUT = ("held_out", "held_out_train")
_ACCURACIES = {"knn": "k-NN", "probe": "quick probe"}
_IN_SECTIONS = ("features", "warnings", "pictures")  # on the page
_FIRST = ("model", "images", "crops")  # what a page must say before all else
_CHANCE = ("chance", "commonest_class")


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The latest numbers of the training.

    Attributes:
        loss: mean over the steps since the previous row.
        terms: its named terms, likewise.
        lr: learning rate of the last step.
        grad_norm: of the gradient before clipping, likewise; None if it overflowed.
        images_per_second: likewise.
        data_wait: share of the time spent waiting for images, in [0, 1].
        seconds: spent training so far.
    """

    loss: float
    terms: Mapping[str, float]
    lr: float
    grad_norm: float | None
    images_per_second: float
    data_wait: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """An online evaluation of the model: numbers by name."""

    step: int
    samples: int
    numbers: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A warning of the run."""

    step: int
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run according to its files.

    Attributes:
        folder: the run's folder.
        status: `live`; `stopped` if it was killed or wrote nothing for long without finishing; or `finished`.
        read_at: when its files were read, in seconds since 1970.
        written_at: when something was last written, likewise.
        step: steps done.
        total_steps: of the whole run.
        seconds_left: estimate from its last rows; None unless it is live and has a pace.
        newest: the latest numbers, or those of a finished run's summary; None before the first.
        loss: the reconstruction term, or that of a training with labels, over samples seen; None before the first.
        loss_name: what it is called.
        baselines: reconstruction terms of trivial predictors, by name; empty if unknown.
        looks: online evaluations, in order.
        warnings: in order.
        panel: the latest picture of reconstructions.
        reference: the loss curve of reference runs of the same recipe.
        reference_note: what they are, and how this run differs.
        facts: the run's set-up, as pairs of name and value.
        ended_by: how and why a run ended before its last step, by its own word; empty if it did not or never said.
        verdict: what the run has reached, in a sentence or two; empty before its first numbers.
        resume: the command that resumes it.
        next_commands: what to do with it once it is finished.
    """

    folder: Path
    status: Literal["live", "stopped", "finished"]
    read_at: float
    written_at: float
    step: int
    total_steps: int
    seconds_left: float | None = None
    newest: Newest | None = None
    loss: Line | None = None
    loss_name: str = "loss"
    baselines: Mapping[str, float]
    looks: Sequence[Look] = ()
    warnings: Sequence[Warned] = ()
    panel: Path | None = None
    reference: Line | None = None
    reference_note: str = ""
    facts: Sequence[tuple[str, str]] = ()
    ended_by: str = ""
    verdict: str = ""
    resume: str = ""
    next_commands: Sequence[str] = ()

    @property
    def reconstruction(self) -> float | None:
        """The latest reconstruction term, to compare with baselines and reference."""
        return None if self.newest is None else self.newest.terms.get("reconstruction")


def terminal_view(state: RunState) -> RenderableType:
    """The state in a few lines: name, bar, numbers. File names are shown as text, whatever they hold."""
    bar = ProgressBar(total=state.total_steps, completed=min(state.step, state.total_steps), width=_BAR)
    table = Table.grid(padding=(0, 1))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    rows = describe(state)
    if state.loss is not None:
        rows.insert(2, ("loss curve", f"{sparkline(state.loss.y)}  {_first_and_last(state.loss.y)}"))
    table.add_row("", bar)
    for name, value in rows:
        table.add_row(Text(name), Text(visible(value)))
    return Group(Text(visible(str(state.folder)), style="bold"), table)


def describe(state: RunState) -> list[tuple[str, str]]:
    """The state as pairs of name and text; the first is the status."""
    rows = [("state", _status(state)), *_numbers(state)]
    if state.baselines:
        named = (f"{_words(name)} {value:.4f}" for name, value in state.baselines.items())
        rows.append(("baselines", ", ".join(named)))
    if state.reference is not None:
        rows.append(("reference", _beside_reference(state, state.reference)))
    rows += _looks(state)
    if state.warnings:
        last = [f"step {warned.step}, {warned.name}: {warned.text}" for warned in state.warnings[-_NUM_WARNINGS:]]
        earlier = len(state.warnings) - len(last)
        rows.append(("warnings", "\n".join([*([f"{earlier} earlier"] if earlier else []), *last])))
    if state.panel is not None:
        rows.append(("pictures", str(state.panel)))
    return rows


def _status(state: RunState) -> str:
    step = f"step {state.step:,} of {state.total_steps:,} ({state.step / state.total_steps:.0%})"
    if state.status == "finished":
        return f"finished, {state.total_steps:,} steps"
    if state.ended_by:
        return f"{state.ended_by}; ended at {step}; go on with: {state.resume}"
    if state.status == "stopped":
        silent, since = duration(state.read_at - state.written_at), _clock(state.written_at)
        return f"stopped at {step}: nothing written for {silent}, since {since}; resume with: {state.resume}"
    left = "" if state.seconds_left is None else f", {duration(state.seconds_left)} left"
    return f"live, {step}{left}"


def _numbers(state: RunState) -> list[tuple[str, str]]:
    newest, mean = state.newest, state.baselines.get("mean_of_visible")
    if newest is None:
        return [("loss", "none yet")]
    beside = "" if mean is None or state.reconstruction is None else f", {against(state.reconstruction, mean)}"
    terms = newest.terms
    if len(terms) > 1:
        listed = ", ".join(
            f"{_words(name)} {value:.4f}{beside if name == 'reconstruction' else ''}" for name, value in terms.items()
        )
        beside = f"; {listed}"
    norm = "" if newest.grad_norm is None else f"; gradient norm {newest.grad_norm:.3g}"
    return [
        ("loss", f"{newest.loss:.4f}{beside}"),
        ("learning rate", f"{newest.lr:.2e}{norm}"),
        ("speed", f"{newest.images_per_second:,.0f} images/s, {newest.data_wait:.0%} of the time waiting for data"),
        ("time", f"{duration(newest.seconds)} of training so far"),
    ]


def _beside_reference(state: RunState, line: Line) -> str:
    import numpy as np

    what = line.label.removeprefix("reference: ")
    at = None if state.loss is None else state.loss.x[-1]
    if at is None or line.band is None or not line.x[0] <= at <= line.x[-1]:
        return f"{what}; no value at this number of samples"
    loss, upper = (float(np.interp(at, line.x, values)) for values in (line.y, line.band[1]))
    return f"{loss:.4f} ± {upper - loss:.4f} at the same number of samples ({what})"


def _looks(state: RunState) -> list[tuple[str, str]]:
    """The latest value of each number of the online evaluations, held-out losses first."""
    rows, series = [], _series(state)
    held_out, train = (series.get(name) for name in _HELD_OUT)
    if held_out is not None:
        beside = "" if train is None else f"; {train[-1]:.4f} on as many training images"
        rows.append(("held out", f"{held_out[-1]:.4f}{beside}"))
    others = [
        f"{meaning.name} {meaning.shown(values[-1])}"
        + (f" {meaning.arrow}" if meaning.arrow else "")
        + (f" (first {meaning.shown(values[0])})" if len(set(values)) > 1 else "")
        for meaning, values in ((meaning_of(name), values) for name, values in series.items() if name not in _HELD_OUT)
    ]
    return [*rows, *([("features", ", ".join(others))] if others else [])]


def _series(state: RunState) -> dict[str, list[float]]:
    """Every number of the online evaluations, its values in order."""
    series: dict[str, list[float]] = {}
    for look in state.looks:
        for name, value in look.numbers.items():
            series.setdefault(name, []).append(value)
    return series


def sparkline(values: Sequence[float], width: int = _SPARKLINE) -> str:
    """A curve as characters of different height; of many values, means of neighbouring ones.

    Non-finite values are left out; a constant is drawn at half height.
    """
    import numpy as np

    finite = np.array([value for value in values if isfinite(value)])
    if not len(finite):
        return ""
    means = np.array([part.mean() for part in np.array_split(finite, min(width, len(finite)))])
    low, span = means.min(), np.ptp(means)
    heights = (means - low) / span if span else np.full(len(means), 0.5)
    return "".join(_BLOCKS[round(height * (len(_BLOCKS) - 1))] for height in heights.tolist())


def _first_and_last(values: Sequence[float]) -> str:
    finite = [value for value in values if isfinite(value)]
    return f"{readable(finite[0])} to {readable(finite[-1])}"


def write_watch_page(state: RunState, path: Path, *, refresh: int | None) -> None:
    """Write the state as one self-contained HTML file.

    Args:
        state: of the run.
        path: the page; its folder is created, an older file is replaced at once.
        refresh: seconds between reloads by the browser; None: never.

    Raises:
        MAEError: a picture cannot be read or the page cannot be written.
    """
    with TemporaryDirectory() as folder:  # the run's own folder is only read
        sections = [*_warnings(state), *_loss(state, Path(folder)), *_features(state, Path(folder)), *_panel(state)]
        setup = Section(title="Set-up", header=("setting", "value"), rows=state.facts)
        again = [Section(title="Resume", commands=[state.resume])] if state.status == "stopped" else []
        reached = [Section(title="What it reached", text=state.verdict)] if state.verdict else []
        write_page(
            path,
            title=f"{_name(state)}: {state.status}",
            facts=[
                *(row for row in state.facts if row[0] in _FIRST),
                *(row for row in describe(state) if row[0] not in _IN_SECTIONS),
                ("read", _clock(state.read_at)),
            ],
            sections=[*reached, *again, *sections, setup, *_next(state)],
            refresh=refresh,
        )


def _warnings(state: RunState) -> list[Section]:
    rows = [(str(warned.step), warned.name, warned.text) for warned in reversed(state.warnings)]
    header = ("step", "warning", "what happened")
    return [Section(title="Warnings, newest first", header=header, rows=rows)] if rows else []


def _loss(state: RunState, folder: Path) -> list[Section]:
    """The reconstruction term and the held-out loss, with baselines and reference."""
    if state.loss is None:
        return []
    path = folder / "loss.png"
    save_png(loss_figure(state), path)
    dashed = "Dashed: trivial predictors." if state.baselines else ""
    return [Section(title="Loss", text=f"{dashed}\n\n{state.reference_note}", pictures=[path])]


def loss_figure(state: RunState) -> "Figure":
    """The loss and the held-out loss over samples, with baselines and reference.

    Raises:
        UsageError: there is no loss yet.
    """
    if state.loss is None:
        raise UsageError(f"{state.folder} has logged no loss yet; wait for the first row of its metrics.jsonl")
    lines = [state.loss]
    for name in _HELD_OUT:
        measured = [(look.samples, look.numbers[name]) for look in state.looks if name in look.numbers]
        if any(isfinite(value) for _, value in measured):
            places, values = zip(*measured, strict=True)
            lines.append(Line(label=_words(name), x=places, y=values))
    return lines_figure(
        lines,
        levels=state.baselines,
        names=("samples seen", state.loss_name),
        show=readable,
        title=f"{_name(state)}: loss",
        reference=state.reference,
    )


def _features(state: RunState, folder: Path) -> list[Section]:
    """Every number of the online evaluations; accuracies drawn."""
    series = _series(state)
    if not series:
        return []
    rows = [
        (
            f"{meaning.name} {meaning.arrow}".strip(),
            meaning.shown(values[0]),
            meaning.shown(values[-1]),
            sparkline(values),
            meaning.normal,
        )
        for meaning, values in ((meaning_of(name), values) for name, values in series.items())
    ]
    drawn = []
    if any(isfinite(value) for name in _ACCURACIES for value in series.get(name, [])):
        drawn = [folder / "accuracy.png"]
        save_png(accuracy_figure(state), drawn[0])
    header = ("number", "first", f"step {state.looks[-1].step:,}", "curve", "what is normal")
    return [Section(title="Online evaluation", header=header, rows=rows, pictures=drawn)]


def accuracy_figure(state: RunState) -> "Figure":
    """Accuracies of the online evaluations over samples, with what needs no training.

    Raises:
        UsageError: none was measured.
    """
    series = _series(state)
    if not any(name in series for name in _ACCURACIES):
        raise UsageError(
            f"{state.folder} has measured no accuracy; train with labelled images to look at: monitor=LABELLED"
        )
    measured: list[dict[str, Any]] = [{"samples": look.samples, **look.numbers} for look in state.looks]
    levels = {name: series[name][-1] for name in _CHANCE if name in series}
    title = f"{_name(state)}: features on labelled data"
    return learning_figure(measured, series=_ACCURACIES, levels=levels, x="samples", title=title)


def _next(state: RunState) -> list[Section]:
    """What to do with a finished run."""
    if state.status != "finished" or not state.next_commands:
        return []
    text = "Put your own folders in place of the capitals."
    return [Section(title="Next", text=text, commands=state.next_commands)]


def _panel(state: RunState) -> list[Section]:
    return [] if state.panel is None else [Section(title="Latest reconstructions", pictures=[state.panel])]


def _name(state: RunState) -> str:
    return state.folder.resolve().name  # `mae watch .` has a name too


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _words(name: str) -> str:
    return name.replace("_", " ")
