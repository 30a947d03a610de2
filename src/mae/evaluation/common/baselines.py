"""What predictors that learn nothing reach, in the loss's own units: a loss means little without them."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.core.contracts import Batch, Target, Taught, Tokenizer
from mae.core.types import Grid, MaskPlan, take_tokens
from mae.errors import UsageError

_PAIRS = 1 << 22
"""Of a masked and a visible patch whose distances are held at a time: of 64 images of 4,096 patches all take 8 GB."""


@dataclass(frozen=True, kw_only=True)
class TrivialBaselines:
    """Reconstruction losses of trivial predictors: over masked patches, by their weight.

    Attributes:
        zero: predict 0 everywhere; squared, on norm-pix targets of P values (P - 1) / P, less where patches are flat.
            Of K classes each alike: log K by cross-entropy.
        mean_of_visible: for each image and channel, the mean of the visible patches' target values.
        nearest_visible: the target values of the nearest visible patch on the grid.
    """

    zero: float
    mean_of_visible: float
    nearest_visible: float

    def as_dict(self) -> dict[str, float]:
        """The errors by name."""
        return asdict(self)


@torch.no_grad()
def measure_baselines(
    target: Target,
    tokenizer: Tokenizer,
    images_and_plans: Iterable[tuple[Tensor, MaskPlan]],
    *,
    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    taught: Callable[[Batch], Taught] | None = None,
    width: int | None = None,
) -> TrivialBaselines:
    """The baselines of a target over batches; several batches count as one large one.

    Args:
        target: what the model must predict.
        tokenizer: of the model.
        images_and_plans: normalised images `[B, C, H, W]` with their masks.
        loss: distance of prediction and target.
        taught: gives the teacher's outputs for a batch, where the target reads any.
        width: of the target, where it has classes.

    Raises:
        UsageError: there is no batch.
    """
    total = torch.zeros(3, dtype=torch.float64)
    count = 0.0
    for images, plan in images_and_plans:
        layout = tokenizer.layout_of(images)
        batch = Batch(x=images, tokenizer=tokenizer)
        values = target(batch, taught=None if taught is None else taught(batch))  # [B, N, P]
        true = take_tokens(values, plan.predicted)
        if target.classes:
            assert width is not None
            values = (
                (values == torch.arange(width, device=values.device)).float().masked_fill(values.isnan(), torch.nan)
            )
        # Pixels have a mean for each channel; of other targets each value has its own.
        channels = layout.channels if target.to_pixels is not None else values.shape[-1]
        size = float(true.shape[0] * true.shape[1] if plan.weight is None else plan.weight.sum())
        mean = predict_mean_of_visible(values, plan, channels)
        for number, guess in enumerate(
            (torch.zeros_like(mean), mean, predict_nearest_visible(values, plan, layout.grid))
        ):
            # Where the visible patches have no data, the guess is the mean of normalised images.
            guess = guess.nan_to_num(nan=0.0)
            if target.classes:  # shares to logits, each with one even guess of all classes beside it
                guess = (guess + 1 / guess.shape[-1]).log()
            total[number] += float(loss(guess, true, plan.weight)) * size
        count += size
    if count == 0:
        raise UsageError("no images to measure the baselines on; give at least one batch")
    zero, mean_of_visible, nearest_visible = (total / count).tolist()
    return TrivialBaselines(zero=zero, mean_of_visible=mean_of_visible, nearest_visible=nearest_visible)


def predict_mean_of_visible(values: Float[Tensor, "B N P"], plan: MaskPlan, channels: int) -> Float[Tensor, "B M P"]:
    """For the tokens in `plan.predicted`: each image's mean of its visible patches, channel by channel, without NaN.

    Args:
        values: what each patch holds, with the channel last.
        plan: which patches are visible and which are predicted.
        channels: number of channels.
    """
    visible = take_tokens(values, plan.visible).unflatten(-1, (-1, channels))  # [B, V, p*q, C]
    mean = visible.nanmean(dim=(1, 2), keepdim=True)  # [B, 1, 1, C]
    return mean.expand(-1, plan.predicted.shape[1], visible.shape[2], -1).flatten(2)


def predict_nearest_visible(values: Float[Tensor, "B N P"], plan: MaskPlan, grid: Grid) -> Float[Tensor, "B M P"]:
    """For the tokens in `plan.predicted`: what the nearest visible patch holds.

    Euclidean distance on the grid; of equally near patches the lowest number.

    Args:
        values: what each patch holds.
        plan: which patches are visible and which are predicted.
        grid: rows and columns of patches.
    """
    visible = plan.visible.sort(dim=1).values
    several = max(1, _PAIRS // max(1, plan.predicted.shape[1] * visible.shape[1]))
    parts = zip(plan.predicted.split(several), visible.split(several), strict=True)
    nearest = torch.cat([_nearest(predicted, seen, grid[1]) for predicted, seen in parts])
    return take_tokens(values, visible.gather(1, nearest))


def _nearest(predicted: Int64[Tensor, "b M"], visible: Int64[Tensor, "b V"], columns: int) -> Int64[Tensor, "b M"]:
    """Which of the visible tokens is nearest to each predicted one, on a grid of so many columns."""
    down = predicted.unsqueeze(2) // columns - visible.unsqueeze(1) // columns  # [b, M, V]
    across = predicted.unsqueeze(2) % columns - visible.unsqueeze(1) % columns
    return (down.square() + across.square()).argmin(dim=2)  # whole numbers, and argmin takes the first
