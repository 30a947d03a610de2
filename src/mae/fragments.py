"""Pieces of HTML with which results, models and masks show themselves in a notebook.

They hold no script, no style sheet and no address; every text is escaped, and each has a bounded length. Letters have
the page's own colours, so that dark themes stay readable.
"""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby
from math import isfinite

from mae.text import visible

_LONGEST = 600  # characters of a text
_MOST_CELLS = 20_000  # of a grid that is drawn
_MOST_POINTS = 200  # of a curve
_LINE = "border-bottom:1px solid rgba(128,128,128,.35);padding:2px 12px 2px 0;text-align:left;vertical-align:top"
_QUIET = "font-weight:normal;opacity:.75;min-width:8em;overflow-wrap:anywhere"
_HEIGHT, _WIDTH = 120, 480  # pixels, of a curve
_LETTERS = 13  # pixels, of a line of text
_CURVE, _LEVEL = "#d0568f", "#8a8a8a"


def text(value: object) -> str:
    """A text as HTML: escaped, without control characters, cut where it is very long."""
    shown = visible(str(value))
    shown = shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"
    return escape(shown).replace("\n", "<br/>")


def table(title: str, rows: Sequence[Sequence[object]], *, header: Sequence[str] = ()) -> str:
    """A table under a title; the first cell of each row names it."""
    names = "".join(f'<th scope="col" style="{_LINE}">{text(name)}</th>' for name in header)
    lines = [f"<thead><tr>{names}</tr></thead>"] if header else []
    for name, *values in rows:
        cells = "".join(f'<td style="{_LINE}">{text(value)}</td>' for value in values)
        lines.append(f'<tr><th scope="row" style="{_LINE};{_QUIET}">{text(name)}</th>{cells}</tr>')
    heading = f'<caption style="text-align:left;font-weight:bold;white-space:nowrap">{text(title)}</caption>'
    return f'<table style="border-collapse:collapse;margin:4px 0">{heading}{"".join(lines)}</table>'


def cells(kinds: Sequence[Sequence[str]], colours: Mapping[str, str], *, label: str, side: int = 144) -> str:
    """A grid of coloured cells as SVG, with what it shows as a text for those who do not see it.

    Args:
        kinds: of each cell, row by row.
        colours: of each kind.
        label: says in words what is drawn.
        side: pixels of the picture's longer side.

    Returns:
        Empty where the grid has too many cells to be drawn.
    """
    rows, columns = len(kinds), len(kinds[0])
    if rows * columns > _MOST_CELLS:
        return ""
    paths: dict[str, list[str]] = {kind: [] for kind in colours}
    for row, line in enumerate(kinds):
        column = 0
        for kind, run in groupby(line):  # neighbours alike are one rectangle
            count = len(list(run))
            paths[kind].append(f"M{column} {row}h{count}v1h-{count}z")
            column += count
    drawn = "".join(f'<path fill="{colours[kind]}" d="{"".join(path)}"/>' for kind, path in paths.items() if path)
    lines = [f"M0 {row}h{columns}" for row in range(1, rows)] + [f"M{column} 0v{rows}" for column in range(1, columns)]
    scale = side / max(rows, columns)
    return (
        f'<svg role="img" aria-label="{text(label)}" width="{columns * scale:.0f}" height="{rows * scale:.0f}" '
        f'viewBox="0 0 {columns} {rows}" style="margin:2px 6px 2px 0"><title>{text(label)}</title>{drawn}'
        f'<path d="{"".join(lines)}" stroke="#fff" stroke-width="{1 / scale:.3f}"/></svg>'
    )


def curve(x: Sequence[float], y: Sequence[float], *, levels: Mapping[str, float], label: str) -> str:
    """A curve from its first to its last point as SVG, the levels dashed; the upright axis begins at 0.

    Args:
        x: where it was measured, rising.
        y: what was measured; what is not finite is left out.
        levels: by name.
        label: says in words what is drawn.

    Returns:
        Empty where there is nothing finite to draw.
    """
    points = [(place, value) for place, value in zip(x, y, strict=True) if isfinite(value)]
    if not points:
        return ""
    if len(points) > _MOST_POINTS:
        points = [points[number * len(points) // _MOST_POINTS] for number in range(_MOST_POINTS)] + points[-1:]
    known = {name: level for name, level in levels.items() if isfinite(level)}
    top = max([*(value for _, value in points), *known.values()])
    end = points[-1][0]

    def place(x: float, y: float) -> tuple[float, float]:
        return _WIDTH * x / (end or 1), _HEIGHT * (1 - 0.94 * min(max(y / (top or 1), 0), 1))

    line = " ".join(f"{across:.1f},{down:.1f}" for across, down in (place(*point) for point in points))
    last = place(*points[-1])
    drawn, lowest = "", float(_HEIGHT)
    for name, level in sorted(known.items(), key=lambda item: item[1]):
        height = place(0, level)[1]
        lowest = min(height, lowest)
        drawn += (
            f'<path d="M0 {height:.1f}h{_WIDTH}" stroke="{_LEVEL}" stroke-dasharray="5 4"/><text x="{_WIDTH + 6}" '
            f'y="{lowest:.1f}" dy="4" font-size="11" fill="currentColor">'
            f"{text(name.replace('_', ' '))} {level:.3g}</text>"
        )
        lowest -= _LETTERS  # labels stay apart
    return (
        f'<svg role="img" aria-label="{text(label)}" width="{_WIDTH + 180}" height="{_HEIGHT + 4}" '
        f'viewBox="0 0 {_WIDTH + 180} {_HEIGHT + 4}"><title>{text(label)}</title>'
        f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" fill="none" stroke="{_LEVEL}"/>{drawn}'
        f'<polyline points="{line}" fill="none" stroke="{_CURVE}" stroke-width="2"/>'
        f'<circle cx="{last[0]:.1f}" cy="{last[1]:.1f}" r="3" fill="{_CURVE}"/></svg>'
    )
