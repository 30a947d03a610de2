"""What a mask leaves to guess: the error of simple guesses from visible pixels beside the model's, by mask ratio."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from mae.core.types import MaskRequest
from mae.errors import UsageError
from mae.evaluation.common.baselines import predict_mean_of_visible, predict_nearest_visible
from mae.evaluation.common.capabilities import predicts_pixels
from mae.masks.random import RandomMasking
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.reconstruction import reconstruct


@dataclass(frozen=True, kw_only=True)
class MaskedGuesses:
    """Mean squared errors of the masked values of normalised images; 1 is about what the mean of the data leaves.

    Attributes:
        ratio: fraction of the patches masked, at random.
        mean_colour: of the mean colour of the image's visible pixels.
        nearest_patch: of a copy of the nearest visible patch.
        interpolation: of a smooth surface through the visible pixels, see `fill_smoothly`.
        model: of what the model makes of the visible patches; None for one that predicts no pixels.
    """

    ratio: float
    mean_colour: float
    nearest_patch: float
    interpolation: float
    model: float | None


@torch.no_grad()
def measure_guesses(
    model: PretrainedEncoder,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    tokenizer: Any,
    ratios: Sequence[float],
) -> list[MaskedGuesses]:
    """The errors for each ratio; several batches count as one large set, and values without data not at all.

    A key's mask of a higher ratio masks what that of a lower one does, and more.

    Args:
        model: its pictures are measured where it predicts pixels.
        batches: normalised images `[B, C, H, W]`, and the keys of their masks `[B]`.
        tokenizer: of the model.
        ratios: fractions of the patches masked.

    Raises:
        UsageError: there is no batch, or a ratio that leaves no patch visible or none masked.
    """
    decoder = model if isinstance(model, MaskedAutoencoder) and predicts_pixels(model) else None
    totals, count = torch.zeros(len(ratios), 4, dtype=torch.float64), torch.zeros(len(ratios), 1)
    for images, keys in batches:
        for row, ratio in enumerate(ratios):
            sums, known = _squared_errors(decoder, tokenizer, images.float(), keys, ratio)
            totals[row] += sums
            count[row] += known
    if not bool((count > 0).all()):
        raise UsageError("no masked values to guess; give at least one batch of images with data")
    return [
        MaskedGuesses(
            ratio=ratio,
            mean_colour=mean_colour,
            nearest_patch=nearest_patch,
            interpolation=interpolation,
            model=None if decoder is None else of_model,
        )
        for ratio, (mean_colour, nearest_patch, interpolation, of_model) in zip(
            ratios, (totals / count).tolist(), strict=True
        )
    ]


def fill_smoothly(images: Float[Tensor, "B C H W"], hidden: Bool[Tensor, "B H W"]) -> Float[Tensor, "B C H W"]:
    """The images with masked pixels filled by a smooth surface through the visible ones: pull-push.

    Gortler et al. 1996 (The Lumigraph): ever coarser images hold the means of what is known, and from the
    coarsest down each fills the gaps of the next finer one. No masked pixel is read, and NaN counts as masked; what no
    pixel of an image tells is 0.
    """
    unknown = hidden.unsqueeze(1) | images.isnan()
    return torch.where(unknown, _pull_push(images.masked_fill(unknown, 0), (~unknown).float()), images)


def _pull_push(values: Float[Tensor, "B C h w"], weights: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:
    """Values with what has a weight below 1 filled up by coarser ones; those of weight 0 are 0."""
    size = values.shape[2:]
    if max(size) == 1 or bool((weights == 1).all()):
        return values
    sums, found = (avg_pool2d(each, 2, ceil_mode=True, divisor_override=1) for each in (values * weights, weights))
    coarse = _pull_push(sums / found.clamp(min=torch.finfo(found.dtype).tiny), found.clamp(max=1))
    return torch.lerp(interpolate(coarse, size=size, mode="bilinear"), values, weights)


def _squared_errors(
    decoder: MaskedAutoencoder | None, tokenizer: Any, images: Tensor, keys: Tensor, ratio: float
) -> tuple[Tensor, int]:
    """Sums over the masked values of a batch, in the order of `MaskedGuesses`, and how many of these there are."""
    layout = tokenizer.layout_of(images)
    plan = RandomMasking(ratio=ratio).plan(MaskRequest(layout=layout, keys=keys)).predict_all()
    patches = tokenizer.cut(images)
    hidden = tokenizer.join(plan.hidden.unsqueeze(-1).expand_as(patches), layout)[:, 0]
    guesses = [
        tokenizer.join(predict_mean_of_visible(patches, plan, layout.channels), layout),
        tokenizer.join(predict_nearest_visible(patches, plan, layout.grid), layout),
        fill_smoothly(images, hidden),
    ]
    if decoder is not None:
        guesses.append(reconstruct(decoder, images, plan).pasted)
    masked = hidden.unsqueeze(1) & ~images.isnan()
    errors = [torch.where(masked, guess.nan_to_num(nan=0.0) - images, 0).square() for guess in guesses]
    sums = torch.tensor([float(error.sum()) for error in errors], dtype=torch.float64)
    return torch.nn.functional.pad(sums, (0, 4 - len(sums))), int(masked.sum())
