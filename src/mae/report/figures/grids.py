"""Tables of numbers as colours, such as one number for each block and head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mae.errors import UsageError
from mae.report.figures.canvas import (
    FAINT,
    fit_text,
    line_height,
    new_figure,
    save_png,
    text_width,
    wrap_text,
    write_lines,
)
from mae.report.figures.tones import colour_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CELL = (58, 24)  # pixels: wide, high
_LABEL, _MARGIN, _GAP = 118, 24, 26  # pixels
_MOST_WIDTH = 1200
_TITLE_SIZE, _NAME_SIZE, _TEXT_SIZE = 14.0, 10.5, 8.5  # points
_COLOUR_MAP = "viridis"
_EMPTY = 0.93
_BRIGHT = 0.55  # luminance from which ink is dark
_LUMINANCE = (0.2126, 0.7152, 0.0722)


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """One table.

    Attributes:
        name: printed above.
        values: coloured from the lowest to the highest of the table; NaN: an empty cell.
        rows: a label each.
        columns: a label each.
        show: a value as it is printed in its cell, in a few characters.
    """

    name: str
    values: Float[Tensor, "rows columns"]
    rows: Sequence[str]
    columns: Sequence[str]
    show: Callable[[float], str]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, with its name and labels."""
        height, width = self.values.shape
        named = ceil(text_width(self.name, _NAME_SIZE, bold=True))
        return max(_LABEL + width * _CELL[0], named), 2 * line_height(_NAME_SIZE) + height * _CELL[1]


def draw_grids(grids: Sequence[Grid], *, title: str, caption: str, path: Path) -> None:
    """Write a PNG of tables beside one another as far as there is room, then below.

    Raises:
        UsageError: there is no table.
        MAEError: the file cannot be written.
    """
    if not grids:
        raise UsageError(f"nothing to draw for {title}: there is no table")
    top = _MARGIN + line_height(_TITLE_SIZE) + _GAP // 2
    places, width, bottom = _places(grids, top)
    lines = wrap_text(caption, width=width - 2 * _MARGIN, size=_TEXT_SIZE)
    figure = new_figure(width, bottom + len(lines) * line_height(_TEXT_SIZE) + _MARGIN)
    heading = fit_text(title, width=width - 2 * _MARGIN, size=_TITLE_SIZE, bold=True)
    write_lines(figure, (_MARGIN, _MARGIN), [heading], _TITLE_SIZE, bold=True)
    page = torch.ones(int(figure.bbox.height), int(figure.bbox.width), 3)
    for grid, place in zip(grids, places, strict=True):
        _draw(figure, page, grid, place)
    figure.figimage(page.numpy(), origin="upper")
    write_lines(figure, (_MARGIN, bottom), lines, _TEXT_SIZE, colour=FAINT)
    save_png(figure, path)


def _places(grids: Sequence[Grid], top: int) -> tuple[list[tuple[int, int]], int, int]:
    """Left and top of each table, the width of the page, and where the last table ends."""
    places, left, below, widest = [], _MARGIN, top, 0
    for grid in grids:
        width, height = grid.size
        if left > _MARGIN and left + width > _MOST_WIDTH:
            left, top = _MARGIN, below
        places.append((left, top))
        left, below = left + width + _GAP, max(below, top + height + _GAP)
        widest = max(widest, left - _GAP + _MARGIN)
    return places, max(widest, _MOST_WIDTH // 2), below


def _draw(figure: "Figure", page: Float[Tensor, "height width 3"], grid: Grid, place: tuple[int, int]) -> None:
    left, top = place
    write_lines(figure, (left, top), [grid.name], _NAME_SIZE, bold=True)
    left, labels = left + _LABEL, top + line_height(_NAME_SIZE)
    top = labels + line_height(_NAME_SIZE)
    across, down = _CELL
    inset = (down - line_height(_TEXT_SIZE)) // 2
    colours = _colours(grid.values)
    for row, label in enumerate(grid.rows):
        y = top + row * down
        text = fit_text(label, width=_LABEL - 10, size=_TEXT_SIZE)
        write_lines(figure, (left - 8, y + inset), [text], _TEXT_SIZE, colour=FAINT, align="right")
        for column in range(len(grid.columns)):
            x, colour, value = left + column * across, colours[row, column], float(grid.values[row, column])
            page[y : y + down - 1, x : x + across - 1] = colour
            if value == value:
                ink = "black" if float(colour @ torch.tensor(_LUMINANCE)) > _BRIGHT else "white"
                middle = (x + across / 2, y + inset)
                write_lines(figure, middle, [grid.show(value)], _TEXT_SIZE, colour=ink, align="center")
    for column, label in enumerate(grid.columns):
        text = fit_text(label, width=across - 4, size=_TEXT_SIZE)
        middle = (left + (column + 0.5) * across, labels)
        write_lines(figure, middle, [text], _TEXT_SIZE, colour=FAINT, align="center")


def _colours(values: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns 3"]:
    known = values[~values.isnan()]
    if not len(known):
        return torch.full((*values.shape, 3), _EMPTY)
    low, high = float(known.min()), float(known.max())
    share = (values - low) / (high - low) if high > low else torch.full_like(values, 0.5)
    painted = colour_table(_COLOUR_MAP)[(share.nan_to_num(nan=0.0) * 255).round().long()]
    return torch.where(values.isnan().unsqueeze(-1), _EMPTY, painted)
