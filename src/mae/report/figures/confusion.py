"""The confusion matrix as a picture.

scikit-learn's `ConfusionMatrixDisplay` does not fit: it cannot colour by share while it prints counts, prints every
zero, parses `$` in class names, and lists no confusions where there are too many classes for names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.errors import UsageError
from mae.report.figures.canvas import (
    FAINT,
    INK,
    fit_text,
    line_height,
    new_figure,
    save_png,
    text_width,
    wrap_text,
    write_lines,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NUMBERS, _MOST_NAMES, _NUM_LISTED = 20, 60, 15  # classes, classes, confusions
_TITLE_SIZE, _TEXT_SIZE, _NAME_SIZE = 14.0, 9.0, 8.0  # points
_MARGIN, _GAP, _BAR = 24, 10, (260, 10)  # pixels
_NAME_WIDTH, _LIST_WIDTH, _MIN_WIDTH = 170, 420, 560  # pixels
_SIDE, _MAX_SIDE, _MAX_CELL, _NAMED_CELL = 700, 1000, 96, 15  # pixels
_COLOUR_MAP = "magma_r"  # white for zero
_NO_SAMPLE = (0.82, 0.85, 0.90)
_TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
_WHITE_ABOVE = 0.45  # share of the colour scale above which numbers are white


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Position of the matrix and size of the picture, in pixels from the top left."""

    left: int
    top: int
    side: int
    room: int
    width: int
    height: int


def draw_confusion(matrix: Int64[Tensor, "K K"], *, class_names: Sequence[str], title: str, path: Path) -> None:
    """Write `confusion_figure` as a PNG; its folder is created, an older file is replaced at once.

    Raises:
        UsageError: see `confusion_figure`.
        MAEError: the file cannot be written.
    """
    save_png(confusion_figure(matrix, class_names=class_names, title=title), path)


def confusion_figure(matrix: Int64[Tensor, "K K"], *, class_names: Sequence[str], title: str) -> "Figure":
    """How often each true class (rows) was predicted as each class (columns).

    The colour is the square root of the share of the row, so that rare confusions are visible. Counts are printed for
    up to 20 classes, names for up to 60; for more classes the 15 most common confusions are listed. Above 1000 classes
    a pixel shows the largest share of the cells it covers.

    Args:
        matrix: counts, `>= 0`, at least one positive; may be sparse, since that of 20,000 classes has 3 GB of zeros.
        class_names: in the order of the matrix; long ones lose their middle.
        title: printed above.

    Raises:
        UsageError: no sample, a negative count, or a wrong number of class names.
    """
    matrix, num_classes = matrix.cpu().to_sparse().coalesce(), len(matrix)
    if len(class_names) != num_classes:
        raise UsageError(
            f"{len(class_names)} class names for a matrix of {num_classes} classes; expected one name per class"
        )
    if not matrix.values().any() or matrix.values().min() < 0:
        raise UsageError(
            "the confusion matrix has no sample or a negative count; expected counts, at least one above 0"
        )
    named = num_classes <= _MOST_NAMES
    names = [fit_text(name, width=_NAME_WIDTH, size=_NAME_SIZE) for name in class_names] if named else []
    colours = _paint(matrix, _cell_side(matrix))
    room = _GAP + ceil(max((text_width(name, _NAME_SIZE) for name in names), default=0))
    left = _MARGIN + line_height(_TEXT_SIZE) + room
    width = max(_MIN_WIDTH, left + len(colours) + _MARGIN + (0 if named else 2 * _GAP + _LIST_WIDTH))
    titles = wrap_text(title, width=width - 2 * _MARGIN, size=_TITLE_SIZE)
    top = _MARGIN + len(titles) * line_height(_TITLE_SIZE) + line_height(_TEXT_SIZE) + _GAP
    height = top + len(colours) + room + 3 * line_height(_TEXT_SIZE) + _BAR[1] + 3 * _GAP + _MARGIN
    layout = _Layout(left=left, top=top, side=len(colours), room=room, width=width, height=height)

    figure = new_figure(width, height)
    _place(figure, layout, colours)
    write_lines(figure, (_MARGIN, _MARGIN), titles, _TITLE_SIZE, bold=True)
    below_title = (_MARGIN, _MARGIN + len(titles) * line_height(_TITLE_SIZE))
    write_lines(figure, below_title, [_summary(matrix)], _TEXT_SIZE, colour=FAINT)
    _name_axes(figure, layout, names)
    if num_classes <= _MOST_NUMBERS:
        _print_counts(figure, layout, matrix)
    if not named:
        _list_confusions(figure, layout, matrix, class_names)
    return figure


