"""What a run prints to the terminal: tables before it, progress during it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mae.text import visible

_SECONDS_BETWEEN_LINES = 10.0
_PLAIN: Any = {"highlight": False, "soft_wrap": True, "markup": False}

NO_BASELINE = 1e-9
"""Below this loss of the mean-colour predictor there is nothing left to predict."""


def show_table(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print pairs of name and value. File names are shown as text, whatever they hold."""
    console.print(f"[bold]{escape(title)}[/bold]", highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        # File names need not be valid text; what cannot be printed is shown as a question mark.
        printable = value.encode("utf-8", "replace").decode()
        table.add_row(escape(name), escape(printable))
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
    """A loss compared with that of the mean-colour predictor, in words."""
    if baseline < NO_BASELINE:
        return "nothing to predict: each image is one colour"
    share = 1 - loss / baseline
    return f"{abs(share):.0%} {'below' if share >= 0 else 'above'} mean predictor"


class ProgressDisplay:
    """The progress of a run: a live bar in a terminal, a line now and then in a file.

    Args:
        console: where to print.
        total_steps: steps of the whole run.
        start_step: steps done before it was resumed.
        mean_baseline: reconstruction term of the mean-colour predictor; None if there is none to compare with.
    """

    def __init__(self, console: Console, *, total_steps: int, start_step: int, mean_baseline: float | None) -> None:
        self._console = console
        self._total = total_steps
        self._start_step = start_step
        self._baseline = mean_baseline
        self._began = time.monotonic()
        self._last_printed = -_SECONDS_BETWEEN_LINES
        self._bar: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(bar_width=20), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("starting", total=total_steps, completed=start_step)
            self._bar.start()

    def log(self, row: Mapping[str, Any]) -> None:
        """Show the latest numbers; evaluations and warnings stay on lines of their own."""
        if "warning" in row:
            self._console.print(f"step {row['step']}  warning: {row['warning']['text']}", style="yellow", **_PLAIN)
            return
        if "evaluation" in row:
            numbers = "  ".join(f"{name} {value:.4g}" for name, value in row["evaluation"].items())
            self._console.print(f"step {row['step']}  {numbers}", **_PLAIN)
            if row["step"] == self._start_step:
                self._began = time.monotonic()  # the evaluation before the first step is not part of its pace
            return
        text = self._describe(row)
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"], description=text)
        elif time.monotonic() - self._last_printed >= _SECONDS_BETWEEN_LINES or row["step"] == self._total:
            self._console.print(text, highlight=False, soft_wrap=True)
            self._last_printed = time.monotonic()

    def _describe(self, row: Mapping[str, Any]) -> str:
        done = row["step"] - self._start_step
        left = (time.monotonic() - self._began) / done * (self._total - row["step"])
        terms = row["terms"]
        others = "".join(f"  {name} {value:.4f}" for name, value in terms.items() if len(terms) > 1)
        beside = "" if self._baseline is None else f" ({against(terms['reconstruction'], self._baseline)})"
        return (
            f"step {row['step']}/{self._total}  loss {row['loss']:.4f}{others}{beside}  "
            f"lr {row['lr']:.2e}  {row['images_per_second']:,.0f} images/s  waiting for data {row['data_wait']:.0%}  "
            f"ETA {duration(left)}"
        )

    def close(self) -> None:
        """Stop the live bar."""
        if self._bar is not None:
            self._bar.stop()
