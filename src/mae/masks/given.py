"""A mask the caller drew: over tokens, over the grid, or over pixels."""

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from mae.core.types import Layout, MaskPlan
from mae.errors import UsageError


def plan_from_mask(mask: Shaped[Tensor, "..."], *, batch: int, layout: Layout) -> MaskPlan:
    """The plan of a given mask, true (or 1) = hidden; every hidden token is predicted.

    Args:
        mask: `[B, N]` over tokens, `[B, *grid]` over the grid or `[B, H, W]` over pixels, bool or numbers 0
            and 1; without `B` the same mask for each image. A shape that could be several is the first of them. A
            patch with any hidden pixel is hidden whole.
        batch: number of images.
        layout: of the images.

    Raises:
        UsageError: no image, another shape, other values, a mask that leaves nothing visible or nothing hidden, or
            images that hide different numbers of patches (they cannot share a batch).
    """
    if not batch:
        raise UsageError("the batch holds no image")
    hidden, num_tokens = _hidden_tokens(mask, batch=batch, layout=layout), layout.num_tokens
    counts = hidden.sum(dim=1)
    num_hidden = int(counts[0])
    if bool((counts != num_hidden).any()):
        raise UsageError(
            f"the mask hides between {int(counts.min())} and {int(counts.max())} patches per image; images of one "
            "batch must hide equally many: pass them one at a time, or even the mask out"
        )
    if not 0 < num_hidden < num_tokens:
        raise UsageError(
            f"the mask hides {num_hidden} of {num_tokens} patches; at least one must be hidden and one visible"
        )
    order = hidden.to(torch.uint8).argsort(dim=1, stable=True)  # visible tokens first, each part in raster order
    num_visible = num_tokens - num_hidden
    visible, predicted = order[:, :num_visible], order[:, num_visible:]
    return MaskPlan(visible=visible, predicted=predicted, hidden=hidden, grid=layout.grid, predicts_rest=True)


def _hidden_tokens(mask: Shaped[Tensor, "..."], *, batch: int, layout: Layout) -> Bool[Tensor, "B N"]:
    grid, pixels, num_tokens = layout.grid, layout.size, layout.num_tokens
    if mask.dtype != torch.bool and bool(((mask != 0) & (mask != 1)).any()):
        raise UsageError("the mask holds values other than 0 and 1; 1 or true means hidden")
    mask = mask.bool()
    per_image = ((batch, num_tokens), (batch, *grid), (batch, *pixels))
    if mask.shape not in per_image and mask.shape in ((num_tokens,), grid, pixels):
        mask = mask.unsqueeze(0).expand(batch, *mask.shape)
    if mask.shape == (batch, num_tokens):
        return mask
    if mask.shape == (batch, *grid):
        return mask.flatten(1)
    if mask.shape == (batch, *pixels):
        for axis, (length, patch) in enumerate(zip(grid, layout.patch, strict=True), start=1):
            mask = mask.unflatten(axis, (length, patch)).any(dim=axis + 1)
        return mask.flatten(1)
    raise UsageError(
        f"the mask has shape {tuple(mask.shape)}; expected {[batch, num_tokens]} over tokens, {[batch, *grid]} over "
        f"the grid or {[batch, *pixels]} over pixels"
    )
