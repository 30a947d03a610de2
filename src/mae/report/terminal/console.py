"""What a run prints to the terminal: tables before it, progress during it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mae.meanings import meaning_of
from mae.text import visible

_SECONDS_BETWEEN_LINES = 10.0
_LEAST_BAR, _MOST_BAR = 10, 40
_NARROW = 80
"""Columns below which the numbers need the room of the bar."""
_PLAIN: Any = {"highlight": False, "soft_wrap": True, "markup": False}

NO_BASELINE = 1e-9
"""Below this loss of the mean predictor there is nothing left to predict."""
NOTHING_TO_PREDICT = "the target is the same everywhere, as that of images of one colour"
"""Why a baseline is below that, whatever the target is."""


def show_table(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print pairs of name and value. File names are shown as text, whatever they hold."""
    console.print(Text(visible(title), style="bold"))
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(visible(value)))
    console.print(table)


def side_console() -> Console:
    """Where the work of a command is told whose result is what it prints: a terminal alone."""
    console = Console(stderr=True)
    console.quiet = not console.is_terminal
    return console


@contextmanager
def stage(console: Console, text: str) -> Iterator[None]:
    """Say what is being done: in a terminal with a sign of life until it is done, in a file by a line at once."""
    if console.is_terminal:
        with console.status(escape(visible(text))):
            yield
    else:
        console.print(visible(text), style="bright_black", **_PLAIN)
        yield


def duration(seconds: float) -> str:
    """Seconds in readable units: `48 s`, `3 min 05 s`, `2 h 10 min`, `3 d 4 h`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 86400:
        return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"
    return f"{seconds // 86400} d {seconds % 86400 // 3600} h"


def against(loss: float, baseline: float) -> str:
    """A loss compared with that of the mean predictor, in words."""
    if baseline < NO_BASELINE:
        return f"nothing to predict: {NOTHING_TO_PREDICT}"
    share = 1 - loss / baseline
    return f"{abs(share):.0%} {'below' if share >= 0 else 'above'} mean predictor"


def fitting(fields: Sequence[str], width: int) -> str:
    """As many fields, the most important first, as fit in so many columns; the first one always."""
    text, *others = fields
    for field in others:
        if len(text) + 2 + len(field) > width:
            break
        text += f"  {field}"
    return text


class ProgressDisplay:
    """The progress of a run: a live bar in a terminal, a line now and then in a file.

    Args:
        console: where to print.
        total_steps: steps of the whole run.
        start_step: steps done before it was resumed.
        mean_baseline: reconstruction term of the mean predictor; None if there is none to compare with.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int, mean_baseline: float | None) -> None:
        self._console = console
        self._total = total_steps
        self._start_step = start_step
        self._baseline = mean_baseline
        self._began = time.monotonic()
        self._last_printed = -_SECONDS_BETWEEN_LINES
        self._step, self._fields = start_step, [f"{start_step}/{total_steps}", "starting"]
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(console=console, get_renderable=self._line)
            self._live.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Show the latest numbers; evaluations and warnings stay on lines of their own."""
        if "warning" in row:
            self._console.print(f"step {row['step']}  warning: {row['warning']['text']}", style="yellow", **_PLAIN)
            return
        if "evaluation" in row:
            numbers = "  ".join(self._number(name, value) for name, value in row["evaluation"].items())
            self._console.print(f"step {row['step']}  {numbers}", **_PLAIN)
            if row["step"] == self._start_step:
                self._began = time.monotonic()  # the evaluation before the first step is not part of its pace
            return
        if self._live is not None:
            self._step, self._fields = row["step"], self._by_importance(row)
        elif time.monotonic() - self._last_printed >= _SECONDS_BETWEEN_LINES or row["step"] == self._total:
            self._console.print(self._describe(row), highlight=False, soft_wrap=True)
            self._last_printed = time.monotonic()

    def _number(self, name: str, value: float) -> str:
        """A number of an evaluation, by a name in words and with an arrow to where it is better."""
        meaning = meaning_of(name)
        arrow = meaning.arrow
        if arrow and not self._console.encoding.startswith("utf"):
            arrow = f"({meaning.better} is better)"
        return f"{meaning.name} {meaning.shown(value)}{arrow and ' '}{arrow}"

    def _line(self) -> RenderableType:
        """The live line, for the terminal's width as it is now."""
        width = self._console.width
        if width < _NARROW:
            return Text(fitting(self._fields, width), no_wrap=True, overflow="ellipsis")
        text = fitting(self._fields, width - _LEAST_BAR - 1)
        bar = ProgressBar(total=self._total, completed=self._step, width=min(_MOST_BAR, width - len(text) - 1))
        line = Table.grid(padding=(0, 1))
        line.add_row(bar, Text(text, no_wrap=True, overflow="ellipsis"))
        return line

    def _by_importance(self, row: Mapping[str, Any]) -> list[str]:
        """The parts of the live line; where it is narrow the last ones are left out."""
        beside, terms = "", row["terms"]
        if self._baseline is not None and self._baseline >= NO_BASELINE:
            beside = f" ({against(terms['reconstruction'], self._baseline).removesuffix(' predictor')})"
        return [
            f"{row['step']}/{self._total}",
            f"loss {row['loss']:.4f}{beside}",
            f"ETA {duration(self._left(row))}",
            f"{row['images_per_second']:,.0f} img/s",
            f"lr {row['lr']:.2e}",
            f"waiting for data {row['data_wait']:.0%}",
            *(f"{name} {value:.4f}" for name, value in terms.items() if len(terms) > 1),
        ]

    def _left(self, row: Mapping[str, Any]) -> float:
        done = row["step"] - self._start_step
        return (time.monotonic() - self._began) / done * (self._total - row["step"])

    def _describe(self, row: Mapping[str, Any]) -> str:
        terms = row["terms"]
        losses = {"loss": row["loss"], **(terms if len(terms) > 1 else {})}
        told = {name: f"{name} {value:.4f}" for name, value in losses.items()}
        if self._baseline is not None:
            compared = "reconstruction" if len(terms) > 1 else "loss"
            told[compared] += f" ({against(terms['reconstruction'], self._baseline)})"
        return (
            f"step {row['step']}/{self._total}  {'  '.join(told.values())}  "
            f"lr {row['lr']:.2e}  {row['images_per_second']:,.0f} images/s  waiting for data {row['data_wait']:.0%}  "
            f"ETA {duration(self._left(row))}"
        )

    def close(self) -> None:
        """Stop the live bar."""
        if self._live is not None:
            self._live.stop()
