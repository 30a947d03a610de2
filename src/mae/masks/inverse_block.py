"""Inverse block masking: one rectangle of patches stays visible, everything else is masked."""

from dataclasses import dataclass
from math import ceil, log
from typing import ClassVar

from mae.core.component import Share, ShareOfAll
from mae.core.types import MaskPlan, MaskRequest
from mae.masks.planar import PlanarMask, places, plan_in_order
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class InverseBlockMasking(PlanarMask):
    """One block of patches stays visible, and all others are masked (CAPI: Darcet et al. 2025).

    The block has as many patches as stay visible and a random aspect ratio, uniform in its logarithm, as far as the
    grid allows. Where its height does not divide their number, its first or last column lacks patches at one end; which
    column and which end is drawn too.

    With `roll` the block starts anywhere and goes on at the opposite border, so every position is masked equally
    often: in a fraction (N - V) / N of the samples. Without it the block lies inside the grid, which shows the centre
    more often than the borders and those more often than the corners.
    """

    kind: ClassVar[str] = "inverse_block"

    ratio: Share = 0.65
    """Fraction of the patches masked."""
    roll: bool = True
    """Shift the mask cyclically by a random offset, so that every position is masked equally often."""
    min_aspect: ShareOfAll = 0.5
    """Smallest height over width of the block; the largest is its inverse."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        (rows, columns), count = request.layout.grid, self.num_visible(request.layout, request.ratio)
        draws = uniform(request.keys, 5, Stream.MASK).unsqueeze(-1)
        aspect, down, across, at_first, at_left = draws.unbind(1)  # [B, 1] each
        aspect = ((2 * aspect - 1) * -log(self.min_aspect)).exp()
        height = (count * aspect).sqrt().round().clamp(ceil(count / columns), min(rows, count))
        width = (count / height).ceil()
        top = (down * (rows if self.roll else rows - height + 1)).floor()
        left = (across * (columns if self.roll else columns - width + 1)).floor()
        row, column = places(request.layout, draws.device)
        row, column = (row - top) % rows, (column - left) % columns  # within the block, [B, N]
        inside = (row < height) & (column < width)
        row = row.where(at_first < 0.5, height - 1 - row)
        column = column.where(at_left < 0.5, width - 1 - column)
        visible = inside & (column * height + row < count)  # the last column is the one that may lack some
        return plan_in_order(visible.byte().argsort(dim=1, descending=True, stable=True), count)
