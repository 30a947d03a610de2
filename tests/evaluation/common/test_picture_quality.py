"""The quality of pictures against loops over pixels, scikit-image and SciPy, and what a model must and cannot reach."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from math import log10

import numpy as np
import pytest
import torch
from learning import noise, structured, trained
from scipy.ndimage import laplace
from skimage.metrics import peak_signal_noise_ratio
from tiny import tiny_model
from torch import Tensor, nn

from mae.core.types import Encoded, Layout, MaskPlan
from mae.errors import MAEError, UsageError
from mae.evaluation.common.picture_quality import PictureQuality, reconstruction_quality
from mae.masks.given import plan_from_mask
from mae.modalities.images.patches import patchify
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import reconstruct

PATCH, GRID, SIZE = (4, 6), (4, 3), (16, 18)
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
STATISTICS = {"mean": MEAN, "std": STD, "data_range": 1.0}


class Fixed(nn.Module):
    """A decoder that says the same whatever it is given."""

    def __init__(self, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Tensor:
        return self.answer


def model_for(*, norm_pix: bool, **changes: object) -> MaskedAutoencoder:
    return tiny_model(**({"img_size": SIZE, "patch_size": PATCH, "norm_pix_loss": norm_pix} | changes))


def blobs(batch: int, seed: int, size: tuple[int, int] = SIZE, channels: int = 3) -> Tensor:
    """Normalised images, smooth with some noise, their pixels mostly in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(batch, channels, 3, 3, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size, mode="bilinear")
    return (smooth + torch.randn(smooth.shape, generator=generator) * 0.05 - 0.5) / 0.25


def batches(model: MaskedAutoencoder, *sizes: int) -> list[tuple[Tensor, MaskPlan]]:
    images = [blobs(size, seed) for seed, size in enumerate(sizes)]
    return [(x, model.plan(x, generator=torch.Generator().manual_seed(len(x)))) for x in images]


def to_pixels(images: Tensor) -> np.ndarray:
    return images.double().numpy() * np.array(STD)[:, None, None] + np.array(MEAN)[:, None, None]


def hidden_pixels(plan: MaskPlan) -> np.ndarray:
    """[B, H, W]"""
    rows, columns = np.arange(SIZE[0]) // PATCH[0], np.arange(SIZE[1]) // PATCH[1]
    return plan.hidden.numpy().reshape(-1, *GRID)[:, rows[:, None], columns]


def slow_guesses(pixels: np.ndarray, hidden: np.ndarray) -> dict[str, np.ndarray]:
    """Mean colour and nearest patch of one image [C, H, W], pixel by pixel."""
    mean, nearest = pixels.copy(), pixels.copy()
    p, q = PATCH
    visible = [(r, c) for r in range(GRID[0]) for c in range(GRID[1]) if not hidden[r * p, c * q]]
    for y, x in zip(*hidden.nonzero(), strict=True):
        row, column = y // p, x // q
        distance = [(r - row) ** 2 + (c - column) ** 2 for r, c in visible]
        r, c = visible[distance.index(min(distance))]
        nearest[:, y, x] = pixels[:, r * p + y % p, c * q + x % q]
        mean[:, y, x] = [plane[~hidden].mean() for plane in pixels]
    return {"mean_colour": mean, "nearest_patch": nearest}


def slow_ssim(true: np.ndarray, drawn: np.ndarray, window: int, data_range: float) -> np.ndarray:
    """The map of one channel [H, W], window by window; borders reflected, sample variances."""
    half = window // 2
    padded = [np.pad(plane, half, mode="symmetric") for plane in (true, drawn)]
    result = np.empty_like(true)
    for y, x in np.ndindex(*true.shape):
        a, b = (plane[y : y + window, x : x + window].ravel() for plane in padded)
        covariance = np.cov(a, b)
        c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
        luminance = (2 * a.mean() * b.mean() + c1) / (a.mean() ** 2 + b.mean() ** 2 + c1)
        result[y, x] = luminance * (2 * covariance[0, 1] + c2) / (covariance[0, 0] + covariance[1, 1] + c2)
    return result


