"""Curves over the length of a run, with baselines as horizontal lines."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae.errors import UsageError
from mae.report.figures.canvas import FAINT, INK, fit_text, new_figure, readable, save_png, text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 1000, 560  # pixels
LINE_COLOURS = ("#b5367a", "#2166ac", "#c8701a", "#2a7f52", "#6a4c93", "#7a5230")  # distinguishable by the colour-blind
_DASHES: tuple[tuple[str, str | tuple[int, tuple[float, ...]]], ...] = (
    ("", "solid"),
    ("– – ", (0, (4.0, 1.5))),
    ("··· ", (0, (1.0, 1.2))),
    ("– · ", (0, (6.0, 1.2, 1.0, 1.2))),
)
"""How a line is dashed, and what stands for that before its label: where there are more lines than colours."""
_LABEL_DISTANCE = 22.7  # pixels: a line of text
_LABEL_SIZE, _LABEL_WIDTH = 10.0, 215  # points, pixels
_TITLE_SIZE = 14.0  # points
_HEADROOM = 1.06
_BAND_ALPHA = 0.18
_LOG_MARGIN = 1.15  # beside the outermost marks of a logarithmic axis


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve over the length of a run.

    Attributes:
        label: printed at its end, before its last finite value.
        x: where it was measured, rising.
        y: what was measured; a value that is not finite leaves a gap.
        band: lower and upper edge of what is shaded around it, such as the spread over seeds; each as long as `y`.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    band: tuple[Sequence[float], Sequence[float]] | None = None

    @property
    def last(self) -> float:
        """The last finite value; at least one must exist."""
        return next(value for value in reversed(self.y) if isfinite(value))


def draw_curve(
    metrics: Sequence[Mapping[str, Any]],
    *,
    baselines: Mapping[str, float],
    path: Path,
    title: str,
    reference: Line | None = None,
) -> None:
    """Write a PNG of `loss` over `samples`, each baseline a labelled horizontal line.

    Args:
        metrics: rows as a run logs them; those without `samples` and `loss` are passed over, and a loss that is
            not finite leaves a gap.
        baselines: what predictors that learn nothing reach, in the loss's units, by name.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above.
        reference: what others reached over as many samples, thin and grey under the run.

    Raises:
        UsageError: no row holds a finite loss.
        MAEError: the file cannot be written.
    """
    line = read_line(metrics, x="samples", y="loss", label="this run")
    if line is None:
        raise UsageError(f"no loss to draw: none of {len(metrics)} rows holds 'samples' and a finite 'loss'")
    names = ("samples seen", "loss")
    draw_lines([line], levels=baselines, names=names, show=readable, path=path, title=title, reference=reference)


def read_line(rows: Sequence[Mapping[str, Any]], *, x: str, y: str, label: str) -> Line | None:
    """One number of logged rows over another; None if no row holds both with a finite `y`."""
    both = [row for row in rows if row.get(x) is not None and row.get(y) is not None]
    line = Line(label=label, x=[float(row[x]) for row in both], y=[float(row[y]) for row in both])
    return line if any(map(isfinite, line.y)) else None


def draw_lines(
    lines: Sequence[Line],
    *,
    levels: Mapping[str, float],
    names: tuple[str, str],
    show: Callable[[float], str],
    path: Path,
    title: str,
    reference: Line | None = None,
    from_zero: bool = True,
    log_ticks: Sequence[float] = (),
) -> None:
    """Write `lines_figure` as a PNG; its folder is made, an older file is replaced at once.

    Raises:
        MAEError: the file cannot be written.
    """
    figure = lines_figure(
        lines,
        levels=levels,
        names=names,
        show=show,
        title=title,
        reference=reference,
        from_zero=from_zero,
        log_ticks=log_ticks,
    )
    save_png(figure, path)


def lines_figure(
    lines: Sequence[Line],
    *,
    levels: Mapping[str, float],
    names: tuple[str, str],
    show: Callable[[float], str],
    title: str,
    reference: Line | None = None,
    from_zero: bool = True,
    log_ticks: Sequence[float] = (),
) -> "Figure":
    """Curves, labelled at their ends, and horizontal lines at the levels.

    Args:
        lines: at least one, each with a finite value.
        levels: by name, in the unit of the lines.
        names: of the two axes.
        show: a value as it is printed beside a label.
        title: printed above.
        reference: drawn thin and grey under the lines, its label above the axes.
        from_zero: whether the upright axis begins at 0; else a little below the lowest value.
        log_ticks: rising numbers above 0 that are marked on a logarithmic axis across; none: the axis is linear.
    """
    figure = new_figure(_WIDTH, _HEIGHT)
    heading = fit_text(title, width=0.8 * _WIDTH, size=_TITLE_SIZE, bold=True)
    figure.text(
        0.065, 0.945, heading, fontsize=_TITLE_SIZE, fontweight="bold", color=INK, va="center", parse_math=False
    )
    axes = figure.add_axes((0.065, 0.11, 0.70, 0.78))
    colours = [LINE_COLOURS[number % len(LINE_COLOURS)] for number in range(len(lines))]
    dashes = [_DASHES[number // len(LINE_COLOURS) % len(_DASHES)] for number in range(len(lines))]
    for line, colour, (_, dash) in zip(lines, colours, dashes, strict=True):
        _draw_line(axes, line, colour, dash=dash)
    if reference is not None:
        _draw_reference(axes, reference)
    every = [*lines, *([reference] if reference is not None else [])]
    drawn = [values for line in every for values in (line.y, *(line.band or ()))]
    finite = [value for values in (*drawn, levels.values()) for value in values if isfinite(value)]
    low = 0.0 if from_zero else min(finite) - (_HEADROOM - 1) * (max(finite) - min(finite))
    top = low + _HEADROOM * (max(finite) - low)
    starts, ends = zip(*((min(line.x), max(line.x)) for line in every), strict=True)
    axes.set(xlim=(min(0.0, *starts), max(ends) or 1.0), ylim=(low, top if top > low else low + 1.0))
    axes.set_xlabel(names[0], color=FAINT)
    axes.set_ylabel(names[1], color=FAINT)
    quiet_frame(axes)
    if log_ticks:
        _spread_by_log(axes, log_ticks)
    for level in levels.values():
        axes.axhline(level, color="#8a8a8a", linewidth=1.0, linestyle=(0, (5, 4)))
    labels = [
        (mark + line.label, line.last, colour) for line, colour, (mark, _) in zip(lines, colours, dashes, strict=True)
    ]
    labels += [("reference", reference.last, FAINT)] if reference is not None else []
    label_ends(axes, [*labels, *((name, level, FAINT) for name, level in levels.items())], show)
    return figure


def _spread_by_log(axes: "Axes", ticks: Sequence[float]) -> None:
    """A logarithmic axis across with these marks alone, and each point of the curves drawn: there are few."""
    axes.set_xscale("log")
    axes.set(xlim=(ticks[0] / _LOG_MARGIN, ticks[-1] * _LOG_MARGIN))
    axes.set_xticks(ticks, [readable(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    for line in axes.lines:
        line.set_marker("o")


def _draw_line(
    axes: "Axes",
    line: Line,
    colour: str,
    *,
    dash: str | tuple[int, tuple[float, ...]] = "solid",
    width: float = 1.6,
    layer: float = 2,
) -> None:
    marker = "o" if len(line.x) == 1 else None
    axes.plot(line.x, line.y, color=colour, linewidth=width, linestyle=dash, marker=marker, zorder=layer)
    if line.band is not None:
        axes.fill_between(line.x, *line.band, color=colour, alpha=_BAND_ALPHA, linewidth=0, zorder=layer - 0.5)


def _draw_reference(axes: "Axes", line: Line) -> None:
    """Draw it grey below the curves, its label above the axes, where there is room."""
    _draw_line(axes, line, FAINT, width=0.9, layer=1.5)
    label = fit_text(line.label, width=0.5 * _WIDTH, size=_LABEL_SIZE)
    legend = axes.legend(
        [axes.lines[-1]],
        [label],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderpad=0.2,
        frameon=False,
        fontsize=_LABEL_SIZE,
        labelcolor=FAINT,
    )
    legend.get_texts()[0].set_parse_math(False)


def quiet_frame(axes: "Axes") -> None:
    """Grey axes without upper and right spines, x tick labels without an exponent."""
    axes.tick_params(colors=FAINT)
    axes.xaxis.set_major_formatter(lambda value, _: readable(value))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c8c8c8")


def label_ends(
    axes: "Axes",
    ends: Sequence[tuple[str, float, str]],
    show: Callable[[float], str],
    *,
    width: float = _LABEL_WIDTH,
) -> None:
    """Write the name and value of each curve beside its end, right of the axes, without overlap.

    Args:
        axes: with their final place and limits.
        ends: name, last value and colour of each line.
        show: a value as it is printed.
        width: pixels there are right of the axes; a longer name loses its middle.
    """
    bottom, top = axes.get_ylim()
    distance = _LABEL_DISTANCE / axes.get_window_extent().height
    heights = _apart([(value - bottom) / (top - bottom) for _, value, _ in ends], distance)
    for (name, value, colour), height in zip(ends, heights, strict=True):
        number = f"  {show(value)}"
        bold = colour != FAINT
        room = width - text_width(number, _LABEL_SIZE, bold=bold)
        axes.text(
            1.012,
            height,
            fit_text(name.replace("_", " "), width=room, size=_LABEL_SIZE, bold=bold) + number,
            transform=axes.transAxes,
            color=colour,
            fontsize=_LABEL_SIZE,
            fontweight="bold" if bold else "normal",
            va="center",
            parse_math=False,
        )


def _apart(heights: Sequence[float], distance: float) -> list[float]:
    """The heights, moved apart so that labels do not overlap; their order is kept."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    below = -distance
    for number in order:
        placed[number] = below = max(heights[number], below + distance)
    above = max(1.0, (len(order) - 1) * distance) + distance
    for number in reversed(order):
        placed[number] = above = min(placed[number], above - distance)
    return placed
