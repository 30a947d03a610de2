"""The PNG: pixel by pixel where it matters, and there whole or not at all."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from mae.errors import MAEError
from mae.modalities.images.pictures import score
from mae.models.reconstruction import reconstruct
from mae.report.figures import panels
from mae.report.figures.panels import draw_panels
from mae.report.figures.tones import choose_tones, error_scale


def read(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def holds(page: np.ndarray, cell: np.ndarray) -> bool:
    """Whether the picture stands somewhere on the page, to a level of rounding."""
    height, width = cell.shape[:2]
    for top in range(page.shape[0] - height + 1):
        starts = np.abs(page[top, : page.shape[1] - width + 1].astype(int) - cell[0, 0].astype(int)).max(-1) <= 1
        for left in starts.nonzero()[0]:
            if np.abs(page[top : top + height, left : left + width].astype(int) - cell.astype(int)).max() <= 1:
                return True
    return False


def enlarged(picture: torch.Tensor, times: int) -> np.ndarray:
    """[C, H, W] in [0, 1] as 8-bit [h, w, 3]."""
    whole = picture.clamp(0, 1).repeat_interleave(times, 1).repeat_interleave(times, 2).expand(3, -1, -1)
    return (whole.permute(1, 2, 0) * 255).round().byte().numpy()


@pytest.fixture
def sheets(monkeypatch) -> list[tuple]:
    """The columns and the caption of each sheet, which is written too."""
    found: list[tuple] = []
    original = panels.write_sheet

    def write(columns, **options):
        found.append(({column.name: column for column in columns}, " ".join(options["caption"])))
        original(columns, **options)

    monkeypatch.setattr(panels, "write_sheet", write)
    return found


def views_of(model, images):
    return reconstruct(model, images, model.plan(images, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_view_is_drawn_enlarged_and_crisp_above_its_scores(
    small_model, blocky_images, tmp_path, sheets, norm_pix, channels
):
    model, images = small_model(norm_pix=norm_pix, in_chans=channels), blocky_images(channels=channels)
    mean, std, path = (0.5,) * channels, (0.25,) * channels, tmp_path / "new" / "p.png"
    views = views_of(model, images)
    draw_panels(images, views, mean=mean, std=std, path=path, title=r"$\no formula$")
    page, [(_, caption)] = read(path), sheets
    for pictures in (images, views.pasted, views.full, *([] if views.leaky is None else [views.leaky])):
        for picture in pictures:
            assert holds(page, enlarged(picture * 0.25 + 0.5, 6))  # 32 pixels become 192
    assert "75% of patches masked" in caption
    for picture in (views.pasted, views.filled, views.leaky):
        if picture is not None:
            result = score(images, picture, views.hidden, std)
            assert f"{result.masked_mse:.3g}" in caption and f"R² {result.r2:.2f}" in caption
    assert ("with nothing predicted" in caption) == ("given away" in caption) == norm_pix


@pytest.mark.parametrize("channels", [2, 13])
def test_other_channels_are_drawn_and_the_caption_says_so(small_model, blocky_images, tmp_path, sheets, channels):
    model, images = small_model(norm_pix=True, in_chans=channels), blocky_images(channels=channels)
    mean, std = (1000.0,) * channels, (300.0,) * channels
    draw_panels(images, views_of(model, images), mean=mean, std=std, path=tmp_path / "p.png", title="bands")
    [(_, text)] = sheets
    assert f"of {channels}" in text and ("as grey" in text) == (channels == 2)
    assert "estimated from visible" in text and "R²" in text and "Masked MSE in pixels" in text


def test_visible_patches_are_blank_in_the_error_and_masked_ones_covered(small_model, blocky_images, tmp_path, sheets):
    images = blocky_images()
    views = views_of(small_model(norm_pix=True), images)
    draw_panels(images, views, mean=(0.5,) * 3, std=(0.25,) * 3, path=tmp_path / "p.png", title="")
    [(columns, _)], hidden = sheets, views.hidden
    assert (columns["error"].pictures[~hidden] == 1).all()
    assert columns["error"].bar is not None
    assert (columns["error"].pictures[hidden] != 1).any(dim=-1).all()
    assert len(columns["masked"].pictures[hidden].unique(dim=0)) == 1
    assert torch.equal(columns["masked"].pictures[~hidden], columns["input"].pictures[~hidden])
    assert "statistics from visible patches" in columns["reconstruction"].caption
    assert "leaks brightness and contrast" in columns["leaky reconstruction"].caption


@pytest.mark.parametrize(("height", "width"), [(8, 16), (400, 40), (1000, 800)])
def test_odd_sizes_are_drawn(blocky_images, tmp_path, height, width):
    from mae.report.figures.sheet import Column, write_sheet

    column = Column(name="n", caption="", pictures=torch.rand(1, height, width, 3))
    write_sheet([column, column], title="t " * 80, caption=["first", "second " * 60], path=tmp_path / "p.png")
    assert max(read(tmp_path / "p.png").shape) < 1200


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(small_model, blocky_images, tmp_path, monkeypatch):
    def half(self: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    (tmp_path / "p.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half)
    images = blocky_images()
    views = views_of(small_model(norm_pix=False), images)
    arguments = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "title": "t"}
    with pytest.raises(MAEError, match=r"p\.png: No space left"):
        draw_panels(images, views, path=tmp_path / "p.png", **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]
    assert (tmp_path / "p.png").read_bytes() == b"old"
    with pytest.raises(MAEError, match="cannot write"):
        draw_panels(images, views, path=tmp_path / "p.png" / "x.png", **arguments)


def test_matplotlib_is_not_imported_before_it_is_needed():
    code = "import sys, mae.report.figures.panels, mae.report.figures.curves; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_values_in_the_unit_range_are_shown_as_they_are(blocky_images):
    images = blocky_images()
    tones = choose_tones(images, (0.5,) * 3, (0.25,) * 3)
    assert tones.notes == ()
    torch.testing.assert_close(tones.paint(images).permute(0, 3, 1, 2), images * 0.25 + 0.5)
    assert tones.paint(images * 100).aminmax() == (0, 1)


def test_values_beyond_it_are_scaled_together_by_quantiles_of_the_input(blocky_images):
    images = blocky_images()
    tones = choose_tones(images, (500.0,) * 3, (250.0,) * 3)
    values = images * 250 + 500
    low, high = values.quantile(0.01), values.quantile(0.99)
    assert "beyond [0, 1]" in tones.notes[0]
    expected = ((values - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(tones.paint(images).permute(0, 3, 1, 2), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("value", [-0.1, 1.1])
def test_one_value_beyond_on_either_side_is_enough(value):
    images = torch.full((1, 3, 8, 8), 0.5)
    images[0, 0, 0, 0] = value
    assert "beyond [0, 1]" in choose_tones(images, (0.0,) * 3, (1.0,) * 3).notes[0]


@pytest.mark.parametrize(("channels", "scale", "offset"), [(1, 0.06, 0.0), (3, 0.2, 0.7), (1, 1e-6, 0.0)])
def test_values_in_a_small_part_of_it_are_scaled_together(blocky_images, channels, scale, offset):
    """As those of a camera of 12 bits in files of 16, which would be black."""
    images = (blocky_images(channels=channels) * 0.1 + 0.5).clamp(0, 1) * scale + offset
    images[0, :, :4, :4] = float("nan")
    mean, std = (offset + scale / 2,) * channels, (scale / 4,) * channels
    tones = choose_tones((images - mean[0]) / std[0], mean, std)
    assert f"span {float(images.nan_to_num(0).max() - images.nan_to_num(9).min()):.2%} of [0, 1]" in tones.notes[0]
    painted = tones.paint((images - mean[0]) / std[0])[images.isfinite().permute(0, 2, 3, 1).expand(-1, -1, -1, 3)]
    assert painted.min() == 0 and painted.max() == 1 and painted.std() > 0.1


@pytest.mark.parametrize(("value", "more"), [(0.0, 0.26), (0.7, 0.0), (0.7, 1e-7), (0.0, 0.0)])
def test_values_in_more_of_it_and_constant_ones_are_shown_as_they_are(value, more):
    images = torch.full((2, 1, 8, 8), value)
    images[0, 0, 0, 0] += more
    assert choose_tones(images, (0.0,), (1.0,)).notes == ()


def test_bands_are_scaled_each_by_itself(blocky_images):
    images = blocky_images(channels=5) * torch.tensor([1.0, 100, 0.01, 7, 7])[:, None, None]
    painted = choose_tones(images, (0.0,) * 5, (1.0,) * 5).paint(images)
    assert ((painted.flatten(0, 2) == 0).any(dim=0) & (painted.flatten(0, 2) == 1).any(dim=0)).all()


@pytest.mark.parametrize("value", [0.0, -3.0, 1e6])
def test_constant_images_and_zero_errors_divide_by_nothing(value):
    images = torch.full((1, 4, 8, 8), value)
    assert choose_tones(images, (0.0,) * 4, (1.0,) * 4).paint(images).isfinite().all()
    hidden = torch.ones(1, 8, 8, dtype=torch.bool)
    assert error_scale(torch.zeros(1, 8, 8), hidden) > 0
