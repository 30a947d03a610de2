"""Histograms of oriented gradients against slow loops and on images whose answer is known."""

from math import atan2, cos, hypot, pi, sin

import pytest
import torch
from pieces import batch_of
from torch import Tensor
from torch.testing import assert_close

from mae.core.types import Layout
from mae.errors import UsageError
from mae.targets.hog import HogTarget


def by_loops(image: Tensor, bins: int, cell: int, patch: int) -> Tensor:
    """Of one image `[C, H, W]`: gradients, bins, cells and norms one by one, as `[N, P]`."""
    channels, height, width = image.shape
    sums = torch.zeros(channels, bins, height // cell, width // cell, dtype=torch.float64)

    def at(channel: int, row: int, column: int) -> float:  # the border mirrored
        row, column = abs(row), abs(column)
        row, column = (
            (2 * (height - 1) - row if row >= height else row),
            (2 * (width - 1) - column if column >= width else column),
        )
        return float(image[channel, row, column])

    for c in range(channels):
        for y in range(height):
            for x in range(width):
                gx = sum(w * (at(c, y + d, x - 1) - at(c, y + d, x + 1)) for d, w in ((-1, 1), (0, 2), (1, 1)))
                gy = sum(w * (at(c, y - 1, x + d) - at(c, y + 1, x + d)) for d, w in ((-1, 1), (0, 2), (1, 1)))
                number = int(atan2(gx, gy) / pi * bins // 1) % bins
                sums[c, number, y // cell, x // cell] += hypot(gx, gy)
    norms = sums.square().sum(dim=1, keepdim=True).sqrt().clamp(min=1e-12)
    cells, n = sums / norms, patch // cell
    return torch.stack(
        [
            cells[:, :, row * n : (row + 1) * n, column * n : (column + 1) * n].flatten()
            for row in range(height // patch)
            for column in range(width // patch)
        ]
    )


def ramp(angle: float, size: int = 16) -> Tensor:
    y, x = torch.meshgrid(torch.arange(size).float(), torch.arange(size).float(), indexing="ij")
    return (cos(angle) * x + sin(angle) * y).expand(1, 1, size, size)


@pytest.mark.parametrize(("bins", "cell", "patch"), [(9, 4, 8), (5, 2, 4), (9, 8, 8)])
def test_it_is_that_of_loops(bins: int, cell: int, patch: int) -> None:
    images = torch.randn(2, 3, 16, 24)
    values = HogTarget(bins=bins, cell=cell)(batch_of(images, patch))
    for image, found in zip(images, values, strict=True):
        assert_close(found.double(), by_loops(image, bins, cell, patch), rtol=1e-4, atol=1e-5)


def test_a_ramp_has_one_direction_and_turned_half_around_the_same() -> None:
    target = HogTarget(cell=4)
    for angle in (0.3, 1.1, 2.2):
        inside = target.histograms(ramp(angle, 24))[..., 1:-1, 1:-1]  # the mirrored border bends it
        assert_close(inside.amax(dim=2), torch.ones_like(inside.amax(dim=2)))
        assert torch.equal(inside.argmax(dim=2), target.histograms(ramp(angle + pi, 24))[..., 1:-1, 1:-1].argmax(dim=2))


def test_contrast_and_sign_do_not_matter() -> None:
    images, target = torch.randn(2, 3, 16, 16), HogTarget(cell=4)
    assert_close(target.histograms(3 * images), target.histograms(images), rtol=1e-4, atol=1e-5)
    assert_close(target.histograms(-images), target.histograms(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [2.0, 0.1, -1.804, 2.117904])
def test_what_is_flat_is_zero_whatever_its_value(value: float) -> None:
    images = torch.full((2, 3, 16, 16), value)
    images[1, :, :, 12:] = torch.rand(3, 16, 4)
    histograms = HogTarget(cell=4).histograms(images)
    assert histograms[0].abs().max() == 0
    assert histograms[1, ..., :2].abs().max() == 0  # flat cells beside others
    assert histograms[1, ..., 3].any()


def test_at_the_mirrored_border_nothing_changes_across_it() -> None:
    directions = HogTarget(cell=1, bins=8).histograms(torch.randn(2, 1, 16, 16)).argmax(dim=2)
    assert directions[..., (0, -1), 1:-1].unique().tolist() == [4]  # from left to right, a quarter turn
    assert directions[..., 1:-1, (0, -1)].unique().tolist() == [0]


def test_the_papers_sizes_give_108_values() -> None:
    assert HogTarget().width(Layout(size=(224, 224), patch=(16, 16), channels=3)) == 108


@pytest.mark.parametrize("size", [(1, 8), (8, 1)], ids=str)
def test_images_one_pixel_high_or_wide_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=f"images of {size[0]}x{size[1]} pixels have none along one side"):
        HogTarget(cell=1).width(Layout(size=size, patch=(1, 1), channels=3))
    assert HogTarget(cell=1)(batch_of(torch.randn(1, 3, 2, 2), 1)).isfinite().all()


def test_one_direction_is_refused() -> None:
    with pytest.raises(UsageError, match="target_bins is 1; expected greater than or equal to 2"):
        HogTarget(bins=1)


def test_a_cell_that_does_not_divide_the_patch_is_refused() -> None:
    with pytest.raises(UsageError, match="target_cell is 8, and patches have 4x4 pixels"):
        HogTarget().width(Layout(size=(32, 32), patch=(4, 4), channels=3))
