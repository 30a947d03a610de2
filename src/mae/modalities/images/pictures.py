"""A model's reconstruction of a batch of images, and how good it is: tensors alone, no model and no drawing."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """A model's reconstruction of a batch; float32, normalised like its input images, not clipped.

    Where images are NaN for lack of data, the visible patches of `pasted`, `leaky` and `filled` are NaN too.

    Attributes:
        pasted: true pixels where visible, predicted ones where masked.
        full: predicted pixels everywhere; no loss ever trained the visible ones.
        leaky: as `pasted`, but each masked patch gets its true mean and std, so its brightness and contrast are
            the answer and not the model's; None for a model with pixel targets.
        filled: as `pasted`, but each masked patch is its estimated mean, one value for all channels, with nothing
            predicted: what the estimate alone is worth; None for a model with pixel targets.
        error: absolute difference of `pasted` and the image, `>= 0`; 0 where visible, and where the image is NaN.
        hidden: True for the pixels of masked patches.
    """

    pasted: Float[Tensor, "B C H W"]
    full: Float[Tensor, "B C H W"]
    leaky: Float[Tensor, "B C H W"] | None
    filled: Float[Tensor, "B C H W"] | None
    error: Float[Tensor, "B C H W"]
    hidden: Bool[Tensor, "B H W"]


def join(batches: Sequence[Reconstruction]) -> Reconstruction:
    """Concatenate one model's reconstructions of several batches."""
    joined: dict[str, Any] = {}
    for field in fields(Reconstruction):
        tensors = [getattr(batch, field.name) for batch in batches]
        joined[field.name] = None if tensors[0] is None else torch.cat(tensors)
    return Reconstruction(**joined)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a reconstruction of the masked pixels is, over a whole batch.

    Attributes:
        masked_mse: mean squared error of the masked pixels, in pixel values as they were before normalisation.
        r2: share of the masked pixels' variance that is explained: 1 is perfect, 0 is no better than filling
            each image with the mean colour of its visible pixels; None where that filling is already exact.
    """

    masked_mse: float
    r2: float | None


def score(
    images: Float[Tensor, "B C H W"],
    picture: Float[Tensor, "B C H W"],
    hidden: Bool[Tensor, "B H W"],
    std: tuple[float, ...],
) -> Score:
    """Score a reconstruction by its masked pixels alone, all channels; NaN, which marks missing data, is ignored.

    Args:
        images: the true images, normalised.
        picture: the reconstruction, normalised likewise.
        hidden: True for masked pixels; each image has masked and visible ones.
        std: what the images were divided by, one value a channel.
    """
    images, picture, hidden = images.cpu(), picture.cpu(), hidden.cpu()  # MPS has no float64
    unit = torch.tensor(std, dtype=torch.float64)[:, None, None]
    known = ~images.isnan()
    true, drawn = (torch.where(known, values.double() * unit, 0) for values in (images, picture))
    mask, seen = hidden.unsqueeze(1) & known, ~hidden.unsqueeze(1) & known
    visible_mean = (true * seen).sum(dim=(2, 3), keepdim=True) / seen.sum(dim=(2, 3), keepdim=True).clamp(min=1)
    error = ((drawn - true).square() * mask).sum()
    baseline = ((visible_mean - true).square() * mask).sum()
    count = mask.sum()
    # Rounding alone leaves about 1e-14 of the values' size; anything below is a constant image.
    constant = baseline <= 1e-12 * (true.square() * mask).sum()
    return Score(masked_mse=float(error / count), r2=None if constant else float(1 - error / baseline))
