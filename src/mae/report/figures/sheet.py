"""Rows and columns of pictures on one page, placed pixel by pixel so that small images stay crisp."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from mae.report.figures.canvas import FAINT, fit_text, line_height, new_figure, save_png, wrap_text, write_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TITLE_SIZE, _NAME_SIZE, _TEXT_SIZE = 14.0, 10.5, 8.5  # points
NOTE_SIZE = _TEXT_SIZE
_MARGIN, _GAP, _ROW_GAP, _BAR = 24, 12, 8, 10  # pixels
_MIN_PITCH = 150  # pixels
SIDES = (208, 384)
"""Of pictures, see `sheet_figure`."""
_KEY = 140  # pixels, of an entry of the legend


@dataclass(frozen=True, kw_only=True, eq=False)
class ColourBar:
    """The colour scale of a column.

    Attributes:
        colours: from the lowest to the highest value, in [0, 1].
        low: label of the lowest.
        high: label of the highest.
    """

    colours: Float[Tensor, "L 3"]
    low: str
    high: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Column:
    """One view of each image.

    Attributes:
        name: printed bold above.
        caption: printed under the name.
        pictures: colours in [0, 1], one picture per row of the sheet.
        bar: colour scale drawn below the column.
        notes: lines of text under each picture, equally many; long ones lose their middle.
    """

    name: str
    caption: str
    pictures: Float[Tensor, "B H W 3"]
    bar: ColourBar | None = None
    notes: Sequence[Sequence[str]] = ()


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Positions in pixels from the top left."""

    cell: tuple[int, int]
    pitch: int
    width: int
    names: int
    rows: int
    row_height: int
    bars: int
    height: int


def write_sheet(
    columns: Sequence[Column],
    *,
    title: str,
    caption: Sequence[str],
    path: Path,
    sides: tuple[int, int] = SIDES,
    legend: Mapping[str, Float[Tensor, "3"]] | None = None,
) -> None:
    """Write `sheet_figure` as a PNG.

    Raises:
        MAEError: the file cannot be written.
    """
    save_png(sheet_figure(columns, title=title, caption=caption, sides=sides, legend=legend), path)


