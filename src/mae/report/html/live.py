"""A run as a notebook shows it: numbers and curve, the newest picture below, and what was printed, to be unfolded."""

import io
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console

from mae import fragments
from mae.errors import MAEError, UsageError
from mae.report.html.watch import RunState, describe
from mae.text import visible

_COLUMNS = 110  # of what is printed
_PRINTED = 20_000  # characters of it that are kept on show
_LEAST_SECONDS = 1.0  # between two updates
_SHARE = 20
"""So many times what an update takes passes until the next one: a long run does not wait for its display."""
_SIDE, _QUALITY = (800, 1300), 75  # pixels at the most, and quality as JPEG, of a picture


def in_notebook() -> bool:
    """Whether a notebook's kernel runs this; nothing is imported to find out."""
    loaded = sys.modules.get("IPython")
    shell = None if loaded is None else loaded.get_ipython()
    return getattr(shell, "kernel", None) is not None  # a terminal's shell has none


def run_html(state: RunState) -> str:
    """The state of a run: how far it is, its loss as a curve, its numbers."""
    share = min(1.0, state.step / state.total_steps)
    bar = (
        f'<progress value="{share:.4f}" max="1" style="width:480px" aria-label="{share:.0%} of the steps"></progress>'
        f" {state.step:,} / {state.total_steps:,}"
    )
    curve = ""
    if state.loss is not None:
        label = f"{state.loss_name} over samples seen, now {state.loss.last:.4f}"
        curve = fragments.curve(state.loss.x, state.loss.y, levels=state.baselines, label=label)
    return f"<div>{bar}</div><div>{curve}</div>{fragments.table(str(state.folder), describe(state))}"


def picture_html(path: Path, *, label: str) -> str:
    """A PNG inside the page, small enough to stay in a notebook's file; empty where it cannot be read."""
    from PIL import Image, UnidentifiedImageError  # here: only where a picture is shown

    content = io.BytesIO()
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
            small.thumbnail(_SIDE)
            small.save(content, "JPEG", quality=_QUALITY)
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError):
        return ""
    coded = b64encode(content.getvalue()).decode("ascii")
    return f'<img alt="{fragments.text(label)}" style="max-width:100%" src="data:image/jpeg;base64,{coded}">'


class NotebookView:
    """Outputs of a notebook's cell, updated in place: numbers and text, below them the newest picture of the run.

    It keeps the contract of a `mae.Callback`: rows make it look at the run again, at a modest rate.

    Attributes:
        printed: what was printed so far.
    """

    def __init__(self) -> None:
        self.printed = io.StringIO()
        self._read: Callable[[], RunState] | None = None
        self._outputs: dict[str, Any] = {}
        self._panel: Path | None = None
        self._due = 0.0

    def follow(self, read: Callable[[], RunState]) -> "NotebookView":
        """Show a run from here on, whose state `read` gives."""
        self._read = read
        return self

    def log(self, row: Mapping[str, Any]) -> None:
        """Something has happened in the run."""
        self.refresh()

    def close(self) -> None:
        """Show what there is now."""
        self.refresh(now=True)

    def refresh(self, *, now: bool = False) -> None:
        """Show the run's state again if it is time to; at once where `now` is set, or where there is no run yet."""
        began = time.monotonic()
        if began < self._due and not now and self._read is not None:
            return
        state = self._state()
        self._show("numbers", ("" if state is None else run_html(state)) + self._text(unfolded=state is None))
        if state is not None and state.panel not in (None, self._panel):
            self._panel = state.panel
            assert self._panel is not None
            self._show("picture", picture_html(self._panel, label=f"Reconstructions of the model, {self._panel.name}"))
        took = time.monotonic() - began
        self._due = began + max(_LEAST_SECONDS, _SHARE * took)

    def _state(self) -> RunState | None:
        """The run as its files tell; None where there is none or they cannot be read: a run outlives its display."""
        try:
            return None if self._read is None else self._read()
        except (MAEError, UsageError, OSError):
            return None

    def _text(self, *, unfolded: bool) -> str:
        printed = escape(visible(self.printed.getvalue()[-_PRINTED:]).strip())
        if not printed:
            return ""
        is_open = " open" if unfolded else ""
        summary = "<summary>What was printed</summary>"
        return f'<details{is_open}>{summary}<pre style="font-size:12px">{printed}</pre></details>'

    def _show(self, name: str, content: str) -> None:
        from IPython.display import HTML, display  # here: a notebook has loaded it

        if name in self._outputs:
            self._outputs[name].update(HTML(content))
        else:
            self._outputs[name] = display(HTML(content), display_id=True)


class NotebookConsole(Console):
    """A console whose text is shown by a view instead of filling the cell's output.

    Attributes:
        view: shows it, and a run.
    """

    def __init__(self) -> None:
        self.view = NotebookView()
        super().__init__(
            file=self.view.printed, width=_COLUMNS, force_jupyter=False, force_terminal=False, color_system=None
        )

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, and show it where it is time to."""
        super().print(*objects, **options)
        self.view.refresh()


@contextmanager
def open_console(*, quiet: bool) -> Iterator[Console]:
    """Where a run called from Python is shown: the terminal, or the output of a notebook's cell."""
    if quiet or not in_notebook():
        yield Console(quiet=quiet)
        return
    console = NotebookConsole()
    try:
        yield console
    finally:
        console.view.close()
