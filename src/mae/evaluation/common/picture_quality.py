"""How good a model's pictures of masked pixels are, beside pictures that take no learning."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, isnan, log10, nan

import torch
from jaxtyping import Bool, Float, Float64
from skimage.metrics import structural_similarity
from torch import Tensor
from torch.nn.functional import pad

from mae.core.types import MaskPlan
from mae.errors import MAEError, UsageError
from mae.evaluation.common.baselines import predict_mean_of_visible, predict_nearest_visible
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import reconstruct

_COUNT = "count"
_WINDOW = 7  # scikit-image's for SSIM


@dataclass(frozen=True, kw_only=True)
class PictureQuality:
    """Distance of pictures from the true images over the masked pixels of a whole set, all channels alike.

    Pixel values are those before normalisation, in [0, 1] for integer data. Pictures are not clipped. Values that are
    NaN for want of data count nowhere; a window of the similarity that reaches them sees the same in both pictures.

    Attributes:
        mse: mean squared error.
        psnr: `10 log10(data_range^2 / mse)` in dB, of the set's one `mse`; None where that is 0, for infinity.
        ssim: structural similarity (Wang et al. 2004) as scikit-image computes it for each image and channel, a
            uniform window of 7 x 7 or the largest odd one that fits; the mean of its map over the masked pixels, so
            visible ones count only where a window reaches them. At most 1; None where a side is below 3 pixels.
        laplacian: mean absolute error of the 5-point Laplacian, the border repeated outwards: how wrong the fine
            detail is, seams between patches included.
    """

    mse: float
    psnr: float | None
    ssim: float | None
    laplacian: float


def reconstruction_quality(
    model: MaskedAutoencoder,
    images_and_plans: Iterable[tuple[Tensor, MaskPlan]],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    data_range: float,
) -> dict[str, PictureQuality]:
    """Measure the pictures a model makes of masked pixels; several batches count as one large set.

    Each picture shows the true pixels where they are visible:

    - `model`: what the model makes of the visible patches, and nothing else (`Reconstruction.pasted`);
    - `with_true_statistics`: of a norm-pix model alone, each masked patch given its true mean and std. That
      is part of the answer: compare it with no honest picture (`Reconstruction.leaky`);
    - `mean_colour`: masked pixels get the mean colour of the image's visible ones;
    - `nearest_patch`: each masked patch is a copy of the nearest visible one.

    Args:
        model: predicts pixels, plain or norm-pix.
        images_and_plans: normalised images `[B, C, H, W]` with their masks on the same device.
        mean: what was subtracted from the images, one value a channel.
        std: what they were divided by then, one value a channel.
        data_range: distance of the lowest and highest possible value: 1 for data of 8 bits; for others, the range
            of these images' values.

    Raises:
        UsageError: there is no batch, a data range that is not above 0, or a model that predicts no pixels.
        MAEError: a picture with values that are not finite.
    """
    sums = PictureSums(model=model, mean=mean, std=std, data_range=data_range)
    return sums.quality(sums.of_batch(images, plan) for images, plan in images_and_plans)


@dataclass(frozen=True, kw_only=True, eq=False)
class PictureSums:
    """Errors of the pictures of a batch, and their sums over many."""

    model: MaskedAutoencoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_range: float

    def __post_init__(self) -> None:
        if not (isfinite(self.data_range) and self.data_range > 0):
            raise UsageError(
                f"data_range is {self.data_range}; expected the distance of two values, above 0 (data of 8 bits: 1)"
            )

    def of_batch(self, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> dict[str, Tensor]:
        """Of each picture the sums of a batch over its masked values, and how many of these there are."""
        scale, shift = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (self.std, self.mean))
        pictures, hidden = _pictures(self.model, images.float(), plan)
        images = images.float().cpu()  # first: MPS has no float64
        known, images = ~images.isnan(), images.nan_to_num(nan=0.0)
        hidden, true = hidden & known, images.double() * scale + shift
        sums = {_COUNT: hidden.sum()}
        for name, picture in pictures.items():
            drawn = torch.where(known, picture.cpu(), images).double() * scale + shift
            if not drawn.isfinite().all():
                raise MAEError(
                    f"the picture '{name}' holds values that are not finite; the model or an image is broken"
                )
            sums[name] = _sums(true, drawn, hidden, self.data_range)
        return sums

    def quality(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, PictureQuality]:
        """The quality of each picture over all batches."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            totals = {name: totals.get(name, 0) + sums for name, sums in batch.items()}
        if not totals:
            raise UsageError("no images to reconstruct; give at least one batch")
        count = int(totals.pop(_COUNT))
        if count == 0:
            raise UsageError(
                "no masked value of these images is known: they hold no data there, so nothing can be measured"
            )
        return {name: _quality((total / count).tolist(), self.data_range) for name, total in totals.items()}