def slow_quality(
    true: list[np.ndarray], drawn: list[np.ndarray], hidden: list[np.ndarray], *, window: int = 7, data_range: float = 1
) -> dict[str, float]:
    """Over all images [C, H, W] of a set, one hidden value after the other."""
    squares, similarities, details = [], [], []
    for image, picture, mask in zip(true, drawn, hidden, strict=True):
        for a, b in zip(image, picture, strict=True):
            similarity = slow_ssim(a, b, window, data_range)
            detail = np.abs(laplace(b, mode="nearest") - laplace(a, mode="nearest"))
            for y, x in zip(*mask.nonzero(), strict=True):
                squares.append((a[y, x] - b[y, x]) ** 2)
                similarities.append(similarity[y, x])
                details.append(detail[y, x])
    mse = sum(squares) / len(squares)
    return {
        "mse": mse,
        "psnr": 10 * log10(data_range**2 / mse),
        "ssim": sum(similarities) / len(similarities),
        "laplacian": sum(details) / len(details),
    }


@pytest.mark.parametrize("norm_pix", [False, True])
def test_picture_quality_matches_plain_loops(norm_pix):
    model = model_for(norm_pix=norm_pix)
    pairs = batches(model, 1, 2)
    found = reconstruction_quality(model, iter(pairs), **STATISTICS)

    true, hidden, drawn = [], [], {name: [] for name in found}
    for images, plan in pairs:
        views = reconstruct(model, images, plan)
        true += list(to_pixels(images))
        hidden += list(hidden_pixels(plan))
        drawn["model"] += list(to_pixels(views.pasted))
        if norm_pix:
            drawn["with_true_statistics"] += list(to_pixels(views.leaky))
    for image, mask in zip(true, hidden, strict=True):
        for name, guess in slow_guesses(image, mask).items():
            drawn[name].append(guess)
    leaky = ["with_true_statistics"] if norm_pix else []
    assert list(found) == ["model", *leaky, "mean_colour", "nearest_patch"]
    for name, quality in found.items():
        expected = PictureQuality(**slow_quality(true, drawn[name], hidden))
        for number in ("mse", "psnr", "ssim", "laplacian"):
            assert getattr(quality, number) == pytest.approx(getattr(expected, number), rel=1e-4), (name, number)


def test_psnr_matches_skimage():
    model = model_for(norm_pix=False)
    images = blobs(2, 0)
    plan = plan_from_mask(torch.arange(12) > 0, batch=2, layout=model.config.layout)
    found = reconstruction_quality(model, [(images, plan)], **(STATISTICS | {"data_range": 3.5}))["mean_colour"]
    true, hidden = to_pixels(images), hidden_pixels(plan)
    guess = np.stack([slow_guesses(*pair)["mean_colour"] for pair in zip(true, hidden, strict=True)])
    true, guess = (x.transpose(0, 2, 3, 1)[hidden] for x in (true, guess))
    assert found.psnr == pytest.approx(peak_signal_noise_ratio(true, guess, data_range=3.5), rel=1e-6)


def test_a_larger_data_range_reaches_psnr_and_ssim_alone():
    model = model_for(norm_pix=False)
    pairs = batches(model, 2)
    found = [reconstruction_quality(model, pairs, **(STATISTICS | {"data_range": r}))["model"] for r in (1.0, 10.0)]
    assert found[1].psnr == pytest.approx(found[0].psnr + 20)
    assert found[1].ssim > found[0].ssim
    assert (found[1].mse, found[1].laplacian) == (found[0].mse, found[0].laplacian)


def test_a_perfect_picture():
    model, images = model_for(norm_pix=False), blobs(3, 0)
    model.decoder = Fixed(patchify(images, PATCH))
    found = reconstruction_quality(model, [(images, model.plan(images))], **STATISTICS)
    perfect = found["model"]
    assert (perfect.mse, perfect.psnr, perfect.laplacian) == (0, None, 0)
    assert perfect.ssim == pytest.approx(1, rel=1e-12)
    assert found["nearest_patch"].psnr is not None


