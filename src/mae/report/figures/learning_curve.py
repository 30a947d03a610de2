"""Accuracy over the length of training, with baselines that need none."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae.errors import UsageError
from mae.report.figures.canvas import save_png
from mae.report.figures.curves import Line, lines_figure, read_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_learning_curve(
    rows: Sequence[Mapping[str, Any]],
    *,
    series: Mapping[str, str],
    levels: Mapping[str, float],
    x: str,
    title: str,
    path: Path,
    log_x: bool = False,
) -> None:
    """Write `learning_figure` as a PNG; its folder is made, an older file is replaced at once.

    Raises:
        UsageError: see `learning_figure`.
        MAEError: the file cannot be written.
    """
    save_png(learning_figure(rows, series=series, levels=levels, x=x, title=title, log_x=log_x), path)


def learning_figure(
    rows: Sequence[Mapping[str, Any]],
    *,
    series: Mapping[str, str],
    levels: Mapping[str, float],
    x: str,
    title: str,
    log_x: bool = False,
) -> "Figure":
    """Accuracies in percent over `x`, each named at its end, each level a labelled horizontal line.

    Args:
        rows: as a protocol logs them, accuracies in [0, 1]. A series is drawn through the rows that hold it; one
            that none holds is left out, and a value that is not finite leaves a gap.
        series: which keys of a row are drawn, and how each is labelled.
        levels: accuracies in [0, 1] by name, such as that of chance.
        x: the key of a row that is drawn across, such as `epoch` or `samples`.
        title: printed above.
        log_x: draw across on a logarithmic axis, with a mark at each place that was measured; `x` is above 0.

    Raises:
        UsageError: no row holds `x` and a finite value of a series, or an accuracy is not in [0, 1].
    """
    lines = [line for key, label in series.items() if (line := read_line(rows, x=x, y=key, label=label)) is not None]
    if not lines:
        raise UsageError(
            f"no accuracy to draw: none of {len(rows)} rows holds {x!r} and a finite one of {', '.join(series)}"
        )
    for name, values in [*((line.label, line.y) for line in lines), *((name, [at]) for name, at in levels.items())]:
        wrong = [value for value in values if isfinite(value) and not 0 <= value <= 1]
        if wrong:
            raise UsageError(f"accuracy {name!r} holds {wrong[0]:g}; expected shares in [0, 1], not percent")
    return lines_figure(
        [Line(label=line.label, x=line.x, y=[100 * value for value in line.y]) for line in lines],
        levels={name: 100 * level for name, level in levels.items()},
        names=(x.replace("_", " "), "accuracy, %"),
        show=lambda value: f"{value:.1f} %",
        title=title,
        log_ticks=sorted({at for line in lines for at in line.x}) if log_x else (),
    )
