"""Tables with a header, in the terminal, and which of their columns are numeric."""

import re
from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mae.text import visible

_UNBROKEN = 16
"""Letters of a word that a narrow terminal does not break."""

_VALUE = r"[-+−]?(\d[\d,]*)?\.?\d+(e[-+]?\d+)?( ?[%×x])?"
_NUMBER = re.compile(rf"({_VALUE}( ?[±/] ?{_VALUE})?|[-+]?(nan|inf)|[-–—]?)", re.IGNORECASE)


def show_grid(console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a title and a table: numeric columns right-aligned, the rest left-aligned.

    File names are shown as text, whatever they hold.

    Args:
        console: where to print.
        title: printed bold above.
        header: one entry per column.
        rows: as long as the header.
    """
    console.print(Text(visible(title), style="bold"))
    table = Table(box=None, pad_edge=False, header_style="cyan")
    names, *cells = [[visible(cell) for cell in row] for row in (header, *rows)]
    widths = _widths(list(zip(names, *cells, strict=True)), console.width - 2 * (len(names) - 1))
    for name, width, numeric in zip(names, widths, numeric_columns(header, rows), strict=True):
        justify: Literal["right", "left"] = "right" if numeric else "left"
        table.add_column(Text(name), justify=justify, overflow="fold", width=width)
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _widths(columns: Sequence[Sequence[str]], available: int) -> list[int]:
    """Of columns that share a line: the widest give way, down to their longest word as long as that is enough.

    rich itself makes columns with a least width wider than the line, and cuts what is beyond it.
    """
    lines = [[line for cell in column for line in cell.splitlines()] for column in columns]
    widths = [min(max(map(cell_len, column), default=0), available) for column in lines]
    words = [[word for cell in column for word in cell.split()] for column in columns]
    narrowest = [min(_UNBROKEN, max(map(cell_len, column), default=1)) for column in words]
    numbers = range(len(columns))
    while sum(widths) > available:
        wide = [n for n in numbers if widths[n] > narrowest[n]] or [n for n in numbers if widths[n] > 1]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return [max(width, 1) for width in widths]


def numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column whether all its cells are numbers, such as `-1.2e-3`, `61.5 %`, `80.1 ± 0.3` or empty."""
    columns = [[row[number] for row in rows] for number in range(len(header))]
    return [any(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in columns]
