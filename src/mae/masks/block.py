"""Block-wise masking: rectangles of patches instead of scattered ones."""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.core.component import Count, Share, ShareOfAll
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.masks.planar import PlanarMask, places, plan_in_order
from mae.randomness import Stream, uniform

_MAX_BLOCKS = 64
"""Blocks drawn at most; what they leave to be masked is masked in raster order, which needs thousands of samples."""


@dataclass(frozen=True, kw_only=True)
class BlockMasking(PlanarMask):
    """Blocks of patches, drawn until enough are masked (BEiT: Bao et al. 2021, Algorithm 1).

    A block has a random area between `min_patches` and what is left to be masked, and a random aspect ratio, uniform
    in its logarithm. Of the last block only the first patches in raster order are masked, so that all samples have
    equally many visible ones.
    """

    kind: ClassVar[str] = "block"

    ratio: Share = 0.4
    """Fraction of the patches masked."""
    min_patches: Count = 16
    """Patches of a block at least, as long as so many are left to be masked."""
    min_aspect: ShareOfAll = 0.3
    """Smallest height over width of a block; the largest is its inverse."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        num_tokens, num_visible = request.layout.num_tokens, self.num_visible(request.layout, request.ratio)
        draws = uniform(request.keys, 4 * _MAX_BLOCKS, Stream.MASK).unflatten(1, (_MAX_BLOCKS, 4))
        hidden: Bool[Tensor, "B N"] = torch.zeros(len(draws), num_tokens, dtype=torch.bool, device=draws.device)
        for block in draws.unbind(1):
            left = num_tokens - num_visible - hidden.sum(dim=1, keepdim=True)
            if not (draws.is_meta or bool(left.any())):  # the rest would change nothing
                break
            hidden |= _first(self._inside(block, left, request.layout) & ~hidden, left)
        hidden |= _first(~hidden, num_tokens - num_visible - hidden.sum(dim=1, keepdim=True))
        return plan_in_order(hidden.byte().argsort(dim=1, stable=True), num_visible)

    def _inside(self, draws: Float[Tensor, "B 4"], left: Tensor, layout: Layout) -> Bool[Tensor, "B N"]:
        """Where a block lies: its area, aspect ratio and place by four numbers in [0, 1)."""
        rows, columns = layout.grid
        area, aspect, down, across = draws.unsqueeze(-1).unbind(1)  # [B, 1] each
        least = left.clamp(max=self.min_patches)
        area = least + (left - least) * area
        aspect = torch.exp((2 * aspect - 1) * -log(self.min_aspect))
        height = (area * aspect).sqrt().round().clamp(1, rows)
        width = (area / aspect).sqrt().round().clamp(1, columns)
        top, first = (down * (rows - height + 1)).floor(), (across * (columns - width + 1)).floor()
        row, column = places(layout, draws.device)
        return (row >= top) & (row < top + height) & (column >= first) & (column < first + width)


def _first(where: Bool[Tensor, "B N"], count: Tensor) -> Bool[Tensor, "B N"]:
    """Of the true places of each row the first `count` `[B, 1]`."""
    return where & (where.cumsum(dim=1) <= count)
