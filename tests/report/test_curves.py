"""The loss over samples: what is drawn, what is said beside it."""

from math import inf, nan

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import UsageError
from mae.report import curves
from mae.report.curves import draw_curve

ROWS = [{"samples": 100 * step, "loss": 1 / step, "lr": 0.1} for step in range(1, 6)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures, and still a file each."""
    figures: list[Figure] = []
    original = curves.save_png
    monkeypatch.setattr(curves, "save_png", lambda figure, path: (figures.append(figure), original(figure, path)))
    return figures


def test_the_loss_and_each_yardstick_are_drawn_and_named(drawn, tmp_path):
    rows = [*ROWS, {"samples": 600, "accuracy": 0.5}]
    draw_curve(rows, yardsticks={"zero": 0.99, "mean_of_visible": 0.4}, path=tmp_path / "c.png", title="$ run")
    axes = drawn[0].axes[0]
    loss, *lines = axes.lines
    assert list(loss.get_xdata()) == [100, 200, 300, 400, 500]
    assert list(loss.get_ydata()) == [1 / step for step in range(1, 6)]
    assert [line.get_ydata()[0] for line in lines] == [0.99, 0.4]
    assert [text.get_text() for text in axes.texts] == ["this run  0.2", "zero  0.99", "mean of visible  0.4"]
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 1
    with Image.open(tmp_path / "c.png") as image:
        assert image.size == (1000, 560)


def test_labels_of_equal_levels_do_not_lie_on_each_other(drawn, tmp_path):
    draw_curve(ROWS, yardsticks={"a": 0.2, "b": 0.2, "c": 0.21}, path=tmp_path / "c.png", title="")
    heights = sorted(text.get_position()[1] for text in drawn[0].axes[0].texts)
    assert all(above - below > 0.05 for below, above in zip(heights, heights[1:], strict=False))


def test_a_loss_that_is_not_finite_is_a_gap(drawn, tmp_path):
    rows = [*ROWS, {"samples": 600, "loss": inf}, {"samples": 700, "loss": nan}]
    draw_curve(rows, yardsticks={}, path=tmp_path / "c.png", title="")
    assert drawn[0].axes[0].texts[0].get_text() == "this run  0.2"
    assert drawn[0].axes[0].get_xlim() == (0, 700)


@pytest.mark.parametrize("rows", [[], [{"samples": 1, "loss": nan}], [{"loss": 1.0}]])
def test_nothing_to_draw_is_said(tmp_path, rows):
    with pytest.raises(UsageError, match="no loss to draw"):
        draw_curve(rows, yardsticks={"zero": 1.0}, path=tmp_path / "c.png", title="")
    assert list(tmp_path.iterdir()) == []


def test_one_row_is_a_point(drawn, tmp_path):
    draw_curve(ROWS[:1], yardsticks={}, path=tmp_path / "c.png", title="")
    assert drawn[0].axes[0].lines[0].get_marker() == "o"
