"""The sheet of several models: each in its column, all under one mask, the numbers its own."""

import pytest
import torch

from mae.errors import UsageError
from mae.masking.random import RandomMasking
from mae.report import comparison
from mae.report.comparison import draw_comparison
from mae.report.reconstruction import reconstruct, score
from mae.report.tones import choose_tones

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
    """Two models that differ, images, and a plan that is no model's own."""
    first, second = small_model(norm_pix=True), small_model(norm_pix=False)
    images = blocky_images(batch=3)
    plan = RandomMasking(ratio=0.5).plan((8, 8), torch.tensor([5, 6, 7]))
    return {"first": first, "second": second}, images, plan


def test_each_model_has_its_reconstruction_and_its_numbers(sheets, scene, tmp_path):
    models, images, plan = scene
    path = tmp_path / "new" / "c.png"
    assert draw_comparison(models, images, plan, mean=MEAN, std=STD, path=path, title="t") == [path]
    assert sorted(file.name for file in path.parent.iterdir()) == ["c.png"]
    [(columns, options)] = sheets
    assert [column.name for column in columns] == ["input", "masked", "first", "second"]
    tones = choose_tones(images, MEAN, STD)
    true = tones.paint(images)
    assert torch.equal(columns[0].pictures, true)
    for column, model in zip(columns[2:], models.values(), strict=True):
        views = reconstruct(model, images, plan)
        torch.testing.assert_close(column.pictures, tones.paint(views.pasted))
        honest = score(images, views.pasted, views.hidden, STD)
        assert column.caption == f"MSE {honest.masked_mse:.3g}, R² {honest.r2:.2f}"
        assert torch.equal(column.pictures[~views.hidden], true[~views.hidden])
    masked = columns[1].pictures
    assert torch.equal(masked[~views.hidden], true[~views.hidden]) and len(masked[views.hidden].unique(dim=0)) == 1
    assert columns[2].caption != columns[3].caption
    caption = " ".join(options["caption"])
    assert "same 3 images" in caption and "50% of patches hidden" in caption and "estimated" in caption


def test_a_caption_of_plain_models_speaks_of_no_estimate(sheets, scene, tmp_path):
    models, images, plan = scene
    draw_comparison({"b": models["second"]}, images, plan, mean=MEAN, std=STD, path=tmp_path / "c.png", title="t")
    assert "estimated" not in " ".join(sheets[0][1]["caption"])


@pytest.mark.parametrize(("count", "shares"), [(5, [5]), (6, [5, 1]), (11, [5, 5, 1])])
def test_many_models_go_on_further_sheets(sheets, scene, tmp_path, count, shares):
    models, images, plan = scene
    many = {f"arm {number} with a rather long name": models["first"] for number in range(count)}
    paths = draw_comparison(many, images[:1], take(plan, 1), mean=MEAN, std=STD, path=tmp_path / "c.png", title="t")
    assert [path.name for path in paths] == ["c.png", "c-2.png", "c-3.png"][: len(shares)]
    assert all(path.is_file() for path in paths)
    assert [len(columns) - 2 for columns, _ in sheets] == shares
    assert all([column.name for column in columns[:2]] == ["input", "masked"] for columns, _ in sheets)
    names = [column.name for columns, _ in sheets for column in columns[2:]]
    assert len(set(names)) == count and all("…" in name for name in names)


def take(plan, count):
    parts = {name: getattr(plan, name) for name in ("visible", "predicted", "hidden")}
    return type(plan)(**{name: part[:count] for name, part in parts.items()})


def test_a_model_that_predicts_no_pixels_is_refused(scene, tmp_path):
    models, images, plan = scene
    models["second"].target = torch.nn.Identity()
    with pytest.raises(UsageError, match="predicts Identity, which is no picture"):
        draw_comparison(models, images, plan, mean=MEAN, std=STD, path=tmp_path / "c.png", title="t")
    assert list(tmp_path.iterdir()) == []
