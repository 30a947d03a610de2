"""Regular masking: the visible patches are a lattice of even spacing."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.core.component import Share
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.masks.planar import PlanarMask, places, plan_in_order
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class RegularMasking(PlanarMask):
    """Visible patches stand evenly spaced, on a lattice with a random phase (grid-wise: He et al. 2021, figure 6).

    Patches become visible in the order of Bayer's matrix of ordered dithering (1973), which fills the grid by
    lattices. At a ratio of 3/4 one patch is visible in each 2 x 2, the same in all of them (four masks in all); at 1/2
    a checkerboard (two masks); at 7/8 a checkerboard of every second row and column; at 15/16 one in each 4 x 4, and
    so on. At a ratio between two of these the lattice of the higher one is whole and that of the lower one partly
    filled, evenly too. The phase is drawn on each level by itself. Where a side is odd, lattices differ in size, and
    one may lack a patch or have the first of the next. UM-MAE (Li et al. 2022) draws the visible patch of each 2 x 2 by
    itself, which is another mask.

    Every position is masked equally often, in a fraction (N - V) / N of the samples, where rows and columns are powers
    of two, and at a ratio of 1/2 or 3/4 where they are even. On other grids some phases have more patches than others,
    and rates differ with the position.
    """

    kind: ClassVar[str] = "regular"

    ratio: Share = 0.75
    """Fraction of the patches masked."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        layout, count = request.layout, self.num_visible(request.layout, request.ratio)
        levels = (max(layout.grid) - 1).bit_length()
        draws = (uniform(request.keys, 2, Stream.MASK) * (1 << levels)).long()
        # To flip bits of a place in the order is to shift the lattice of their level.
        phase = (draws[:, :1] << levels) | draws[:, 1:]
        return plan_in_order((_turns(layout, levels, draws.device) ^ phase).argsort(dim=1, stable=True), count)


def _turns(layout: Layout, levels: int, device: torch.device) -> Int64[Tensor, " N"]:
    """The number of each token in Bayer's matrix of side 2**levels."""
    row, column = places(layout, device)
    turns = torch.zeros_like(row)
    for level in range(levels):  # the lowest bit of a place counts most: neighbours stand far apart in the order
        turns = turns * 4 + 2 * ((row ^ column) >> level & 1) + (row >> level & 1)
    return turns
