"""Histograms of oriented gradients: where edges run, not what they look like."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import pi
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional

from mae.core.component import Count
from mae.core.contracts import Batch, Target, Taught
from mae.core.types import Layout, take_tokens
from mae.errors import UsageError
from mae.layers.precision import without_autocast


@dataclass(frozen=True, kw_only=True)
class HogTarget(Target):
    """Histograms of oriented gradients of each patch's cells (MaskFeat: Wei et al. 2021, section 3.2).

    Each channel by itself: Sobel gradients (the border mirrored), their magnitude added to the bin of their unsigned
    direction in each cell of pixels, and the bins of a cell divided by their Euclidean norm. A flat cell has zeros.
    """

    kind: ClassVar[str] = "hog"
    reads_whole: ClassVar[bool] = True

    bins: Annotated[int, Ge(2)] = 9
    """Directions, over 180 degrees."""
    cell: Count = 8
    """Height and width of a cell in pixels; the patch must be a multiple."""

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """Values of a token: cells times channels times bins.

        Raises:
            UsageError: other than two axes, a patch that is no multiple of the cell, or samples one pixel high or wide.
        """
        if len(layout.patch) != 2 or any(side % self.cell for side in layout.patch):
            sides = "x".join(map(str, layout.patch))
            raise UsageError(
                f"target_cell is {self.cell}, and patches have {sides} pixels; expected a cell that divides both "
                "sides: give --target-cell or another --patch-size"
            )
        if min(layout.size) < 2:
            size = "x".join(map(str, layout.size))
            raise UsageError(
                f"target hog reads gradients between neighbours, and images of {size} pixels have none along one side; "
                "expected two pixels or more along both: give a larger --img-size"
            )
        rows, columns = (side // self.cell for side in layout.patch)
        return rows * columns * layout.channels * self.bins

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M P"]:
        """Target values of the given tokens (None: every token in raster order), float32.

        Their order is channel, bin, row and column of the cell.
        """
        layout = batch.layout
        (rows, columns), (down, across) = layout.grid, (side // self.cell for side in layout.patch)
        cells = self.histograms(batch.x.float())  # [B, C, bins, rows of cells, columns of cells]
        patches = cells.unflatten(4, (columns, across)).unflatten(3, (rows, down))
        values = patches.permute(0, 3, 5, 1, 2, 4, 6).flatten(3).flatten(1, 2)
        return values if tokens is None else take_tokens(values, tokens)

    def histograms(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C bins h w"]:
        """The normalised histogram of each cell, in each channel."""
        channels = images.shape[1]
        with without_autocast(images.device):
            x, y = _sobel(images)
            number = (torch.atan2(x, y) / pi * self.bins).floor().long() % self.bins
            places = torch.zeros(*number.shape[:2], self.bins, *number.shape[2:], device=images.device)
            places.scatter_(2, number.unsqueeze(2), torch.hypot(x, y).unsqueeze(2))
            sums = functional.avg_pool2d(places.flatten(0, 1), self.cell) * self.cell**2
            return functional.normalize(sums, dim=1).unflatten(0, (-1, channels))


def _sobel(images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B C H W"]]:
    """Sobel's gradients along rows and along columns, the border mirrored.

    Differences come before sums, so equal pixels give 0 exactly. A convolution would round, and a cell's norm would
    make a whole histogram of what is left.
    """
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    across = padded[..., :-2] - padded[..., 2:]
    down = padded[..., :-2, :] - padded[..., 2:, :]
    return (
        across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :],
        down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:],
    )
