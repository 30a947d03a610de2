"""Shared by all figures: text measured in pixels, and files written completely or not at all."""

import io
import os
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from math import floor
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from mae.errors import MAEError
from mae.text import visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 100
INK, FAINT = "#1a1a1a", "#6b6b6b"
_PIXELS_PER_POINT = DPI / 72
_MEAN_LETTER = 0.54  # of the font's size: matplotlib's own font, English text, on the safe side
_MAX_CHARACTERS = 400  # measured; no place for a name holds more


def new_figure(width: int, height: int) -> "Figure":
    """An empty white figure of this size in pixels; needs no display and none of matplotlib's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: matplotlib takes long to import

    figure = _figure_class()(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@cache
def _figure_class() -> "type[Figure]":
    """A figure that notebooks show; matplotlib's own is shown only where pyplot has set that up."""
    from matplotlib.figure import Figure

    class ShownFigure(Figure):
        def _repr_png_(self) -> bytes:
            content = io.BytesIO()
            with _without_glyph_warnings():
                self.savefig(content, format="png", dpi=DPI, facecolor="white")
            return content.getvalue()

    return ShownFigure


def fit_text(text: str, *, width: float, size: float, bold: bool = False) -> str:
    """A name in one line of at most `width` pixels at a font size in points, without its middle if it is too long."""
    line = " ".join(visible(text).split())
    if len(line) > _MAX_CHARACTERS:
        line = _shortened(line, _MAX_CHARACTERS)
    if text_width(line, size, bold=bold) <= width:
        return line
    lengths = range(1, len(line))
    fitting = bisect_right(lengths, width, key=lambda length: text_width(_shortened(line, length), size, bold=bold))
    return _shortened(line, max(1, fitting))


def text_width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of one line in pixels at a font size in points."""
    from matplotlib.backends.backend_agg import RendererAgg  # here: matplotlib takes long to import
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size, weight="bold" if bold else "normal")
    with _without_glyph_warnings():
        return RendererAgg(1, 1, DPI).get_text_width_height_descent(text, font, ismath=False)[0]


def wrap_text(text: str, *, width: int, size: float) -> list[str]:
    """Wrap the text into lines of at most `width` pixels at a font size in points."""
    return wrap(visible(text), max(8, floor(width / (_MEAN_LETTER * size * _PIXELS_PER_POINT))))


def line_height(size: float) -> int:
    """Pixels from one line of text to the next at a font size in points."""
    return round(1.35 * size * _PIXELS_PER_POINT)


def readable(value: float) -> str:
    """A number to three digits; large ones as integers without an exponent."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.3g}"


def write_lines(
    figure: "Figure",
    place: tuple[float, float],
    lines: Sequence[str],
    size: float,
    *,
    bold: bool = False,
    colour: str = INK,
    align: str = "left",
    rotation: float = 0,
) -> None:
    """Write lines of text, the top of the first at `place`, in pixels from the figure's top left.

    Args:
        figure: to write on.
        place: across and down.
        lines: plain text; math is not parsed.
        size: font size in points.
        bold: whether the font is bold.
        colour: of the text.
        align: `left`, `center` or `right` of `place`.
        rotation: degrees, counterclockwise.
    """
    for number, line in enumerate(lines):
        figure.text(
            place[0] / figure.bbox.width,
            1 - (place[1] + number * line_height(size)) / figure.bbox.height,
            line,
            fontsize=size,
            fontweight="bold" if bold else "normal",
            color=colour,
            ha=align,
            va="top",
            rotation=rotation,
            parse_math=False,  # a title may hold a dollar sign
        )


def save_png(figure: "Figure", path: Path) -> None:
    """Write the figure; an existing file is replaced atomically or kept.

    Raises:
        MAEError: the file cannot be written.
    """
    with whole_file(path, what="picture") as unfinished, _without_glyph_warnings():
        # Level 3 takes a third of the time of 6, for files a twentieth larger.
        figure.savefig(unfinished, format="png", dpi=DPI, facecolor="white", pil_kwargs={"compress_level": 3})


@contextmanager
def whole_file(path: Path, *, what: str) -> Iterator[Path]:
    """Yield a temporary path beside `path`, which replaces `path` atomically on success.

    Args:
        path: the file; its folder is created.
        what: what messages call the file.

    Raises:
        MAEError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield unfinished
        unfinished.replace(path)
    except OSError as error:
        raise MAEError(f"cannot write the {what} {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # already moved on success; on failure, keep the first error
            unfinished.unlink()


@contextmanager
def _without_glyph_warnings() -> Iterator[None]:
    """Characters missing from the font are drawn as boxes; a warning for each would fill the terminal."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*[Gg]lyph.*")
        yield


def _shortened(line: str, length: int) -> str:
    """The line's two ends around an ellipsis, `length` characters in all: names often differ at their ends."""
    kept = length - 1
    return f"{line[: kept - kept // 2]}…{line[len(line) - kept // 2 :]}"
