"""The trade-off of a setting such as the mask ratio: quality above, time below, over the same axis."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from mae.errors import UsageError
from mae.report.figures.canvas import FAINT, fit_text, new_figure, readable, save_png, write_lines
from mae.report.figures.curves import LINE_COLOURS, label_ends, quiet_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH = 1000  # pixels
_TOP, _BOTTOM, _GAP = 84, 62, 26  # pixels: title and legend line, numbers along x, between panels
_TALL, _LOW = 300, 190  # pixels: height of the first panel, of the others
_LEFT, _ACROSS = 0.07, 0.63  # of the width: where the axes begin, how wide they are
_LABEL_WIDTH = 280  # pixels
_LEGEND = "line: mean over seeds; whiskers: ± one sample std; dots: seeds"
_TITLE_SIZE, _NOTE_SIZE = 14.0, 9.0  # points
_BESIDE = 10  # pixels: from a whisker to its dots
_ROOM = 0.12  # of the values' range, above and below them
_LEAST = 0.02  # of the largest value: half of the range that is shown at least
_MAX_TICKS = 12


@dataclass(frozen=True, kw_only=True)
class Series:
    """One quantity over the axis.

    Attributes:
        label: printed at the line's end, before its last mean.
        points: the finite values at each place, one a seed; at least one.
    """

    label: str
    points: Mapping[float, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Lines of one unit.

    Attributes:
        name: of the upright axis, with its unit.
        series: at least one.
        show: a value as it is printed beside a label.
        from_zero: whether the axis begins at 0, as for a time; else it holds the values with some room.
    """

    name: str
    series: Sequence[Series]
    show: Callable[[float], str]
    from_zero: bool = False


def draw_tradeoff(panels: Sequence[Panel], *, axis: str, title: str, path: Path) -> None:
    """Write a PNG of panels above one another over a shared axis, the first one taller.

    A line joins the means over the seeds, whiskers span ± one sample std, dots beside them are single seeds.

    Args:
        panels: from above, such as accuracies in percent, then seconds.
        axis: what the places are, such as "mask ratio".
        title: printed above.
        path: the PNG; its folder is made, an older file is replaced at once.

    Raises:
        UsageError: there is nothing to draw.
        MAEError: the file cannot be written.
    """
    places = sorted({place for panel in panels for line in panel.series for place in line.points})
    if not places:
        raise UsageError(f"nothing to draw over {axis}: no panel holds a value")
    heights = [_TALL, *[_LOW] * (len(panels) - 1)]
    height = _TOP + sum(heights) + _GAP * (len(panels) - 1) + _BOTTOM
    figure = new_figure(_WIDTH, height)
    heading = fit_text(title, width=0.9 * _WIDTH, size=_TITLE_SIZE, bold=True)
    write_lines(figure, (_LEFT * _WIDTH, 16), [heading], _TITLE_SIZE, bold=True)
    write_lines(figure, (_LEFT * _WIDTH, 48), [_LEGEND], _NOTE_SIZE, colour=FAINT)
    edge, number = height - _TOP, 0
    for panel, tall in zip(panels, heights, strict=True):
        axes = figure.add_axes((_LEFT, (edge - tall) / height, _ACROSS, tall / height))
        _draw_panel(axes, panel, number)
        _set_places(axes, places, axis if panel is panels[-1] else None)
        edge, number = edge - tall - _GAP, number + len(panel.series)
    save_png(figure, path)


def _draw_panel(axes: "Axes", panel: Panel, first: int) -> None:
    """Draw lines, whiskers, dots and labels; colours continue from the panel above, so that none is used twice."""
    from matplotlib.transforms import Affine2D  # here: matplotlib takes long to import

    beside = axes.transData + Affine2D().translate(_BESIDE, 0)
    ends = []
    for number, series in enumerate(panel.series, first):
        colour = LINE_COLOURS[number % len(LINE_COLOURS)]
        places = sorted(series.points)
        values = [series.points[place] for place in places]
        means = [fmean(seeds) for seeds in values]
        reach = [stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
        axes.errorbar(places, means, yerr=reach, color=colour, linewidth=1.6, marker="o", markersize=4.5, capsize=3)
        across, up = zip(*((place, value) for place in places for value in series.points[place]), strict=True)
        axes.scatter(across, up, s=14, color=colour, alpha=0.6, linewidths=0, transform=beside)
        ends.append((series.label, means[-1], colour))
    axes.margins(y=_ROOM)
    low, high = axes.get_ylim()
    if panel.from_zero:
        low, high = 0.0, (1 + _ROOM) * high
    least = _LEAST * max(abs(low), abs(high))  # values that hardly differ must not look as if they did
    middle = (low + high) / 2
    axes.set_ylim(min(low, middle - least), max(high, middle + least) or 1.0)
    axes.set_ylabel(panel.name, color=FAINT)
    axes.yaxis.set_label_coords(-0.075, 0.5)  # below one another, whatever the numbers beside them are
    quiet_frame(axes)
    label_ends(axes, ends, panel.show, width=_LABEL_WIDTH)


def _set_places(axes: "Axes", places: Sequence[float], name: str | None) -> None:
    """Set the shared axis: ticks at the measured values if they are few, its name only below the last panel."""
    room = 0.04 * (places[-1] - places[0]) or 1.0
    axes.set_xlim(places[0] - room, places[-1] + room)
    if len(places) <= _MAX_TICKS:
        axes.set_xticks(places, [readable(place) for place in places])
    if name is None:
        axes.tick_params(labelbottom=False)
    else:
        axes.set_xlabel(fit_text(name, width=_ACROSS * _WIDTH, size=10.0), color=FAINT, parse_math=False)
    axes.grid(axis="x", color="#ececec", linewidth=0.8)
    axes.set_axisbelow(True)
