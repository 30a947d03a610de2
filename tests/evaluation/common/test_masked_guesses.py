"""Guesses of masked pixels, on pictures that one of them knows."""

import pytest
import torch
from tiny import images_for, tiny_model

from mae.core.types import MaskRequest
from mae.errors import UsageError
from mae.evaluation.common.masked_guesses import fill_smoothly, measure_guesses
from mae.evaluation.common.picture_quality import reconstruction_quality
from mae.masks.random import RandomMasking

KEYS = torch.arange(3)


def test_a_plain_colour_is_filled_exactly_and_a_ramp_nearly():
    hidden = torch.rand(2, 12, 20, generator=torch.Generator().manual_seed(0)) < 0.75
    plain = torch.full((2, 3, 12, 20), 0.4)
    torch.testing.assert_close(fill_smoothly(plain, hidden), plain)
    ramp = torch.linspace(-1, 1, 20).expand(2, 1, 12, 20)
    error = (fill_smoothly(ramp, hidden) - ramp)[hidden.unsqueeze(1)]
    mean = (ramp - ramp.mean())[hidden.unsqueeze(1)]
    assert float(error.square().mean()) < 0.05 * float(mean.square().mean())


def test_no_masked_pixel_is_read_and_visible_ones_stay():
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 9, 13, generator=generator)
    hidden = torch.rand(2, 9, 13, generator=generator) < 0.6
    filled = fill_smoothly(images, hidden)
    other = torch.where(hidden.unsqueeze(1), torch.full_like(images, torch.nan), images)
    torch.testing.assert_close(fill_smoothly(other, hidden), filled, rtol=0, atol=0)
    assert torch.equal(filled[~hidden.unsqueeze(1).expand_as(images)], images[~hidden.unsqueeze(1).expand_as(images)])
    assert bool((fill_smoothly(images, torch.ones_like(hidden)) == 0).all())


def test_guesses_are_those_of_reconstruction_quality():
    model = tiny_model().eval()
    images = images_for(model)
    ratios = (0.25, 0.75)
    found = measure_guesses(
        model, [(images[:1], KEYS[:1]), (images[1:], KEYS[1:])], tokenizer=model.tokenizer, ratios=ratios
    )
    for guesses, ratio in zip(found, ratios, strict=True):
        assert guesses.ratio == ratio
        plan = RandomMasking(ratio=ratio).plan(MaskRequest(layout=model.tokenizer.layout, keys=KEYS))
        oracle = reconstruction_quality(model, [(images, plan)], mean=(0.0,) * 3, std=(1.0,) * 3, data_range=1.0)
        assert guesses.model == pytest.approx(oracle["model"].mse, rel=1e-5)
        assert guesses.mean_colour == pytest.approx(oracle["mean_colour"].mse, rel=1e-5)
        assert guesses.nearest_patch == pytest.approx(oracle["nearest_patch"].mse, rel=1e-5)


def test_interpolation_knows_smooth_pictures_and_not_noise():
    model = tiny_model(img_size=32).eval()
    across = torch.linspace(-1, 1, 32)
    smooth = (across[None] + across[:, None]).expand(3, 3, 32, 32)
    noise = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    of_smooth, of_noise = (
        measure_guesses(model, [(images, KEYS)], tokenizer=model.tokenizer, ratios=(0.5,))[0]
        for images in (smooth, noise)
    )
    assert of_smooth.interpolation < 0.5 * of_smooth.nearest_patch < of_smooth.mean_colour
    assert of_noise.interpolation > of_noise.mean_colour


def test_a_model_of_no_pixels_has_no_error_and_no_images_are_refused():
    model = tiny_model(target="hog", patch_size=(8, 8), img_size=32)
    images = images_for(model)
    [found] = measure_guesses(model, [(images, KEYS)], tokenizer=model.tokenizer, ratios=(0.5,))
    assert found.model is None and found.interpolation > 0
    with pytest.raises(UsageError, match="at least one batch"):
        measure_guesses(model, [], tokenizer=model.tokenizer, ratios=(0.5,))
