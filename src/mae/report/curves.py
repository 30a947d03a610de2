"""The loss of a run over the samples it has seen, between the yardsticks that give it a meaning."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from mae.errors import UsageError
from mae.report.canvas import FAINT, INK, new_figure, readable, save_png

_WIDTH, _HEIGHT = 1000, 560  # pixels
_LINE_COLOUR = "#b5367a"
_LABEL_DISTANCE = 0.052  # of the axis' height: a line of text
_HEADROOM = 1.06


def draw_curve(
    metrics: Sequence[Mapping[str, Any]], *, yardsticks: Mapping[str, float], path: Path, title: str
) -> None:
    """Write a PNG of `loss` over `samples`, each yardstick a labelled horizontal line.

    Args:
        metrics: rows as a run logs them; those without `samples` and `loss` are passed over, and a loss that is
            not finite leaves a gap.
        yardsticks: what predictors that learn nothing reach, in the loss's units, by name.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above.

    Raises:
        UsageError: no row holds a finite loss.
        MAEError: the file cannot be written.
    """
    rows = [row for row in metrics if row.get("samples") is not None and row.get("loss") is not None]
    samples = [float(row["samples"]) for row in rows]
    losses = [float(row["loss"]) for row in rows]
    last = next((loss for loss in reversed(losses) if isfinite(loss)), None)
    if last is None:
        raise UsageError(f"no loss to draw: none of {len(metrics)} rows holds 'samples' and a finite 'loss'")

    figure = new_figure(_WIDTH, _HEIGHT)
    figure.text(0.065, 0.945, title, fontsize=14, fontweight="bold", color=INK, va="center", parse_math=False)
    axes = figure.add_axes((0.065, 0.11, 0.70, 0.78))
    axes.plot(samples, losses, color=_LINE_COLOUR, linewidth=1.6, marker="o" if len(rows) == 1 else None)
    top = _HEADROOM * max(last, *(loss for loss in losses if isfinite(loss)), *yardsticks.values())
    axes.set(xlim=(min(0.0, samples[0]), max(samples) or 1.0), ylim=(0, top or 1.0))
    axes.set_xlabel("samples seen", color=FAINT)
    axes.set_ylabel("loss", color=FAINT)
    axes.tick_params(colors=FAINT)
    axes.xaxis.set_major_formatter(lambda value, _: readable(value))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c8c8c8")
    for level in yardsticks.values():
        axes.axhline(level, color="#8a8a8a", linewidth=1.0, linestyle=(0, (5, 4)))

    levels = [last, *yardsticks.values()]
    names = ["this run", *yardsticks]
    for number, height in enumerate(_apart([level / (top or 1.0) for level in levels])):
        axes.text(
            1.012,
            height,
            f"{names[number].replace('_', ' ')}  {readable(levels[number])}",
            transform=axes.transAxes,
            color=FAINT if number else _LINE_COLOUR,
            fontsize=10,
            fontweight="normal" if number else "bold",
            va="center",
            parse_math=False,
        )
    save_png(figure, path)


def _apart(heights: Sequence[float]) -> list[float]:
    """The heights, moved up where labels would lie on each other; their order stays."""
    placed = list(heights)
    below = -_LABEL_DISTANCE
    for number in sorted(range(len(heights)), key=heights.__getitem__):
        placed[number] = below = max(heights[number], below + _LABEL_DISTANCE)
    return placed
