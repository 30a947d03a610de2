"""Tables with a header, in the terminal, and which of their columns are numeric."""

import re
from collections.abc import Sequence
from typing import Literal

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
    for number, (name, numeric) in enumerate(zip(header, numeric_columns(header, rows), strict=True)):
        words = [word for cell in (name, *(row[number] for row in rows)) for word in cell.split()]
        narrowest = min(_UNBROKEN, max(map(len, words), default=0))
        justify: Literal["right", "left"] = "right" if numeric else "left"
        table.add_column(Text(visible(name)), justify=justify, overflow="fold", min_width=narrowest)
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)


def numeric_columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """For each column whether all its cells are numbers, such as `-1.2e-3`, `61.5 %`, `80.1 ± 0.3` or empty."""
    columns = [[row[number] for row in rows] for number in range(len(header))]
    return [any(cells) and all(map(_NUMBER.fullmatch, cells)) for cells in columns]
