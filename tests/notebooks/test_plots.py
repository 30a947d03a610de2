"""Figures for notebooks: what they hold, and what they refuse."""

import io
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

import mae
from mae.training.log import loss_rows, read_rows


@pytest.fixture(autouse=True)
def _without_pyplot(monkeypatch: pytest.MonkeyPatch):
    """Asking for pyplot fails, whether or not something else has loaded it before."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)


def pixels(figure: Figure) -> np.ndarray:
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]


def words(figure: Figure) -> str:
    return "\n".join(each.get_text() for each in figure.findobj(lambda part: hasattr(part, "get_text")))


def test_the_loss_of_a_run_is_that_of_its_log(trained):
    run, _ = trained
    rows = loss_rows(read_rows(run.folder / "metrics.jsonl"))
    for asked in (run, run.folder, str(run.folder)):
        figure = mae.plots.loss(asked)
        line = figure.axes[0].lines[0]
        assert list(line.get_xdata()) == [row["samples"] for row in rows]
        assert list(line.get_ydata()) == [row["terms"]["reconstruction"] for row in rows]
    assert "mean of visible" in words(figure) and figure.canvas.get_width_height() == (1000, 560)


def test_accuracies_are_drawn_where_a_run_measured_them(trained):
    run, _ = trained
    looks = [row["evaluation"]["knn"] for row in read_rows(run.folder / "metrics.jsonl") if "evaluation" in row]
    line = mae.plots.accuracy(run).axes[0].lines[0]
    assert list(line.get_ydata()) == pytest.approx([100 * knn for knn in looks])


def test_runs_are_compared_by_name(trained, tmp_path):
    run, _ = trained
    one, other = mae.plots.compare({"first": run, "second": run.folder}).axes[0].lines[:2]
    assert list(one.get_ydata()) == list(other.get_ydata())
    assert "second" in words(mae.plots.compare({"second": run})) and "r & <b>" in words(mae.plots.compare([run]))
    with pytest.raises(mae.UsageError, match="no runs"):
        mae.plots.compare([])
    with pytest.raises(mae.UsageError, match="holds no run"):
        mae.plots.compare([tmp_path])


def test_a_run_without_numbers_is_told_of(trained, monkeypatch):
    run, _ = trained
    state = replace(import_module("mae.pretraining.watch.status").read_state(run.folder, now=0), loss=None, looks=())
    monkeypatch.setattr("mae.plots.read_state", lambda folder, now: state)
    for draw in (mae.plots.loss, mae.plots.accuracy, lambda run: mae.plots.compare([run])):
        with pytest.raises(mae.UsageError, match=r"no loss|no accuracy"):
            draw(run)


def test_reconstructions_are_those_that_a_sheet_shows(trained, tmp_path):
    run, _ = trained
    images = torch.randint(0, 256, (2, 1, 8, 8), dtype=torch.uint8)
    made = mae.reconstruct(run.folder, images, mask_ratio=0.5, out=tmp_path / "sheet.png", device="cpu")
    drawn = pixels(mae.plots.reconstruction(made))
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB"))
    title = 60  # pixels: titles differ
    assert drawn.shape == sheet.shape
    differing = (np.abs(drawn[title:].astype(int) - sheet[title:]).max(axis=-1) > 2).mean()
    assert differing < 0.001
    hole = mae.reconstruct(run.folder, images, mask=torch.eye(4), inpaint=True, device="cpu")
    with pytest.raises(mae.UsageError, match="fill holes"):
        mae.plots.reconstruction(hole)


def test_masks_are_coloured_cell_by_cell(small_model):
    plan = small_model(norm_pix=True).plan(torch.zeros(9, 3, 32, 32))
    figure = mae.plots.masks(plan)
    assert "sample 8" in words(figure) and "sample 9" not in words(figure) and "16 of 64 visible" in words(figure)
    picture, first = pixels(figure), plan.hidden[0].unflatten(0, (8, 8))
    bright = np.argwhere((picture == (231, 217, 176)).all(axis=-1))
    dark = np.argwhere((picture == (47, 93, 138)).all(axis=-1))
    (top, left), side = np.minimum(bright.min(axis=0), dark.min(axis=0)), 208 // 8
    for row, column in np.ndindex(8, 8):
        colour = picture[top + row * side + side // 2, left + column * side + side // 2].tolist()
        assert colour == ([47, 93, 138] if first[row, column] else [231, 217, 176])


def test_masks_without_a_grid_must_be_told_it(small_model):
    plan = replace(small_model(norm_pix=True).plan(torch.zeros(1, 3, 32, 32)), grid=None)
    with pytest.raises(mae.UsageError, match="grid is None; expected the lengths of a grid of 64 patches"):
        mae.plots.masks(plan)
    with pytest.raises(mae.UsageError, match=r"grid is \(7, 7\)"):
        mae.plots.masks(plan, grid=(7, 7))
    assert isinstance(mae.plots.masks(plan, grid=(8, 8)), Figure)


def test_patches_that_are_alike_have_one_colour(trained):
    run, _ = trained
    half = np.zeros((8, 8), dtype=np.uint8)
    half[:, 4:] = 255
    figure = mae.plots.patch_colours(run.folder, [half, half.T.copy()])
    assert "of the variance" in words(figure) and "patch tokens" in words(figure)
    assert isinstance(mae.plots.patch_colours(mae.load(run.folder), [half]), Figure)


def test_confusions_are_counted_by_name():
    figure = mae.plots.confusion(["cat", "cat", "dog"], ["cat", "owl", "dog"], title="t")
    text = words(figure).split("\n")
    assert "2 of 3 correct, 66.7%" in text and {"cat", "dog", "owl"} <= set(text)
    with pytest.raises(mae.UsageError, match="2 true and 1 predicted"):
        mae.plots.confusion(["a", "b"], ["a"])
    with pytest.raises(mae.UsageError, match="0 true"):
        mae.plots.confusion([], [])


def test_a_figure_is_shown_without_pyplot(trained):
    run, _ = trained
    shown = mae.plots.loss(run)._repr_png_()
    assert Image.open(io.BytesIO(shown)).size == (1000, 560)


def test_figures_can_be_written(trained, tmp_path: Path):
    run, _ = trained
    mae.plots.loss(run).savefig(tmp_path / "loss.svg")
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
