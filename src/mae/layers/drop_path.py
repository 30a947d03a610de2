"""Stochastic depth: residual branches dropped at random while training."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.errors import UsageError


class DropPath(nn.Module):
    """Drops a residual branch for some samples of a batch (Huang et al. 2016, "Deep Networks with Stochastic Depth").

    In training mode a sample's branch is set to zero with probability `rate`, and the others are divided by
    `1 - rate`, so that the mean stays. The draws come from PyTorch's global generator. In evaluation mode, and
    with a rate of 0, nothing happens and nothing is drawn.

    Args:
        rate: probability, at least 0 and below 1.
        rank: number of this process, where each of several has an equal share of a batch.
        world: how many processes there are. Each draws for the whole batch: where their generators agree, they drop
            what one process would.

    Raises:
        UsageError: a rate out of range.
    """

    def __init__(self, *, rate: float, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise UsageError(f"drop path rate is {rate}; expected a probability from 0 up to, not including, 1")
        self.rate = rate
        self.rank, self.world = rank, world

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """The branch, or zeros, sample by sample."""
        if not self.training or self.rate == 0:
            return x
        drawn = torch.rand(self.world * x.shape[0], 1, 1, device=x.device)
        kept = drawn[self.rank * x.shape[0] : (self.rank + 1) * x.shape[0]] >= self.rate
        return x * (kept / (1 - self.rate)).to(x.dtype)
