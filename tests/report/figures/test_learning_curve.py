"""Accuracies over epochs: what is drawn, what is said beside it."""

from math import nan

import pytest
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import UsageError
from mae.report.figures import learning_curve
from mae.report.figures.learning_curve import draw_learning_curve

ROWS = [
    {"epoch": epoch, "train": epoch / 10, "test": epoch / 20, "ema": 0.3 if epoch == 4 else None} for epoch in range(6)
]


@pytest.fixture
def axes(monkeypatch):
    """The axes that were drawn, and still a file each."""
    found = []
    original = learning_curve.save_png

    def keep(figure: Figure, path):
        found.append(figure.axes[0])
        original(figure, path)

    monkeypatch.setattr(learning_curve, "save_png", keep)
    return found


def draw(path, rows=ROWS, series=None, levels=None):
    series = series or {"train": "training images", "test": "test_images", "ema": "averaged"}
    draw_learning_curve(rows, series=series, levels=levels or {}, x="epoch", title="$ run\n", path=path / "l.png")


def test_each_series_and_level_is_drawn_in_percent_and_named(axes, tmp_path):
    draw(tmp_path, levels={"chance": 0.1, "commonest_class": 0.15})
    train, test, ema, *levels = axes[0].lines
    assert list(train.get_xdata()) == [0, 1, 2, 3, 4, 5]
    assert list(train.get_ydata()) == pytest.approx([0, 10, 20, 30, 40, 50])
    assert list(test.get_ydata()) == pytest.approx([0, 5, 10, 15, 20, 25])
    assert (list(ema.get_xdata()), list(ema.get_ydata()), ema.get_marker()) == ([4], [30], "o")
    assert [line.get_ydata()[0] for line in levels] == [10, 15]
    assert len({line.get_color() for line in (train, test, ema)}) == 3
    expected = ["training images  50.0 %", "test images  25.0 %", "averaged  30.0 %", "chance  10.0 %"]
    assert [text.get_text() for text in axes[0].texts] == [*expected, "commonest class  15.0 %"]
    assert axes[0].get_ylim() == (0, pytest.approx(53)) and axes[0].get_xlim() == (0, 5)
    assert axes[0].get_xlabel() == "epoch" and "%" in axes[0].get_ylabel()
    with Image.open(tmp_path / "l.png") as image:
        assert image.size == (1000, 560)


def test_a_series_that_no_row_holds_is_left_out_and_nan_is_a_gap(axes, tmp_path):
    rows = [*ROWS, {"epoch": 6, "train": nan}, {"epoch": 7, "loss": 0.1}]
    draw(tmp_path, rows=rows, series={"train": "a", "missing": "b"})
    assert [text.get_text() for text in axes[0].texts] == ["a  50.0 %"]
    assert len(axes[0].lines[0].get_xdata()) == 7


def test_labels_near_the_top_stay_apart_and_on_the_page(axes, tmp_path):
    names = "abcdef"
    rows = [{"epoch": epoch, **{name: 0.99 + number / 1000 for number, name in enumerate(names)}} for epoch in range(3)]
    draw(tmp_path, rows=rows, series=dict.fromkeys(names, "x" * 200))
    axes[0].figure.draw_without_rendering()
    texts = sorted(axes[0].texts, key=lambda text: text.get_position()[1])
    heights = [text.get_position()[1] for text in texts]
    assert all(above - below > 0.05 for below, above in zip(heights, heights[1:], strict=False))
    assert heights[-1] <= 1.0001 and [text.get_text()[-6:] for text in texts] == [
        f"{99 + n / 10:.1f} %" for n in range(6)
    ]
    assert all(text.get_window_extent().x1 <= 1000 for text in texts)


@pytest.mark.parametrize("rows", [[], [{"epoch": 1, "train": nan}], [{"train": 0.5}], [{"epoch": 1}]])
def test_nothing_to_draw_is_said(tmp_path, rows):
    with pytest.raises(UsageError, match="no accuracy to draw.*'epoch'.*train, test, ema"):
        draw(tmp_path, rows=rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [{"rows": [{"epoch": 1, "train": 73.4}]}, {"levels": {"chance": 10}}])
def test_percent_in_place_of_shares_is_refused(tmp_path, wrong):
    with pytest.raises(UsageError, match="not percent"):
        draw(tmp_path, **wrong)
