"""The sheet of several models: each in its column, all under one mask, the numbers its own."""

import pytest
import torch
from pieces import asked

from mae.masks.random import RandomMasking
from mae.modalities.images.pictures import score
from mae.models.reconstruction import reconstruct
from mae.report.figures import comparison
from mae.report.figures.comparison import draw_comparison
from mae.report.figures.tones import choose_tones

MEAN, STD = (0.5,) * 3, (0.25,) * 3


@pytest.fixture
def sheets(monkeypatch):
    """What each sheet was made of, and still a file each."""
    found: list[tuple] = []
    original = comparison.write_sheet

    def write(columns, **options):
        found.append((columns, options))
        original(columns, **options)

    monkeypatch.setattr(comparison, "write_sheet", write)
    return found


@pytest.fixture
def scene(small_model, blocky_images):
    """Images, and the reconstructions of two models that differ."""
    first, second = small_model(norm_pix=True), small_model(norm_pix=False)
    images = blocky_images(batch=3)
    plan = RandomMasking(ratio=0.5).plan(asked((8, 8), torch.tensor([5, 6, 7])))
    return images, {"first": reconstruct(first, images, plan), "second": reconstruct(second, images, plan)}


def test_each_model_has_its_reconstruction_and_its_numbers(sheets, scene, tmp_path):
    images, views = scene
    path = tmp_path / "new" / "c.png"
    assert draw_comparison(images, views, mean=MEAN, std=STD, path=path, title="t") == [path]
    assert sorted(file.name for file in path.parent.iterdir()) == ["c.png"]
    [(columns, options)] = sheets
    assert [column.name for column in columns] == ["input", "masked", "first", "second"]
    tones = choose_tones(images, MEAN, STD)
    true = tones.paint(images)
    assert torch.equal(columns[0].pictures, true)
    for column, view in zip(columns[2:], views.values(), strict=True):
        torch.testing.assert_close(column.pictures, tones.paint(view.pasted))
        honest = score(images, view.pasted, view.hidden, STD)
        assert column.caption == f"MSE {honest.masked_mse:.3g}, R² {honest.r2:.2f}"
        assert torch.equal(column.pictures[~view.hidden], true[~view.hidden])
    masked, hidden = columns[1].pictures, views["first"].hidden
    assert torch.equal(masked[~hidden], true[~hidden]) and len(masked[hidden].unique(dim=0)) == 1
    assert columns[2].caption != columns[3].caption
    caption = " ".join(options["caption"])
    assert "same 3 images" in caption and "50% of patches masked" in caption and "estimated" in caption


def test_caption_of_pixel_targets_mentions_no_estimate(sheets, scene, tmp_path):
    images, views = scene
    draw_comparison(images, {"b": views["second"]}, mean=MEAN, std=STD, path=tmp_path / "c.png", title="t")
    assert "estimated" not in " ".join(sheets[0][1]["caption"])


@pytest.mark.parametrize(("count", "shares"), [(5, [5]), (6, [5, 1]), (11, [5, 5, 1])])
def test_many_models_go_on_further_sheets(sheets, scene, tmp_path, count, shares):
    images, views = scene
    many = {f"run {number} with a rather long name": views["first"] for number in range(count)}
    paths = draw_comparison(images, many, mean=MEAN, std=STD, path=tmp_path / "c.png", title="t")
    assert [path.name for path in paths] == ["c.png", "c-2.png", "c-3.png"][: len(shares)]
    assert all(path.is_file() for path in paths)
    assert [len(columns) - 2 for columns, _ in sheets] == shares
    assert all([column.name for column in columns[:2]] == ["input", "masked"] for columns, _ in sheets)
    names = [column.name for columns, _ in sheets for column in columns[2:]]
    assert len(set(names)) == count and all("…" in name for name in names)
