"""Quality and speed over a number: means, whiskers, dots, and names that can be read."""

from math import sqrt

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import tradeoff
from mae.report.figures.tradeoff import Panel, Series, draw_tradeoff

QUALITY = Panel(
    name="share, %",
    series=[
        Series(label="linear probe, top-1", points={0.75: [44.0, 45.0, 46.0], 0.5: [40.0, 42.0]}),
        Series(label="k-NN, top-1", points={0.5: [45.0], 0.9: [45.05]}),
    ],
    show=lambda value: f"{value:.1f} %",
)
TIME = Panel(
    name="seconds",
    series=[Series(label="time per epoch", points={0.5: [90.0], 0.75: [60.0], 0.9: [50.0, 52.0]})],
    show=lambda value: f"{value:.0f} s",
    from_zero=True,
)


@pytest.fixture
def drawn(monkeypatch):
    """The figures, and still a file each."""
    figures: list[Figure] = []
    original = tradeoff.save_png
    monkeypatch.setattr(tradeoff, "save_png", lambda figure, path: (figures.append(figure), original(figure, path)))
    return figures


def draw(path, *panels, title="t", axis="mask ratio"):
    draw_tradeoff(panels, axis=axis, title=title, path=path)
    with Image.open(path) as image:
        return image.size


def test_lines_are_means_whiskers_deviations_and_dots_seeds(drawn, tmp_path):
    draw(tmp_path / "new" / "t.png", QUALITY, TIME)
    upper, lower = drawn[0].axes
    probe, knn = upper.containers
    assert list(probe.lines[0].get_xdata()) == [0.5, 0.75] and list(probe.lines[0].get_ydata()) == [41, 45]
    reach = [(segment[0][1], segment[1][1]) for segment in probe.lines[2][0].get_segments()]
    assert reach == [pytest.approx((41 - sqrt(2), 41 + sqrt(2))), pytest.approx((44, 46))]
    dots = [collection.get_offsets().tolist() for collection in upper.collections if len(collection.get_offsets()) > 1]
    assert dots[0] == [[0.5, 40], [0.5, 42], [0.75, 44], [0.75, 45], [0.75, 46]]
    assert list(lower.containers[0].lines[0].get_ydata()) == [90, 60, 51]
    assert [text.get_text() for text in upper.texts] == ["linear probe, top-1  45.0 %", "k-NN, top-1  45.0 %"]
    assert [text.get_text() for text in lower.texts] == ["time per epoch  51 s"]


def test_panels_share_their_axis_and_no_colour(drawn, tmp_path):
    draw(tmp_path / "t.png", QUALITY, TIME)
    upper, lower = drawn[0].axes
    assert upper.get_xlim() == lower.get_xlim() and upper.get_xlim()[0] < 0.5 < 0.9 < upper.get_xlim()[1]
    assert [tick.get_text() for tick in lower.get_xticklabels()] == ["0.5", "0.75", "0.9"]
    assert lower.get_xlabel() == "mask ratio" and upper.get_xlabel() == ""
    colours = [container.lines[0].get_color() for axes in (upper, lower) for container in axes.containers]
    assert len(set(colours)) == 3
    assert upper.get_ylim()[0] > 30 and lower.get_ylim()[0] == 0 and lower.get_ylim()[1] > 90
    boxes = [axes.get_window_extent() for axes in (upper, lower)]
    assert boxes[0].y0 > boxes[1].y1 and boxes[0].height > boxes[1].height


def test_values_that_hardly_differ_look_so(drawn, tmp_path):
    flat = Panel(name="y", series=[Series(label="a", points={1.0: [50.0], 2.0: [50.01]})], show=str)
    draw(tmp_path / "t.png", flat)
    low, high = drawn[0].axes[0].get_ylim()
    assert high - low > 1.9 and low < 50 < high


@pytest.mark.parametrize("value", [45.0, 0.0])
def test_one_place_and_one_seed_are_a_dot_in_the_middle(drawn, tmp_path, value):
    alone = [Panel(name="y", series=[Series(label="a", points={0.75: [value]})], show=str, from_zero=zero)
             for zero in (False, True)]  # fmt: skip
    assert draw(tmp_path / "t.png", *alone)[0] == 1000
    for axes in drawn[0].axes:
        assert sum(axes.get_xlim()) / 2 == pytest.approx(0.75)
        assert axes.get_ylim()[0] <= value < axes.get_ylim()[1]
        assert list(axes.get_xticks()) == [0.75]


def test_no_text_leaves_the_page_or_lies_on_another(drawn, tmp_path):
    long = Panel(
        name="share, %",
        series=[Series(label=f"a name that does not end $x {n}", points={0.5: [40.0], 0.9: [40.0]}) for n in range(7)],
        show=lambda value: f"{value:.1f} %",
    )
    draw(tmp_path / "t.png", long, TIME, title="W" * 300, axis="of masks " * 40)
    figure = drawn[0]
    figure.draw_without_rendering()
    texts = [*figure.texts, *(text for axes in figure.axes for text in (*axes.texts, axes.xaxis.label))]
    for box in (text.get_window_extent() for text in texts if text.get_text()):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:], strict=False))


def test_many_places_do_not_crowd_the_axis(drawn, tmp_path):
    many = Panel(name="y", series=[Series(label="a", points={n / 50: [float(n)] for n in range(40)})], show=str)
    draw(tmp_path / "t.png", many)
    assert 2 < len(drawn[0].axes[0].get_xticks()) <= 12


def test_nothing_to_draw_is_said(tmp_path):
    with pytest.raises(UsageError, match="nothing to draw over mask ratio"):
        draw(tmp_path / "t.png")
    assert list(tmp_path.iterdir()) == []
