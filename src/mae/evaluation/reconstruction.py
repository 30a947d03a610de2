"""How good a model's pictures of hidden pixels are, beside pictures that take no learning."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite, isnan, log10, nan
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Float64
from skimage.metrics import structural_similarity
from torch import Tensor
from torch.nn.functional import pad

from mae.data.images import ImageSet
from mae.errors import MAEError, UsageError
from mae.evaluation.bench import THIS_MODEL, Gallery, Outcome
from mae.evaluation.features import computed_batches
from mae.evaluation.yardsticks import predict_mean_of_visible, predict_nearest_visible
from mae.layers.patch_embed import patch_grid, patchify, unpatchify
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.options import shown
from mae.randomness import FIXED_EPOCH, permutation, sample_keys
from mae.report.reconstruction import reconstruct
from mae.types import MaskPlan

_COUNT = "count"
_WINDOW = 7  # scikit-image's for SSIM


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Error, PSNR, SSIM and Laplacian error of the hidden pixels, under masks that the seed fixes.

    Raises:
        UsageError: no image to judge.
    """

    count: int = 1000
    """Images that are judged, drawn from the held-out ones."""
    mask_ratio: Annotated[float | None, shown("the model's own", "SHARE")] = None
    """Share of patches hidden."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"count is {self.count}; expected 1 or more images to judge")
        if self.mask_ratio is not None and not 0 < self.mask_ratio < 1:
            raise UsageError(f"mask_ratio is {self.mask_ratio}; expected a share between 0 and 1, both excluded")

    def run(self, gallery: Gallery) -> Outcome:
        """Judge; see `EvaluationProtocol`."""
        model, wanted = gallery.extractor.autoencoder, gallery.extractor.preprocessing
        if model is None:
            raise UsageError(f"{gallery.extractor.name} has no decoder; reconstruction needs a model of this package")
        images = gallery.images()
        order = permutation(gallery.seed, FIXED_EPOCH, len(images.readable))
        numbers = images.readable[order[: self.count].sort().values]

        data_range = 1.0 if images.is_integer else _value_range(images, numbers.tolist())
        judge = _Judge(model=model, mean=wanted.mean, std=wanted.std, data_range=data_range)

        def of(batch: Tensor, part: Tensor) -> Mapping[str, Tensor]:
            keys = sample_keys(gallery.seed, FIXED_EPOCH, part).to(gallery.device)
            return judge.sums(batch, model.masking.plan(model.encoder.patch_embed.grid(batch), keys, self.mask_ratio))

        sums = computed_batches(images, wanted, of, device=gallery.device, world=gallery.world, numbers=numbers)
        found = judge.whole(sums)
        rows = tuple((_NAMES[name], *_in_digits(quality)) for name, quality in found.items())
        note = (
            f"Hidden pixels of {len(numbers):,} images, values as in the files (whole numbers scaled to [0, 1]). "
            "Lower error, higher PSNR and SSIM are better."
        )
        if "with_true_statistics" in found:
            note += (
                " This model predicts patches standardised one by one; its picture estimates their brightness and "
                "contrast from visible patches. The second row is given the true ones, so it knows part of the answer."
            )
        return Outcome(
            result={"images": len(numbers), **{name: asdict(quality) for name, quality in found.items()}},
            header=("picture", "MSE", "PSNR in dB", "SSIM", "Laplacian error"),
            rows=rows,
            note=note,
        )


_NAMES = {
    "model": THIS_MODEL,
    "with_true_statistics": "this model, told the true statistics",
    "mean_colour": "mean colour of the visible pixels",
    "nearest_patch": "copy of the nearest visible patch",
}


def _in_digits(quality: "PictureQuality") -> tuple[str, ...]:
    psnr = "" if quality.psnr is None else f"{quality.psnr:.2f}"
    ssim = "" if quality.ssim is None else f"{quality.ssim:.3f}"
    return f"{quality.mse:.5f}", psnr, ssim, f"{quality.laplacian:.4f}"


def _value_range(images: ImageSet, numbers: Sequence[int]) -> float:
    """Distance of the lowest and the highest value of some images; floating-point data have no other range."""
    known = ((values := images.get(number))[~values.isnan()] for number in numbers)
    ends = [part.aminmax() for part in known if len(part)]
    return float(max(end.max for end in ends) - min(end.min for end in ends)) if ends else 0.0


@dataclass(frozen=True, kw_only=True)
class PictureQuality:
    """Distance of pictures from the true images over the hidden pixels of a whole set, all channels alike.

    Pixel values are those before normalisation, in [0, 1] for integer data. Pictures are not clipped. Values that are
    NaN for want of data count nowhere; a window of the similarity that reaches them sees the same in both pictures.

    Attributes:
        mse: mean squared error.
        psnr: `10 log10(data_range^2 / mse)` in dB, of the set's one `mse`; None where that is 0, for infinity.
        ssim: structural similarity (Wang et al. 2004) as scikit-image computes it for each image and channel, a
            uniform window of 7 x 7 or the largest odd one that fits; the mean of its map over the hidden pixels, so
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
    """Judge the pictures a model makes of hidden pixels; several batches count as one large set.

    Each picture shows the true pixels where they are visible:

    - `model`: what the model makes of the visible patches, and nothing else (`Reconstruction.pasted`);
    - `with_true_statistics`: of a norm-pix model alone, each hidden patch given its true mean and deviation. That
      is part of the answer: compare it with no honest picture (`Reconstruction.leaky`);
    - `mean_colour`: hidden pixels get the mean colour of the image's visible ones;
    - `nearest_patch`: each hidden patch is a copy of the nearest visible one.

    Args:
        model: predicts pixels, plain or norm-pix.
        images_and_plans: normalised images `[B, C, H, W]` with their masks on the same device.
        mean: what was subtracted from the images, one value a channel.
        std: what they were divided by then, one value a channel.
        data_range: distance of the lowest and highest possible value: 1 for integer data; for others, the range
            of the judged images' values.

    Raises:
        UsageError: there is no batch, a data range that is not above 0, or a model that predicts no pixels.
        MAEError: a picture with values that are not finite.
    """
    judge = _Judge(model=model, mean=mean, std=std, data_range=data_range)
    return judge.whole(judge.sums(images, plan) for images, plan in images_and_plans)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Judge:
    """Judges the pictures of a batch, and adds up what it found of many."""

    model: MaskedAutoencoder
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data_range: float

    def __post_init__(self) -> None:
        if not (isfinite(self.data_range) and self.data_range > 0):
            raise UsageError(
                f"data_range is {self.data_range}; expected the distance of two values, above 0 (integer data: 1)"
            )

    def sums(self, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> dict[str, Tensor]:
        """Of each picture the sums of a batch over its hidden values, and how many of these there are."""
        scale, shift = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (self.std, self.mean))
        pictures, hidden = _pictures(self.model, images.float(), plan)
        images = images.float().cpu()  # first: MPS has no float64
        known, images = ~images.isnan(), images.nan_to_num(nan=0.0)
        hidden, true = hidden & known, images.double() * scale + shift
        found = {_COUNT: hidden.sum()}
        for name, picture in pictures.items():
            drawn = torch.where(known, picture.cpu(), images).double() * scale + shift
            if not drawn.isfinite().all():
                raise MAEError(
                    f"the picture '{name}' holds values that are not finite; the model or an image is broken"
                )
            found[name] = _sums(true, drawn, hidden, self.data_range)
        return found

    def whole(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, PictureQuality]:
        """The quality of each picture over all batches."""
        totals: dict[str, Tensor] = {}
        for batch in batches:
            totals = {name: totals.get(name, 0) + sums for name, sums in batch.items()}
        if not totals:
            raise UsageError("no images to reconstruct; give at least one batch")
        count = int(totals.pop(_COUNT))
        if count == 0:
            raise UsageError(
                "no hidden value of these images is known: they hold no data there, so nothing can be judged"
            )
        return {name: _quality((total / count).tolist(), self.data_range) for name, total in totals.items()}