def sheet_figure(
    columns: Sequence[Column],
    *,
    title: str,
    caption: Sequence[str],
    sides: tuple[int, int] = SIDES,
    legend: Mapping[str, Float[Tensor, "3"]] | None = None,
) -> "Figure":
    """The columns on one page, the title above and the caption's paragraphs below, the first one larger.

    Pictures are enlarged by an integer factor to about the first of the two sides in pixels; those over the second
    are averaged down to it. A legend of colours by name comes under the pictures.
    """
    cells = [_fit(column.pictures, sides) for column in columns]
    cell = (cells[0].shape[1], cells[0].shape[2])
    pitch = max(cell[1], _MIN_PITCH) + _GAP
    width = 2 * _MARGIN + len(columns) * pitch - _GAP
    titles = wrap_text(title, width=width - 2 * _MARGIN, size=_TITLE_SIZE)
    captions = [wrap_text(column.caption, width=pitch - _GAP, size=_TEXT_SIZE) for column in columns]
    finding = wrap_text(caption[0], width=width - 2 * _MARGIN, size=_NAME_SIZE)
    below = [line for text in caption[1:] for line in wrap_text(text, width=width - 2 * _MARGIN, size=_TEXT_SIZE)]

    names = _MARGIN + len(titles) * line_height(_TITLE_SIZE) + _ROW_GAP
    rows = names + line_height(_NAME_SIZE) + max(map(len, captions)) * line_height(_TEXT_SIZE) + _ROW_GAP
    num_notes = max(len(lines) for column in columns for lines in [(), *column.notes])
    row_height = cell[0] + num_notes * line_height(_TEXT_SIZE) + _ROW_GAP
    bars = rows + len(cells[0]) * row_height
    has_bar = any(column.bar for column in columns)
    keys = bars + (_BAR + line_height(_TEXT_SIZE) + _ROW_GAP if has_bar else 0) + _ROW_GAP
    places = _legend_places(len(legend or {}), width=width, top=keys)
    footer = places[-1][1] + line_height(_TEXT_SIZE) + _ROW_GAP if places else keys
    details = footer + len(finding) * line_height(_NAME_SIZE) + _ROW_GAP // 2
    height = details + len(below) * line_height(_TEXT_SIZE) + _MARGIN
    layout = _Layout(
        cell=cell,
        pitch=pitch,
        width=width,
        names=names,
        rows=rows,
        row_height=row_height,
        bars=bars,
        height=height,
    )

    figure = new_figure(width, height)
    page = _paste(columns, cells, layout)
    for (left, top), colour in zip(places, (legend or {}).values(), strict=True):
        page[top : top + _BAR, left : left + _BAR] = colour
    figure.figimage(page.numpy(), origin="upper")
    for (left, top), name in zip(places, legend or {}, strict=True):
        text = fit_text(name, width=_KEY - 2 * _BAR, size=_TEXT_SIZE)
        write_lines(figure, (left + _BAR + _ROW_GAP // 2, top - 1), [text], _TEXT_SIZE)
    write_lines(figure, (_MARGIN, _MARGIN), titles, _TITLE_SIZE, bold=True)
    write_lines(figure, (_MARGIN, footer), finding, _NAME_SIZE)
    write_lines(figure, (_MARGIN, details), below, _TEXT_SIZE, colour=FAINT)
    for number, (column, lines) in enumerate(zip(columns, captions, strict=True)):
        _label_column(figure, layout, _MARGIN + number * pitch, column, lines)
    return figure


def _legend_places(count: int, *, width: int, top: int) -> list[tuple[int, int]]:
    """Left and top of each entry, in as many columns as there is room for."""
    columns = max(1, (width - 2 * _MARGIN) // _KEY)
    height = line_height(_TEXT_SIZE) + 2
    return [(_MARGIN + number % columns * _KEY, top + number // columns * height) for number in range(count)]


def _fit(pictures: Float[Tensor, "B H W 3"], sides: tuple[int, int]) -> Float[Tensor, "B h w 3"]:
    pictures = pictures.cpu()
    longest = max(pictures.shape[1:3])
    times = max(1, round(sides[0] / longest))
    if longest <= sides[1]:
        return pictures.repeat_interleave(times, dim=1).repeat_interleave(times, dim=2)
    size = [max(1, round(side * sides[1] / longest)) for side in pictures.shape[1:3]]
    return interpolate(pictures.permute(0, 3, 1, 2), size=size, mode="area").permute(0, 2, 3, 1)


def _paste(
    columns: Sequence[Column], cells: Sequence[Float[Tensor, "B h w 3"]], layout: _Layout
) -> Float[Tensor, "height width 3"]:
    page = torch.ones(layout.height, layout.width, 3)
    height, width = layout.cell
    for number, (column, pictures) in enumerate(zip(columns, cells, strict=True)):
        left = _MARGIN + number * layout.pitch
        for row, picture in enumerate(pictures):
            top = layout.rows + row * layout.row_height
            page[top : top + height, left : left + width] = picture
        if column.bar is not None:
            steps = torch.linspace(0, len(column.bar.colours) - 1, width).round().long()
            page[layout.bars : layout.bars + _BAR, left : left + width] = column.bar.colours.cpu()[steps]
    return page


def _label_column(figure: "Figure", layout: _Layout, left: int, column: Column, caption: Sequence[str]) -> None:
    write_lines(figure, (left, layout.names), [column.name], _NAME_SIZE, bold=True)
    below_name = layout.names + line_height(_NAME_SIZE)
    write_lines(figure, (left, below_name), caption, _TEXT_SIZE, colour=FAINT)
    for row, notes in enumerate(column.notes):
        top = layout.rows + row * layout.row_height + layout.cell[0] + 2
        lines = [fit_text(note, width=layout.pitch - _GAP, size=_TEXT_SIZE) for note in notes]
        write_lines(figure, (left, top), lines, _TEXT_SIZE)
    if column.bar is not None:
        top = layout.bars + _BAR + 3
        write_lines(figure, (left, top), [column.bar.low], _TEXT_SIZE, colour=FAINT)
        right = (left + layout.cell[1], top)
        write_lines(figure, right, [column.bar.high], _TEXT_SIZE, colour=FAINT, align="right")
