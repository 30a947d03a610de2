"""The pixel target against plain arithmetic in float64."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from pieces import batch_of
from torch import Tensor
from torch.testing import assert_close

from mae.modalities.images.patches import patchify
from mae.targets.pixels import PixelTarget, known_patch_statistics, patch_statistics


def standardised_by_loops(patches: Tensor) -> Tensor:
    rows = []
    for values in patches.double().flatten(0, 1):
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)  # unbiased, as the official code has it
        rows.append((values - mean) / (variance + 1e-6) ** 0.5)
    return torch.stack(rows).reshape(patches.shape)


@pytest.mark.parametrize("patch", [(4, 4), (2, 8)])
def test_norm_pix_standardises_each_patch(patch: tuple[int, int]) -> None:
    images = torch.randn(2, 3, 8, 16) * 3 + 5
    target = PixelTarget(norm=True)(batch_of(images, patch))
    expected = standardised_by_loops(patchify(images, patch))
    assert_close(target.double(), expected, rtol=1e-5, atol=1e-5)


def test_plain_pixels_are_the_patches_themselves() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(PixelTarget(norm=False)(batch_of(images)), patchify(images, (4, 4)))


@pytest.mark.parametrize("norm_pix", [True, False])
def test_chosen_tokens_get_the_target_of_the_whole_grid(norm_pix: bool) -> None:
    images = torch.randn(2, 3, 8, 8)
    target = PixelTarget(norm=norm_pix)
    tokens = torch.tensor([[3, 0], [1, 2]])
    some, whole = target(batch_of(images), tokens), target(batch_of(images))
    for image in range(2):
        assert_close(some[image], whole[image, tokens[image]], rtol=0, atol=1e-6)


def test_a_flat_patch_gives_zeros_not_infinities() -> None:
    assert PixelTarget(norm=True)(batch_of(torch.full((1, 1, 4, 4), 7.0))).abs().max() == 0


def test_target_is_float32_whatever_the_images_are() -> None:
    for kind in (torch.bfloat16, torch.float16):
        images = torch.randn(1, 3, 8, 8).to(kind)
        assert PixelTarget(norm=True)(batch_of(images)).dtype == torch.float32


def test_statistics_undo_the_standardisation() -> None:
    images = torch.randn(2, 3, 8, 8)
    patches = patchify(images, (4, 4))
    mean, deviation = patch_statistics(patches)
    target = PixelTarget(norm=True)(batch_of(images))
    assert_close(target * deviation + mean, patches, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [None, torch.tensor([[3, 0], [1, 2]])])
def test_deviation_turns_an_error_of_the_target_into_one_of_pixels(tokens: Tensor | None) -> None:
    images, other = torch.randn(2, 2, 3, 8, 8) * 4 + 1
    target = PixelTarget()
    mean, deviation = patch_statistics(patchify(images, (4, 4), tokens))
    guess = patchify(other, (4, 4), tokens)  # pixels a decoder might have meant, as it would have to say them
    values, unit = target.with_std(batch_of(images), tokens)
    assert torch.equal(values, target(batch_of(images), tokens))
    error = ((guess - mean) / deviation - values) * unit
    assert_close(error, guess - patchify(images, (4, 4), tokens), rtol=1e-4, atol=1e-4)


def test_plain_pixels_have_no_deviation() -> None:
    assert PixelTarget(norm=False).with_std(batch_of(torch.randn(1, 3, 8, 8)))[1] is None


@pytest.mark.parametrize("norm", [True, False])
def test_to_pixels_undoes_the_target(norm: bool) -> None:
    batch, target = batch_of(torch.randn(2, 3, 8, 8) * 3 + 5), PixelTarget(norm=norm)
    assert target.to_pixels is not None and target.width(batch.layout) == 48
    assert_close(target.to_pixels(target(batch), batch), batch.cut(), rtol=1e-5, atol=1e-5)


def test_the_picture_is_the_image_itself() -> None:
    images = torch.randn(1, 3, 8, 8)
    assert PixelTarget().picture(images) is images


def test_missing_pixels_are_no_part_of_a_patch() -> None:
    images = torch.randn(2, 3, 8, 8) * 3 + 5
    images[torch.rand(2, 3, 8, 8) < 0.3] = torch.nan
    images[0, :, :4, :4] = torch.nan
    patches = patchify(images, (4, 4))
    values = patches.double().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's on the patch of which nothing is known
        mean, variance = (of(values, axis=-1, keepdims=True) for of in (np.nanmean, partial(np.nanvar, ddof=1)))
    expected = (values - mean) / np.sqrt(variance + 1e-6)
    found = PixelTarget()(batch_of(images, nodata="nan"))
    assert torch.equal(found.isnan(), patches.isnan())
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_with_all_pixels_there_the_statistics_are_the_usual_ones() -> None:
    patches = torch.randn(2, 5, 12) * 3 + 5
    for ours, usual in zip(known_patch_statistics(patches), patch_statistics(patches), strict=True):
        assert_close(ours, usual)
    lonely = torch.full((1, 1, 12), torch.nan)
    lonely[0, 0, 3] = 7
    assert [float(value) for value in known_patch_statistics(lonely)] == [7, pytest.approx(1e-3)]
