"""Grid masking: square cells of patches are masked as wholes."""

from dataclasses import dataclass
from typing import ClassVar

from mae.core.component import Count, Share
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.planar import PlanarMask, places, plan_in_order
from mae.randomness import Stream, uniform

_STEPS = 1 << 24
"""Different values of a drawn number."""


@dataclass(frozen=True, kw_only=True)
class GridMasking(PlanarMask):
    """Square cells of patches on the regular grid are masked or stay visible as wholes (Pixio, 2025).

    Cells become visible in random order until enough patches are. Of the last one only as many as are wanted, at
    random, so that all samples have equally many; the others of that cell are masked. Where `cell` does not divide the
    rows or columns, the last cells are cut off by the border.

    Where all cells are whole, every position is masked equally often: in a fraction (N - V) / N of the samples. Smaller
    cells at the border are masked slightly more or less often than others: by 0.14 at most in a grid of 3 x 3 and cells
    of 2 x 2, by less than 0.01 at the default ratio in one of 14 x 14 and cells of 4 x 4.
    """

    kind: ClassVar[str] = "grid"

    ratio: Share = 0.75
    """Fraction of the patches masked."""
    cell: Count = 2
    """Patches along each side of a cell."""

    def num_visible(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens stay visible; see `Mask.num_visible`.

        Raises:
            UsageError: a cell that covers the whole grid; see `PlanarMask.num_visible`.
        """
        count = super().num_visible(layout, ratio)
        if self.cell >= max(layout.grid):
            raise UsageError(
                f"mask_cell {self.cell} covers the whole grid of {'x'.join(map(str, layout.grid))} patches; "
                f"expected at most {max(layout.grid) - 1}: use smaller cells or smaller patches"
            )
        return count

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample; see `Mask.plan`."""
        layout, count = request.layout, self.num_visible(request.layout, request.ratio)
        down, across = (-(-side // self.cell) for side in layout.grid)
        draws = uniform(request.keys, down * across + layout.num_tokens, Stream.MASK)
        row, column = places(layout, draws.device)
        cell = row // self.cell * across + column // self.cell  # of each token, [N]
        turn = draws[:, : down * across].argsort(dim=1, stable=True)  # of each cell
        within = (draws[:, down * across :] * _STEPS).long()
        return plan_in_order((turn[:, cell] * _STEPS + within).argsort(dim=1, stable=True), count)