def test_true_statistics_flatter_an_empty_prediction():
    model, images = model_for(norm_pix=True), blobs(8, 0)
    model.decoder = Fixed(torch.zeros(8, 12, 4 * 6 * 3))
    found = reconstruction_quality(model, [(images, model.plan(images))], **STATISTICS)
    assert found["with_true_statistics"].mse < 0.7 * found["mean_colour"].mse
    assert found["with_true_statistics"].mse < 0.7 * found["model"].mse


def test_visible_pixels_do_not_count():
    model = model_for(norm_pix=False)
    images, plan = batches(model, 2)[0]
    part = MaskPlan(visible=plan.visible, predicted=plan.predicted[:, :1], hidden=plan.hidden)
    whole = reconstruction_quality(model, [(images, plan)], **STATISTICS)
    assert reconstruction_quality(model, [(images, part)], **STATISTICS) == whole
    model.decoder = Fixed(torch.where(plan.hidden.unsqueeze(-1), patchify(images, PATCH), 1e3))
    assert reconstruction_quality(model, [(images, plan)], **STATISTICS)["model"].mse == 0


@pytest.mark.parametrize(("size", "window"), [((4, 4), 3), ((6, 8), 5), ((2, 8), None)])
def test_small_images_get_the_largest_window_that_fits(size, window):
    model = model_for(norm_pix=False, img_size=size, patch_size=(2, 2), mask_ratio=0.5)
    images = blobs(1, 0, size)
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    found = reconstruction_quality(model, [(images, plan)], **STATISTICS)["model"]
    assert found.mse > 0 and found.laplacian > 0
    if window is None:
        assert found.ssim is None
        return
    views = reconstruct(model, images, plan)
    lists = [list(to_pixels(images)), list(to_pixels(views.pasted)), list(views.hidden.numpy())]
    assert found.ssim == pytest.approx(slow_quality(*lists, window=window)["ssim"], rel=1e-6)


def test_one_channel():
    model = model_for(norm_pix=True, in_chans=1)
    images = blobs(2, 0, channels=1)
    found = reconstruction_quality(model, [(images, model.plan(images))], mean=(0.5,), std=(0.25,), data_range=1.0)
    assert set(found) == {"model", "with_true_statistics", "mean_colour", "nearest_patch"}


def test_no_batch_is_reported():
    with pytest.raises(UsageError, match="at least one batch"):
        reconstruction_quality(model_for(norm_pix=False), [], **STATISTICS)


@pytest.mark.parametrize("data_range", [0.0, -1.0, float("nan"), float("inf")])
def test_a_data_range_that_is_none_is_reported(data_range):
    model = model_for(norm_pix=False)
    with pytest.raises(UsageError, match="data_range"):
        reconstruction_quality(model, batches(model, 1), **(STATISTICS | {"data_range": data_range}))


def test_a_picture_that_is_not_finite_is_reported():
    model = model_for(norm_pix=False)
    model.decoder = Fixed(torch.full((1, 12, 72), torch.nan))
    with pytest.raises(MAEError, match="'model'.*not finite"):
        reconstruction_quality(model, batches(model, 1), **STATISTICS)


def test_the_numbers_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        PictureQuality(mse=1, psnr=0, ssim=1, laplacian=1).mse = 0


def trained_quality(draw: Callable[[torch.Generator], Tensor]) -> dict[str, PictureQuality]:
    """Of a small model trained on such images, on fresh ones."""
    model, generator = trained(draw)
    pairs = [(images := draw(generator), model.plan(images)) for _ in range(2)]
    return reconstruction_quality(model, pairs, mean=(0.0,) * 3, std=(1.0,) * 3, data_range=8.0)


@pytest.mark.slow
def test_a_trained_model_beats_the_mean_colour_on_structured_images():
    found = trained_quality(structured)
    assert found["model"].mse < 0.5 * found["mean_colour"].mse
    assert found["model"].psnr > found["mean_colour"].psnr + 3
    assert found["model"].ssim > found["mean_colour"].ssim


@pytest.mark.slow
def test_a_trained_model_does_not_beat_the_mean_colour_on_noise():
    found = trained_quality(noise)
    # The expected value, 0, is a better guess than a mean over 288 pixels, by a 288th.
    assert found["model"].mse > 0.99 * found["mean_colour"].mse
    assert found["nearest_patch"].mse == pytest.approx(2, rel=0.05)
