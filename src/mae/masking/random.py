"""MAE's mask: a uniformly random share of the patches of each image."""

from dataclasses import dataclass, replace
from math import floor, prod

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mae.errors import UsageError
from mae.randomness import Stream, uniform
from mae.types import Grid, MaskPlan


@dataclass(frozen=True, kw_only=True)
class RandomMasking:
    """Hide `ratio` of the tokens of each image, drawn uniformly without replacement (He et al. 2021, section 3).

    Attributes:
        ratio: share of tokens hidden, in (0, 1).
        predicted: share of the hidden tokens that are predicted, drawn from them uniformly, in (0, 1]; one at least.
    """

    ratio: float = 0.75
    predicted: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.predicted <= 1:
            raise UsageError(f"predict_share is {self.predicted}; expected a share above 0 and at most 1")
        if not 0 < self.ratio < 1:
            raise UsageError(
                f"mask_ratio is {self.ratio}; expected a share between 0 and 1, both excluded (the paper: 0.75)"
            )

    def num_visible(self, grid: Grid, ratio: float | None = None) -> int:
        """How many tokens stay visible; `ratio` as in `plan`.

        Raises:
            UsageError: the ratio is out of range, or would leave no visible or no hidden token on this grid.
        """
        if ratio is not None:  # checked as any other is
            return replace(self, ratio=ratio).num_visible(grid)
        num_tokens = prod(grid)
        # The product of floats may fall a hair below the whole number it stands for: 10 * (1 - 0.9) < 1.
        num_visible = floor(num_tokens * (1 - self.ratio) + 1e-6)
        if not 0 < num_visible < num_tokens:
            raise UsageError(
                f"mask_ratio {self.ratio} on a grid of {'x'.join(map(str, grid))} = {num_tokens} patches leaves "
                f"{num_visible} visible and {num_tokens - num_visible} hidden; each must be at least 1: "
                "use smaller patches, larger images or another ratio"
            )
        return num_visible

    def plan(self, grid: Grid, keys: Int64[Tensor, " B"], ratio: float | None = None) -> MaskPlan:
        """The mask of each sample, a pure function of its key.

        With the same key a higher ratio hides what a lower one hides, and more.

        Args:
            grid: the token grid.
            keys: one a sample.
            ratio: share hidden, as a schedule wants it; None: the strategy's own.

        Raises:
            UsageError: the ratio is out of range, or would leave no visible or no hidden token on this grid.
        """
        num_visible = self.num_visible(grid, ratio)
        order = uniform(keys, prod(grid), Stream.MASK).argsort(dim=1, stable=True)  # [B, N]
        num_predicted = max(1, round(self.predicted * (prod(grid) - num_visible)))
        visible, predicted = order[:, :num_visible], order[:, num_visible : num_visible + num_predicted]
        hidden: Bool[Tensor, "B N"] = torch.ones_like(order, dtype=torch.bool).scatter_(1, visible, False)
        return MaskPlan(visible=visible, predicted=predicted, hidden=hidden)
