"""The low-pass target on single waves and against a slow Fourier transform."""

import cmath
import math

import pytest
import torch
from pieces import batch_of
from torch import Tensor
from torch.testing import assert_close

from mae.modalities.images.patches import patchify
from mae.targets.low_pass import LowPassTarget, low_pass
from mae.targets.pixels import PixelTarget


def wave(cycles_down: int, cycles_across: int, height: int, width: int) -> Tensor:
    y, x = torch.arange(height).double().unsqueeze(-1), torch.arange(width).double()
    phase = cycles_down * y / height + cycles_across * x / width
    return torch.cos(2 * math.pi * phase + 0.3).float().expand(1, 3, height, width)


def low_pass_by_loops(image: Tensor, cutoff: float) -> Tensor:
    """Of one channel: every frequency's amplitude from its definition, those in the circle put together again."""
    height, width = image.shape
    result = torch.zeros(height, width, dtype=torch.float64)
    pixels = [(y, x) for y in range(height) for x in range(width)]
    for v, u in pixels:
        cycles = min(v, height - v) / height, min(u, width - u) / width
        if math.hypot(*cycles) > 0.5 * cutoff:
            continue
        turns = {(y, x): cmath.exp(2j * math.pi * (v * y / height + u * x / width)) for y, x in pixels}
        amplitude = sum(float(image[at]) * turn.conjugate() for at, turn in turns.items()) / len(pixels)
        for at, turn in turns.items():
            result[at] += (amplitude * turn).real
    return result


@pytest.mark.parametrize("cutoff", [0.01, 40 / 112, 1.0])
def test_a_constant_image_stays(cutoff: float) -> None:
    images = torch.full((2, 1, 6, 9), -1.7)
    assert_close(low_pass(images, cutoff), images, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("down", "across", "kept"), [(3, 0, True), (0, 3, True), (4, 0, False), (0, 4, False)])
def test_a_wave_stays_below_the_cut_off_and_goes_above(down: int, across: int, kept: bool) -> None:
    images = wave(down, across, 16, 16)
    expected = images if kept else torch.zeros_like(images)
    assert_close(low_pass(images, 3.5 / 8), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("down", "across", "kept"), [(3, 3, True), (4, 3, False), (-3, 3, True), (-4, 3, False)])
def test_the_circle_is_round(down: int, across: int, kept: bool) -> None:
    images = wave(down, across, 16, 16)  # radius 4.24 or 5: a square of half-side 4.5 would keep all of them
    expected = images if kept else torch.zeros_like(images)
    assert_close(low_pass(images, 4.5 / 8), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("down", "across", "kept"), [(40, 0, True), (24, 32, True), (41, 0, False), (24, 33, False)])
def test_the_default_is_radius_40_of_224_pixels_edge_included(down: int, across: int, kept: bool) -> None:
    images = wave(down, across, 224, 224)
    target = LowPassTarget().picture(images)
    assert_close(target, images if kept else torch.zeros_like(images), rtol=0, atol=1e-4)


def test_the_circle_is_in_cycles_per_pixel_where_sides_differ() -> None:
    for down, across, kept in ((1, 0, True), (2, 0, False), (0, 3, True), (0, 4, False)):
        images = wave(down, across, 8, 16)  # 1/8 and 3/16 cycles per pixel are inside 0.2; 2/8 and 4/16 are not
        expected = images if kept else torch.zeros_like(images)
        assert_close(low_pass(images, 0.4), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(5, 7), (4, 6), (6, 3), (1, 5)])
@pytest.mark.parametrize("cutoff", [0.3, 0.7, 1.0])
def test_it_is_that_of_a_slow_transform(cutoff: float, size: tuple[int, int]) -> None:
    images = torch.randn(1, 2, *size)
    filtered = low_pass(images, cutoff)
    for channel in range(2):
        expected = low_pass_by_loops(images[0, channel], cutoff)
        assert_close(filtered[0, channel].double(), expected, rtol=0, atol=1e-5)


def test_it_is_linear() -> None:
    one, other = torch.randn(2, 2, 3, 8, 8)
    together = low_pass(2 * one - 3 * other, 0.4)
    assert_close(together, 2 * low_pass(one, 0.4) - 3 * low_pass(other, 0.4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_pix", [True, False])
def test_target_and_deviation_are_the_pixel_targets_of_the_filtered_image(norm_pix: bool) -> None:
    images, tokens = torch.randn(2, 3, 8, 12), torch.tensor([[3, 0], [1, 5]])
    target = LowPassTarget(norm=norm_pix, cutoff=0.5)
    plain, filtered = PixelTarget(norm=norm_pix), low_pass(images, 0.5)
    assert not torch.allclose(filtered, images, atol=0.1)
    assert torch.equal(target(batch_of(images), tokens), plain(batch_of(filtered), tokens))
    if norm_pix:
        assert torch.equal(target.with_std(batch_of(images), tokens)[1], plain.with_std(batch_of(filtered), tokens)[1])
    else:
        assert target.with_std(batch_of(images), tokens)[1] is None
        assert torch.equal(target(batch_of(images)), patchify(filtered, (4, 4)))


def test_float32_under_autocast_and_from_half_precision() -> None:
    images = torch.randn(1, 3, 8, 8).bfloat16()
    expected = low_pass(images.float(), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        filtered = low_pass(images, 0.5)
    assert filtered.dtype == torch.float32 and torch.equal(filtered, expected)
