"""The loss over samples: what is drawn, what is said beside it."""

from math import inf, nan

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import curves
from mae.report.figures.canvas import new_figure
from mae.report.figures.curves import Line, draw_curve, draw_lines, label_ends, lines_figure

ROWS = [{"samples": 100 * step, "loss": 1 / step, "lr": 0.1} for step in range(1, 6)]


@pytest.fixture
def drawn(monkeypatch):
    """The figures, and still a file each."""
    figures: list[Figure] = []
    original = curves.save_png
    monkeypatch.setattr(curves, "save_png", lambda figure, path: (figures.append(figure), original(figure, path)))
    return figures


def test_the_loss_and_each_baseline_are_drawn_and_named(drawn, tmp_path):
    rows = [*ROWS, {"samples": 600, "accuracy": 0.5}]
    draw_curve(rows, baselines={"zero": 0.99, "mean_of_visible": 0.4}, path=tmp_path / "c.png", title="$ run")
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
    draw_curve(ROWS, baselines={"a": 0.2, "b": 0.2, "c": 0.21}, path=tmp_path / "c.png", title="")
    heights = sorted(text.get_position()[1] for text in drawn[0].axes[0].texts)
    assert all(above - below > 0.05 for below, above in zip(heights, heights[1:], strict=False))


def test_lines_of_one_colour_are_dashed_each_in_its_way_and_their_labels_say_so():
    many = [Line(label=f"line {number}", x=[0, 1], y=[number, number]) for number in range(21)]
    axes = lines_figure(many, levels={}, names=("x", "y"), show=str, title="").axes[0]
    looks = {(line.get_color(), str(line._dash_pattern)) for line in axes.lines}
    said = {(text.get_color(), text.get_text().split("line")[0]) for text in axes.texts}
    assert len(looks) == len(said) == 21


def test_a_loss_that_is_not_finite_is_a_gap(drawn, tmp_path):
    rows = [*ROWS, {"samples": 600, "loss": inf}, {"samples": 700, "loss": nan}]
    draw_curve(rows, baselines={}, path=tmp_path / "c.png", title="")
    assert drawn[0].axes[0].texts[0].get_text() == "this run  0.2"
    assert drawn[0].axes[0].get_xlim() == (0, 700)


@pytest.mark.parametrize("rows", [[], [{"samples": 1, "loss": nan}], [{"loss": 1.0}]])
def test_nothing_to_draw_is_said(tmp_path, rows):
    with pytest.raises(UsageError, match="no loss to draw"):
        draw_curve(rows, baselines={"zero": 1.0}, path=tmp_path / "c.png", title="")
    assert list(tmp_path.iterdir()) == []


def test_one_row_is_a_point(drawn, tmp_path):
    draw_curve(ROWS[:1], baselines={}, path=tmp_path / "c.png", title="")
    assert drawn[0].axes[0].lines[0].get_marker() == "o"


def test_a_band_is_shaded_around_its_line_and_fits(drawn, tmp_path):
    lines = [
        Line(label="a", x=[0, 1], y=[1.0, 2.0], band=([0.5, 1.0], [1.5, 7.0])),
        Line(label="b", x=[0, 1], y=[1.0, 1.5]),
    ]
    draw_lines(lines, levels={}, names=("x", "y"), show=str, path=tmp_path / "c.png", title="")
    axes = drawn[0].axes[0]
    [band] = axes.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(0, 0.5), (1, 1), (0, 1.5), (1, 7)}
    assert tuple(band.get_facecolor()[0][:3]) == pytest.approx(to_rgb(axes.lines[0].get_color()))
    assert axes.get_ylim()[1] > 7


def test_a_reference_lies_thin_and_grey_under_the_run_and_is_named(drawn, tmp_path):
    band = ([0.7, 0.3, 0.1], [0.9, 0.5, 3.0])
    reference = Line(label="reference: recipe $x, 2 seeds", x=[100, 300, 900], y=[0.8, 0.4, 0.15], band=band)
    draw_curve(ROWS, baselines={"zero": 0.99}, path=tmp_path / "c.png", title="", reference=reference)
    axes = drawn[0].axes[0]
    run, other, _ = axes.lines
    assert list(run.get_ydata()) == [1 / step for step in range(1, 6)]
    assert (list(other.get_xdata()), list(other.get_ydata())) == ([100, 300, 900], [0.8, 0.4, 0.15])
    assert other.get_zorder() < run.get_zorder() and other.get_linewidth() < run.get_linewidth()
    red, green, blue = to_rgb(other.get_color())
    assert red == green == blue
    [shade] = axes.collections
    assert {tuple(corner) for corner in shade.get_paths()[0].vertices} >= {(900, 0.1), (900, 3.0), (300, 0.5)}
    assert shade.get_zorder() < other.get_zorder()
    assert axes.get_xlim() == (0, 900) and axes.get_ylim()[1] > 3
    assert [text.get_text() for text in axes.texts] == ["this run  0.2", "reference  0.15", "zero  0.99"]
    [label] = axes.get_legend().get_texts()
    assert label.get_text() == "reference: recipe $x, 2 seeds" and not label.get_parse_math()


def test_without_a_reference_nothing_speaks_of_one(drawn, tmp_path):
    draw_curve(ROWS, baselines={}, path=tmp_path / "c.png", title="")
    assert drawn[0].axes[0].get_legend() is None and len(drawn[0].axes[0].lines) == 1


def test_labels_keep_apart_in_low_axes_too(drawn, tmp_path):
    figure = new_figure(1000, 900)
    axes = figure.add_axes((0.1, 0.1, 0.6, 0.2))
    axes.set_ylim(40, 60)
    label_ends(axes, [("a", 50.0, "red"), ("b", 50.1, "blue"), ("long name " * 9, 59.0, "red")], str, width=150)
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:], strict=False))
    middle = axes.get_window_extent().y0 + axes.get_window_extent().height / 2
    assert boxes[0].y0 < middle < boxes[0].y1 and max(box.width for box in boxes) <= 150