def _cell_side(matrix: Int64[Tensor, "K K"]) -> int:
    """Side of a cell in pixels: large enough for the largest count or a name, small enough for many classes."""
    side = _SIDE // len(matrix)
    if len(matrix) <= _MOST_NUMBERS:
        number = ceil(text_width(f"{int(matrix.values().max()):,}", _NAME_SIZE)) + _GAP
        return max(number, min(side, _MAX_CELL))
    return max(side, _NAMED_CELL if len(matrix) <= _MOST_NAMES else 1)


def _shares(matrix: Int64[Tensor, "K K"]) -> Float[Tensor, " cells"]:
    """Share of the row of each cell that is not empty."""
    counts, rows = matrix.values(), matrix.indices()[0]
    return counts / torch.zeros(len(matrix), dtype=torch.int64).index_add_(0, rows, counts)[rows]


def _paint(matrix: Int64[Tensor, "K K"], cell: int) -> Float[Tensor, "side side 3"]:
    side = min(len(matrix), _MAX_SIDE)
    rows, columns = (_covering(numbers, len(matrix), side) for numbers in matrix.indices())
    shares = torch.full((side, side), -1.0)  # of rows without samples
    shares[rows.flatten()] = 0.0
    places = (rows[:, :, None] * side + columns[:, None]).flatten(1)  # [cells, 4]
    shares.view(-1).scatter_reduce_(0, places.T.flatten(), _shares(matrix).repeat(4), "amax")
    colours = torch.where((shares < 0)[..., None], torch.tensor(_NO_SAMPLE), _colour(shares.clamp(min=0)))
    return colours.repeat_interleave(cell, dim=0).repeat_interleave(cell, dim=1)


