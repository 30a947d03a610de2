"""Power of images by spatial frequency, the error of a reconstruction by it, and how far pixels are correlated."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import e

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from mae.core.types import MaskPlan
from mae.errors import UsageError
from mae.evaluation.common.baselines import predict_mean_of_visible
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import reconstruct

_SHORTEST = 4
"""The upper wavelength of the finest band, in pixels; each further band reaches to twice the one before."""


@dataclass(frozen=True, kw_only=True)
class FrequencyError:
    """The error of masked pixels by wavelength, the longest band first; values are those of normalised images.

    Attributes:
        bands: what the bands are, by their wavelengths in pixels.
        power: mean square per masked value that guessing the mean colour of the visible pixels leaves in each band:
            what there is to be predicted, under the same mask.
        error: mean square per masked value that the model leaves. Bands add up to its mean squared error.
    """

    bands: tuple[str, ...]
    power: tuple[float, ...]
    error: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the model's error, what lies in each band."""
        total = sum(self.error)
        return tuple(each / total if total else 0.0 for each in self.error)

    @property
    def left(self) -> tuple[float, ...]:
        """The error over the power of the same band: 0 is perfect, 1 no better than the mean colour."""
        return tuple(
            error / power if power else float("nan") for error, power in zip(self.error, self.power, strict=True)
        )


def band_names(height: int, width: int) -> tuple[str, ...]:
    """The bands of images of a size, the longest first; the mean of an image belongs to it."""
    edges = _edges(height, width)
    inner = [f"{low}-{high} px" for high, low in zip(edges, edges[1:], strict=False)]
    return (f"over {edges[0]} px", *inner, f"up to {_SHORTEST} px")


def band_power(images: Float[Tensor, "B C H W"]) -> Float64[Tensor, " bands"]:
    """Mean square of the values by radial wavelength, summed over images and channels; bands as in `band_names`.

    By Parseval's theorem they add up to the sum over images and channels of the mean square.
    """
    height, width = images.shape[2:]
    power = torch.fft.fft2(images.double()).abs().square().sum(dim=(0, 1)) / (height * width) ** 2
    bands = _band_of(height, width)
    return torch.zeros(len(_edges(height, width)) + 1, dtype=torch.float64).index_add(0, bands, power.flatten())


@torch.no_grad()
def measure_frequency_error(
    model: MaskedAutoencoder, images_and_plans: Iterable[tuple[Tensor, MaskPlan]]
) -> FrequencyError:
    """The error of what a model makes of masked pixels by wavelength; several batches count as one large set.

    What is not masked has no error. The edges of masked patches spread power over all wavelengths, of the error as of
    what is there to be predicted, so the two are compared under the same masks. Values without data have no error.

    Args:
        model: predicts pixels, plain or norm-pix, see `reconstruct`.
        images_and_plans: normalised images `[B, C, H, W]` with their masks.

    Raises:
        UsageError: there is no batch, or a model that predicts no pixels.
    """
    sums: Tensor | None = None
    names: tuple[str, ...] = ()
    count = 0
    for images, plan in images_and_plans:
        images = images.float()
        view, tokenizer, layout = reconstruct(model, images, plan), model.tokenizer, model.tokenizer.layout_of(images)
        patches, everywhere = tokenizer.cut(images), plan.predict_all()
        mean = tokenizer.join(predict_mean_of_visible(patches, everywhere, layout.channels), layout)
        masked = view.hidden.unsqueeze(1) & ~images.isnan()
        errors = [torch.where(masked, guess - images, 0).cpu() for guess in (mean.nan_to_num(nan=0.0), view.pasted)]
        pixels = images.shape[2] * images.shape[3]
        found = torch.stack([band_power(error) for error in errors]) * pixels
        sums, count = found if sums is None else sums + found, count + int(masked.sum())
        names = band_names(images.shape[2], images.shape[3])
    if sums is None or count == 0:
        raise UsageError("no masked values to measure the error of; give at least one batch of images with data")
    power, error = (sums / count).tolist()
    return FrequencyError(bands=names, power=tuple(power), error=tuple(error))


@dataclass(frozen=True, kw_only=True, eq=False)
class Correlation:
    """How alike pixels are by their distance.

    Attributes:
        values: correlation of pixels 0, 1, 2 and so on apart, all directions and channels alike; the first is 1.
        length: the distance in pixels where it falls to 1 / e, linear between whole pixels; None where it never does,
            or where images are constant.
    """

    values: tuple[float, ...]
    length: float | None


@torch.no_grad()
def measure_correlation(batches: Iterable[Tensor]) -> Correlation:
    """The correlation of pixels by distance over batches `[B, C, H, W]` of one size, up to half of the shorter side.

    Each image and channel has its own mean taken off; then covariances are means over all pairs of pixels that are
    known and so far apart, images of more contrast counting more.

    Raises:
        UsageError: there is no batch.
    """
    totals: tuple[Tensor, Tensor] | None = None
    for batch in batches:
        found = _lagged_sums(batch.cpu().double())
        totals = found if totals is None else (totals[0] + found[0], totals[1] + found[1])
        height, width = batch.shape[2:]
    if totals is None:
        raise UsageError("no images to measure the correlation of; give at least one batch")
    covariance, pairs = totals
    rows, columns = (torch.fft.fftfreq(2 * side, 1 / (2 * side)) for side in (height, width))
    distance = torch.hypot(rows[:, None], columns[None]).round().long().flatten()
    reach = min(height, width) // 2 + 1
    near = distance < reach
    sums = [torch.zeros(reach, dtype=torch.float64).index_add(0, distance[near], of.flatten()[near]) for of in totals]
    by_distance = sums[0] / sums[1].clamp(min=1)
    if not by_distance[0] > 0:
        return Correlation(values=(1.0,), length=None)
    values = (by_distance / by_distance[0]).tolist()
    return Correlation(values=tuple(values), length=_falls_to(values, 1 / e))


def _lagged_sums(images: Float64[Tensor, "B C H W"]) -> tuple[Float64[Tensor, "h w"], Float64[Tensor, "h w"]]:
    """Products of values a lag apart, summed over pairs of known pixels, and the number of pairs, by lag."""
    known = ~images.isnan()
    mean = images.nanmean(dim=(2, 3), keepdim=True)
    centred = torch.where(known, images - mean, 0)
    size = 2 * images.shape[2], 2 * images.shape[3]  # room enough that no pixel meets one from the other side

    def of(values: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(values, s=size).abs().square().sum(dim=(0, 1))
        return torch.fft.irfft2(spectrum, s=size)

    return of(centred), of(known.double()).round()


def _falls_to(values: list[float], level: float) -> float | None:
    """Where a curve that begins above a level first falls to it."""
    for place, (before, after) in enumerate(zip(values, values[1:], strict=False)):
        if after <= level:
            return place + (before - level) / (before - after)
    return None


def _edges(height: int, width: int) -> list[int]:
    """Wavelengths between the bands, the longest first."""
    edges = [_SHORTEST]
    while 2 * edges[-1] < max(height, width):
        edges.append(2 * edges[-1])
    return edges[::-1]


def _band_of(height: int, width: int) -> Int64[Tensor, " frequencies"]:
    """The band of each frequency of `fft2`."""
    edges = _edges(height, width)
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64) for side in (height, width))
    frequency = torch.hypot(rows[:, None], columns[None]).flatten()
    limits = torch.tensor([1 / edge for edge in edges], dtype=torch.float64)
    return torch.bucketize(frequency, limits, right=True)  # a wavelength of just 8 pixels is of 4-8