def _pictures(
    model: MaskedAutoencoder, images: Float[Tensor, "B C H W"], plan: MaskPlan
) -> tuple[dict[str, Float[Tensor, "B C H W"]], Bool[Tensor, "B 1 H W"]]:
    """The pictures by name, normalised like the images, and which pixels are masked, on the CPU."""
    views = reconstruct(model, images, plan)
    pictures = {"model": views.pasted}
    if views.leaky is not None:
        pictures["with_true_statistics"] = views.leaky
    tokenizer, layout, plan = model.tokenizer, model.tokenizer.layout_of(images), plan.predict_all()
    patches = tokenizer.cut(images)
    guesses = {
        "mean_colour": predict_mean_of_visible(patches, plan, layout.channels),
        "nearest_patch": predict_nearest_visible(patches, plan, layout.grid),
    }
    for name, guess in guesses.items():
        guess = guess.nan_to_num(nan=0.0)  # of patches without data
        pictures[name] = tokenizer.join(torch.where(plan.hidden.unsqueeze(-1), guess, patches), layout)
    return pictures, views.hidden.unsqueeze(1).cpu()


def _sums(
    true: Float64[Tensor, "B C H W"],
    drawn: Float64[Tensor, "B C H W"],
    hidden: Bool[Tensor, "B C H W"],
    data_range: float,
) -> Float64[Tensor, " 3"]:
    """Squared errors, similarities and errors of the Laplacian, each summed over the masked values."""
    maps = ((drawn - true).square(), _similarity(true, drawn, data_range), _laplacian(drawn - true).abs())
    return torch.stack([(values * hidden).sum() for values in maps])


def _similarity(
    true: Float64[Tensor, "B C H W"], drawn: Float64[Tensor, "B C H W"], data_range: float
) -> Float64[Tensor, "B C H W"]:
    """The map of the structural similarity; not a number where no window of 3 pixels fits."""
    side = min(*true.shape[2:], _WINDOW)
    if side < 3:
        return torch.full_like(true, nan)
    options = {"win_size": side - 1 + side % 2, "data_range": data_range, "channel_axis": 0, "full": True}
    pairs = zip(true.numpy(), drawn.numpy(), strict=True)
    return torch.stack([torch.from_numpy(structural_similarity(x, y, **options)[1]) for x, y in pairs])


def _laplacian(values: Float64[Tensor, "B C H W"]) -> Float64[Tensor, "B C H W"]:
    x = pad(values, (1, 1, 1, 1), mode="replicate")
    return x[..., :-2, 1:-1] + x[..., 2:, 1:-1] + x[..., 1:-1, :-2] + x[..., 1:-1, 2:] - 4 * values


def _quality(means: list[float], data_range: float) -> PictureQuality:
    mse, ssim, laplacian = means
    return PictureQuality(
        mse=mse,
        psnr=10 * log10(data_range**2 / mse) if mse > 0 else None,
        ssim=None if isnan(ssim) else ssim,
        laplacian=laplacian,
    )