def _covering(numbers: Int64[Tensor, " cells"], count: int, side: int) -> Int64[Tensor, "cells 2"]:
    """The first and the last of `side` pixels that show each of `count` rows; at most two, which overlap."""
    return torch.stack([numbers * side // count, ((numbers + 1) * side - 1) // count], dim=1)


def _colour(shares: Float[Tensor, "*S"]) -> Float[Tensor, "*S 3"]:
    from matplotlib import colormaps  # here: matplotlib takes long to import

    table = torch.from_numpy(colormaps[_COLOUR_MAP](range(256))[:, :3]).float()
    white = torch.ones(3)
    table = torch.where(torch.arange(256)[:, None] == 0, white, table)
    return table[(shares.sqrt() * 255).round().long()]


def _place(figure: "Figure", layout: _Layout, colours: Float[Tensor, "side side 3"]) -> None:
    """Draw the matrix with a thin frame, and the colour scale."""
    page = torch.ones(layout.height, layout.width, 3)
    left, top, side = layout.left, layout.top, layout.side
    page[top - 1 : top + side + 1, left - 1 : left + side + 1] = 0.75
    page[top : top + side, left : left + side] = colours
    bar_left, bar_top = _MARGIN, layout.height - _MARGIN - line_height(_TEXT_SIZE) - _BAR[1]
    page[bar_top - 1 : bar_top + _BAR[1] + 1, bar_left - 1 : bar_left + _BAR[0] + 1] = 0.75
    page[bar_top : bar_top + _BAR[1], bar_left : bar_left + _BAR[0]] = _colour(torch.linspace(0, 1, _BAR[0]) ** 2)
    figure.figimage(page.numpy(), origin="upper")
    for share in _TICKS:
        place = (bar_left + sqrt(share) * _BAR[0], bar_top + _BAR[1] + 3)
        write_lines(figure, place, [f"{share:.0%}"], _NAME_SIZE, colour=FAINT, align="center")
    note = "share of the row's images; grey-blue rows have none"
    write_lines(figure, (bar_left, bar_top - line_height(_NAME_SIZE) - 2), [note], _NAME_SIZE, colour=FAINT)


def _summary(matrix: Int64[Tensor, "K K"]) -> str:
    (rows, columns), counts = matrix.indices(), matrix.values()
    right, total = int(counts[rows == columns].sum()), int(counts.sum())
    return f"{right:,} of {total:,} correct, {right / total:.1%}"


def _name_axes(figure: "Figure", layout: _Layout, names: Sequence[str]) -> None:
    """Label the axes, with class names if there are any."""
    middle, below = layout.side / 2, layout.top + layout.side
    across = (layout.left + middle, below + layout.room)
    write_lines(figure, across, ["predicted class"], _TEXT_SIZE, colour=FAINT, align="center")
    for number, name in enumerate(names):
        centre = (number + 0.5) * layout.side / len(names)
        row = (layout.left - 6, layout.top + centre - line_height(_NAME_SIZE) / 2 + 1)
        write_lines(figure, row, [name], _NAME_SIZE, align="right")
        column = (layout.left + centre, below + 6)
        write_lines(figure, column, [name], _NAME_SIZE, align="center", rotation=90)
    down = (_MARGIN + line_height(_TEXT_SIZE) / 2, layout.top + middle - text_width("true class", _TEXT_SIZE) / 2)
    write_lines(figure, down, ["true class"], _TEXT_SIZE, colour=FAINT, align="center", rotation=90)


def _print_counts(figure: "Figure", layout: _Layout, matrix: Int64[Tensor, "K K"]) -> None:
    cell = layout.side / len(matrix)
    cells = zip(matrix.indices().T.tolist(), matrix.values().tolist(), _shares(matrix).sqrt().tolist(), strict=True)
    for (row, column), count, tone in cells:
        place = (layout.left + (column + 0.5) * cell, layout.top + (row + 0.5) * cell - line_height(_NAME_SIZE) / 2 + 1)
        colour = "white" if tone > _WHITE_ABOVE else INK
        write_lines(figure, place, [f"{count:,}"], _NAME_SIZE, colour=colour, align="center")


def commonest_confusions(matrix: Int64[Tensor, "K K"]) -> Int64[Tensor, " wrong"]:
    """Places of confusions among the cells of a sparse matrix, the commonest first; equally common ones in order."""
    pairs, counts = matrix.indices(), matrix.values()
    wrong = (pairs[0] != pairs[1]).nonzero()[:, 0]
    return wrong[counts[wrong].argsort(descending=True, stable=True)]


def _list_confusions(
    figure: "Figure", layout: _Layout, matrix: Int64[Tensor, "K K"], class_names: Sequence[str]
) -> None:
    """List the most common confusions."""
    left, top = layout.left + layout.side + 2 * _GAP, layout.top
    counts, shares, pairs = matrix.values(), _shares(matrix), matrix.indices()
    write_lines(figure, (left, top), ["Most common confusions: true → predicted"], _TEXT_SIZE, bold=True)
    pitch = line_height(_TEXT_SIZE) + 4
    for number, cell in enumerate(commonest_confusions(matrix)[:_NUM_LISTED].tolist(), start=1):
        number_text = f"{int(counts[cell]):,} ({shares[cell]:.0%})"
        room = (_LIST_WIDTH - text_width(number_text + "  →   ", _TEXT_SIZE)) / 2
        true, predicted = (
            fit_text(class_names[index], width=room, size=_TEXT_SIZE) for index in pairs[:, cell].tolist()
        )
        write_lines(figure, (left, top + number * pitch), [f"{true} → {predicted}"], _TEXT_SIZE)
        right = (left + _LIST_WIDTH, top + number * pitch)
        write_lines(figure, right, [number_text], _TEXT_SIZE, colour=FAINT, align="right")
