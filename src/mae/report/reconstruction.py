"""What a model makes of the hidden patches, as tensors in the units of its images."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import sqrt
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.errors import UsageError
from mae.layers.patch_embed import patch_grid, patchify, unpatchify
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.report.inference import undisturbed
from mae.targets.pixels import PixelTarget
from mae.types import Grid, MaskPlan

# Over 21 crops of 7 photographs, 14x14 patches, 50 to 90 % hidden, 0.6 of the mean distance between visible
# patches came within 1 % of the smallest error of the hidden means; 0.2 and 1.5 were 10 to 49 % worse.
_BANDWIDTH = 0.6


@dataclass(frozen=True, kw_only=True, eq=False)
class Reconstruction:
    """A model's picture of a batch; float32, normalised like the images it was given, not clipped.

    Where images are NaN for want of data, `pasted`, `leaky` and `filled` are so too on visible patches.

    Attributes:
        pasted: true pixels where visible, predicted ones where hidden.
        full: predicted pixels everywhere; no loss ever trained the visible ones.
        leaky: as `pasted`, but each hidden patch is given its true mean and deviation, so its brightness and
            contrast are the answer and not the model's; None for a model that predicts plain pixels.
        filled: as `pasted`, but each hidden patch is its estimated mean, one value for all channels, and nothing
            of the prediction: what the estimate alone is worth; None for a model that predicts plain pixels.
        error: distance of `pasted` from the image, `>= 0`; 0 where visible, and where the image is NaN.
        hidden: True for the pixels of hidden patches.
    """

    pasted: Float[Tensor, "B C H W"]
    full: Float[Tensor, "B C H W"]
    leaky: Float[Tensor, "B C H W"] | None
    filled: Float[Tensor, "B C H W"] | None
    error: Float[Tensor, "B C H W"]
    hidden: Bool[Tensor, "B H W"]


def reconstruct(model: MaskedAutoencoder, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> Reconstruction:
    """Predict every patch of the images and put the picture together.

    A norm-pix model predicts each patch standardised by its own mean and deviation. Those of a hidden patch are
    hidden too, so they are estimated from the visible patches (`interpolate_statistics`); only `leaky` uses the
    true ones. Runs in the model's device and type; mode, gradients and generators are left as they were.

    Args:
        model: predicts pixels, plain or norm-pix.
        images: normalised images.
        plan: what is hidden; all of it is predicted, whatever `plan.predicted` holds.

    Raises:
        UsageError: the model's target is not made of pixels, or images of a wrong shape.
    """
    target = _pixel_target(model)
    weights = next(model.parameters())
    with undisturbed(model):
        prediction = model(images.to(weights), plan=_predict_all(plan, weights.device)).pred
    prediction, plan, images = prediction.float().to(images.device), _predict_all(plan, images.device), images.float()
    grid = patch_grid(images.shape[2], images.shape[3], target.patch_size)
    patches = patchify(images, target.patch_size)
    hidden = plan.hidden.unsqueeze(-1)  # [B, N, 1]

    full, leaky, filled = prediction, None, None
    if target.norm_pix:
        # A low-pass target standardises patches of the filtered image, whose visible ones tell of hidden pixels.
        mean, deviation = target.statistics(patchify(target.picture(images), target.patch_size))
        leaky = unpatchify(torch.where(hidden, prediction * deviation + mean, patches), grid, target.patch_size)
        known = ~patches.isnan().all(dim=-1)
        mean, deviation = interpolate_statistics(*target.statistics(patches), plan, grid, known=known)
        filled = unpatchify(torch.where(hidden, mean, patches), grid, target.patch_size)
        full = prediction * deviation + mean
    pasted = torch.where(hidden, full, patches)
    return Reconstruction(
        pasted=unpatchify(pasted, grid, target.patch_size),
        full=unpatchify(full, grid, target.patch_size),
        leaky=leaky,
        filled=filled,
        error=unpatchify(torch.where(patches.isnan(), 0, (pasted - patches).abs()), grid, target.patch_size),
        hidden=unpatchify(hidden.expand_as(patches), grid, target.patch_size)[:, 0],
    )


def join(parts: Sequence[Reconstruction]) -> Reconstruction:
    """Pictures of several batches by one model as those of one batch."""
    joined: dict[str, Any] = {}
    for field in fields(Reconstruction):
        tensors = [getattr(part, field.name) for part in parts]
        joined[field.name] = None if tensors[0] is None else torch.cat(tensors)
    return Reconstruction(**joined)


def _pixel_target(model: MaskedAutoencoder) -> PixelTarget:
    if not isinstance(model.target, PixelTarget):
        raise UsageError(
            f"the model predicts {type(model.target).__name__}, which is no picture; only models that predict pixels "
            "(PixelTarget) can be drawn"
        )
    return model.target


def _predict_all(plan: MaskPlan, device: torch.device) -> MaskPlan:
    """The plan on another device, with every token predicted."""
    moved = replace(
        plan, visible=plan.visible.to(device), predicted=plan.predicted.to(device), hidden=plan.hidden.to(device)
    )
    return moved.predict_all()


def interpolate_statistics(
    mean: Float[Tensor, "B N 1"],
    deviation: Float[Tensor, "B N 1"],
    plan: MaskPlan,
    grid: Grid,
    *,
    known: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B N 1"], Float[Tensor, "B N 1"]]:
    """Mean and deviation of each patch as far as the visible patches tell; what hidden patches hold is not read.

    A visible patch keeps its own. A hidden one gets the average over all visible ones, weighted by a Gaussian of
    the distance on the grid whose width is 0.6 of the mean distance between visible patches, `sqrt(N / V)`. Far
    from every visible patch this becomes the nearest one's value, with a single one it is that one's.

    Args:
        mean: each patch's mean.
        deviation: each patch's deviation.
        plan: which patches are visible.
        grid: rows and columns of patches.
        known: patches with any data; the others tell nothing, and where none does both are 0. None: all of them.
    """
    rows, columns = grid
    number = torch.arange(rows * columns, device=mean.device)
    place = torch.stack([number // columns, number % columns], dim=-1).float()  # [N, 2]
    distance = torch.cdist(place.expand(len(mean), -1, -1), place[plan.visible])  # [B, N, V]
    width = _BANDWIDTH * sqrt(rows * columns / plan.visible.shape[1])
    nearness = -(distance / width).square() / 2
    if known is not None:
        nearness = nearness.masked_fill(~known.gather(1, plan.visible).unsqueeze(1), -torch.inf)
    weight = nearness.softmax(dim=-1).nan_to_num(nan=0.0)
    hidden = plan.hidden.unsqueeze(-1)

    def spread(values: Float[Tensor, "B N 1"]) -> Float[Tensor, "B N 1"]:
        return torch.where(hidden, weight @ values.gather(1, plan.visible.unsqueeze(-1)), values)

    return spread(mean), spread(deviation)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How good a picture of the hidden pixels is, over a whole batch.

    Attributes:
        masked_mse: mean squared error of the hidden pixels, pixel values as they were before normalisation.
        r2: share of the hidden pixels' variation that is explained: 1 is perfect, 0 is no better than filling
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
    """Judge a picture by the hidden pixels alone, all channels; values that are NaN for want of data count nowhere.

    Args:
        images: the true images, normalised.
        picture: what is judged, normalised likewise.
        hidden: True for hidden pixels; each image has hidden and visible ones.
        std: the deviations the images were divided by, one a channel.
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
