"""Power by wavelength and the correlation of pixels, of pictures whose answers are known."""

from math import exp, pi, sqrt

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter
from skimage import data
from tiny import images_for, tiny_model

from mae.core.types import MaskPlan
from mae.errors import UsageError
from mae.evaluation.common import spectrum
from mae.evaluation.common.picture_quality import reconstruction_quality
from mae.evaluation.common.spectrum import (
    band_names,
    band_power,
    measure_correlation,
    measure_frequency_error,
)

SIDE = 64


def wave(period: float, *, down: bool = False) -> torch.Tensor:
    line = torch.sin(2 * pi * torch.arange(SIDE) / period)
    picture = line.expand(SIDE, SIDE)
    return (picture.T if down else picture)[None, None]


def test_bands_have_names_by_wavelength():
    assert band_names(64, 64) == ("over 32 px", "16-32 px", "8-16 px", "4-8 px", "up to 4 px")
    assert band_names(8, 4) == ("over 4 px", "up to 4 px")


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("period", "band"), [(64, 0), (64 / 3, 1), (64 / 5, 2), (64 / 9, 3), (64 / 20, 4), (4, 4)])
def test_a_wave_has_its_power_in_one_band(period: float, band: int, down: bool):
    power = band_power(wave(period, down=down))
    assert power[band] == pytest.approx(0.5, rel=1e-5)
    assert float(power.sum()) == pytest.approx(0.5, rel=1e-5)


def test_a_plain_colour_is_of_the_longest_wavelength_and_bands_add_up():
    assert band_power(torch.full((1, 1, 16, 16), 3.0)).tolist() == pytest.approx([9, 0, 0])
    noise = torch.randn(3, 2, 24, 40, generator=torch.Generator().manual_seed(0))
    assert float(band_power(noise).sum()) == pytest.approx(float(noise.double().square().mean(dim=(2, 3)).sum()))


def test_the_error_of_a_wave_left_out_is_in_its_band(monkeypatch: pytest.MonkeyPatch):
    """A model that knows the long wave and misses the short one; nearly all is masked, so its edges matter little."""
    long, short = wave(64).repeat(1, 3, 1, 1), wave(64 / 9).repeat(1, 3, 1, 1)
    model = tiny_model(img_size=SIDE)
    plan = planned(model, long, visible=[0])

    class View:
        pasted = torch.where(hidden_of(model, long, plan), long, long + short)
        hidden = hidden_of(model, long, plan)[:, 0]

    monkeypatch.setattr(spectrum, "reconstruct", lambda *_: View)
    found = measure_frequency_error(model, [(long + short, plan)])
    assert found.bands[3] == "4-8 px" and found.shares[3] > 0.98
    assert found.left[3] == pytest.approx(1, abs=0.05) and found.left[0] < 0.01
    assert sum(found.shares) == pytest.approx(1)


def hidden_of(model, images: torch.Tensor, plan: MaskPlan) -> torch.Tensor:
    patches = model.tokenizer.cut(images)
    return model.tokenizer.join(plan.hidden.unsqueeze(-1).expand_as(patches), model.tokenizer.layout_of(images))


def planned(model, images: torch.Tensor, *, visible: list[int]) -> MaskPlan:
    mask = torch.ones(model.tokenizer.layout_of(images).num_tokens, dtype=torch.bool)
    mask[visible] = False
    return model.plan(images, mask=mask.unsqueeze(0))


@pytest.mark.parametrize("norm", [False, True])
def test_bands_add_up_to_the_mean_squared_error(norm: bool):
    model = tiny_model(norm_pix_loss=norm, nodata="nan").eval()
    images = images_for(model)
    plan = model.plan(images, generator=torch.Generator().manual_seed(0))
    images[0, :, :3] = torch.nan
    rows = (torch.tensor([0, 1]), torch.tensor([2]))
    found = measure_frequency_error(model, [(images[part], plan.take(part)) for part in rows])
    oracle = reconstruction_quality(model, [(images, plan)], mean=(0.0,) * 3, std=(1.0,) * 3, data_range=1.0)
    assert sum(found.error) == pytest.approx(oracle["model"].mse, rel=1e-5)
    assert sum(found.power) == pytest.approx(oracle["mean_colour"].mse, rel=1e-5)


def test_nothing_to_measure_is_refused():
    with pytest.raises(UsageError, match="at least one batch"):
        measure_frequency_error(tiny_model(), [])
    with pytest.raises(UsageError, match="at least one batch"):
        measure_correlation([])


@pytest.mark.parametrize("width", [1.5, 3.0, 6.0])
def test_noise_has_the_correlation_length_that_it_was_made_with(width: float):
    """White noise under a Gaussian of std s has the correlation exp(-d^2 / 4 s^2), which is 1 / e at 2 s."""
    noise = np.random.default_rng(0).normal(size=(4, 2, 256, 256))
    smooth = torch.from_numpy(gaussian_filter(noise, sigma=(0, 0, width, width), mode="wrap")).float()
    found = measure_correlation(smooth.split(2))
    assert found.length == pytest.approx(2 * width, rel=0.04)
    # Distances are rounded to whole pixels, and each image's own mean is taken off.
    assert found.values[: int(3 * width)] == pytest.approx(
        [exp(-((distance / (2 * width)) ** 2)) for distance in range(int(3 * width))], abs=0.05
    )


def test_the_correlation_is_that_of_a_slow_loop_and_skips_what_is_not_known():
    images = torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    images[0, 0, 1, 2] = images[1, 0, 4, 4:] = torch.nan
    centred = images - images.nanmean(dim=(2, 3), keepdim=True)
    places = [(row, column) for row in range(5) for column in range(7)]
    sums = [[0.0, 0] for _ in range(3)]
    for image in centred[:, 0]:
        for first in places:
            for second in places:
                apart = round(sqrt((first[0] - second[0]) ** 2 + (first[1] - second[1]) ** 2))
                product = float(image[first] * image[second])
                if apart < 3 and product == product:
                    sums[apart][0] += product
                    sums[apart][1] += 1
    means = [total / count for total, count in sums]
    assert measure_correlation([images.float()]).values == pytest.approx([mean / means[0] for mean in means], abs=1e-5)


def test_constant_images_have_no_length_and_photographs_have():
    assert measure_correlation([torch.ones(1, 3, 8, 8)]).length is None
    photo = torch.from_numpy(data.astronaut()).permute(2, 0, 1)[None, :, ::4, ::4].float()
    length = measure_correlation([photo]).length
    assert length is not None and 4 < length < 40
