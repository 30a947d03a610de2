"""What the pictures share: text measured in pixels, and a file that is whole or not there."""

import os
from contextlib import suppress
from math import floor
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from mae.errors import MAEError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
INK, FAINT = "#1a1a1a", "#6b6b6b"
_PIXELS_PER_POINT = DPI / 72
_MEAN_LETTER = 0.54  # of the font's size: matplotlib's own font, English text, on the safe side


def new_figure(width: int, height: int) -> "Figure":
    """An empty white figure of so many pixels; drawn without a screen and without matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: matplotlib takes long to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def wrap_text(text: str, *, width: int, size: float) -> list[str]:
    """The text in lines that fit into `width` pixels at a font size in points."""
    return wrap(text, max(8, floor(width / (_MEAN_LETTER * size * _PIXELS_PER_POINT))))


def line_height(size: float) -> int:
    """Pixels from one line of text to the next at a font size in points."""
    return round(1.35 * size * _PIXELS_PER_POINT)


def readable(value: float) -> str:
    """A number in three digits; large ones whole and without an exponent."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.3g}"


def save_png(figure: "Figure", path: Path) -> None:
    """Write the figure; an existing file is replaced at once or stays.

    Raises:
        MAEError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(unfinished, format="png", dpi=DPI, facecolor="white")
        unfinished.replace(path)
    except OSError as error:
        raise MAEError(f"cannot write the picture {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # gone after a success, and a full disk must not hide the first error
            unfinished.unlink()