def _pictures(
    model: MaskedAutoencoder, images: Float[Tensor, "B C H W"], plan: MaskPlan
) -> tuple[dict[str, Float[Tensor, "B C H W"]], Bool[Tensor, "B 1 H W"]]:
    """The pictures by name, normalised like the images, and which pixels are hidden, on the CPU."""
    views = reconstruct(model, images, plan)
    pictures = {"model": views.pasted}
    if views.leaky is not None:
        pictures["with_true_statistics"] = views.leaky
    patch_size = model.encoder.patch_embed.patch_size
    grid = patch_grid(images.shape[2], images.shape[3], patch_size)
    patches, plan = patchify(images, patch_size), plan.predict_all()
    guesses = {
        "mean_colour": predict_mean_of_visible(patches, plan, images.shape[1]),
        "nearest_patch": predict_nearest_visible(patches, plan, grid),
    }
    for name, guess in guesses.items():
        guess = guess.nan_to_num(nan=0.0)  # of patches without data
        pictures[name] = unpatchify(torch.where(plan.hidden.unsqueeze(-1), guess, patches), grid, patch_size)
    return pictures, views.hidden.unsqueeze(1).cpu()


def _sums(
    true: Float64[Tensor, "B C H W"],
    drawn: Float64[Tensor, "B C H W"],
    hidden: Bool[Tensor, "B C H W"],
    data_range: float,
) -> Float64[Tensor, " 3"]:
    """Squared errors, similarities and errors of the Laplacian, each summed over the hidden values."""
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
