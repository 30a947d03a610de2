"""What masks over rows and columns of patches share."""

from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mae.core.contracts import Mask
from mae.core.types import Layout, MaskPlan
from mae.errors import UsageError


class PlanarMask(Mask):
    """A mask with structure in two axes, by which some sets of positions are likelier than others."""

    uniform: ClassVar[bool] = False

    def num_visible(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens stay visible; see `Mask.num_visible`.

        Raises:
            UsageError: a grid of other than two axes; see `Mask.num_visible`.
        """
        if len(layout.grid) != 2:
            raise UsageError(
                f"mask {self.kind} is for grids of rows and columns, this one is {'x'.join(map(str, layout.grid))}; "
                "use --mask random"
            )
        return super().num_visible(layout, ratio)


def places(layout: Layout, device: torch.device) -> tuple[Int64[Tensor, " N"], Int64[Tensor, " N"]]:
    """Row and column of each token."""
    columns, number = layout.grid[1], torch.arange(layout.num_tokens, device=device)
    return number // columns, number % columns


def plan_of(visible: Int64[Tensor, "B V"], predicted: Int64[Tensor, "B M"], num_tokens: int) -> MaskPlan:
    """The plan in which everything that is not visible is hidden."""
    hidden: Bool[Tensor, "B N"] = torch.ones(len(visible), num_tokens, dtype=torch.bool, device=visible.device)
    return MaskPlan(visible=visible, predicted=predicted, hidden=hidden.scatter_(1, visible, False))


def plan_in_order(order: Int64[Tensor, "B N"], num_visible: int) -> MaskPlan:
    """The plan in which the first tokens of an order are visible, and all others are predicted."""
    return replace(plan_of(order[:, :num_visible], order[:, num_visible:], order.shape[1]), predicts_rest=True)
