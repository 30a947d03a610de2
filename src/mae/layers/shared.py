"""Layers that act on the whole micro-batch, however it is dealt out among processes, on any device."""

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

from mae.layers.precision import without_autocast
from mae.layers.together import num_together


class SharedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` whose statistics in training are those of the whole micro-batch, however it is dealt out.

    `nn.SyncBatchNorm` does the same on GPUs alone. Every process must call this, with equally many images.
    """

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Maps with a mean of 0 and a std of 1 in each channel, then scaled and shifted."""
        processes = num_together()
        if not self.training or processes == 1:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        with without_autocast(x.device):
            values, axes = x.float(), (0, 2, 3)
            mean = all_reduce(values.mean(dim=axes)) / processes
            centred = values - mean[:, None, None]
            variance = all_reduce(centred.square().mean(dim=axes)) / processes
            with torch.no_grad():
                count = processes * values.numel() // values.shape[1]
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
            scale = self.weight * (variance + self.eps).rsqrt()
            return (centred * scale[:, None, None] + self.bias[:, None, None]).to(x.dtype)


class SharedDropout2d(nn.Module):
    """`nn.Dropout2d` that drops the same channels of an image however many processes share the micro-batch.

    Their generators must stand alike, and each must have as many images.

    Args:
        p: share of the channels that is dropped.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """Maps with whole channels at 0, the others made as much larger; in evaluation as they are."""
        if not self.training:
            return x
        processes = num_together()
        rank = dist.get_rank() if processes > 1 else 0
        drawn = torch.rand(processes * len(x), x.shape[1], 1, 1, device=x.device)
        kept = drawn[rank * len(x) : (rank + 1) * len(x)] >= self.p
        return x * kept / (1 - self.p)
