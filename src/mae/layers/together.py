"""What several processes that train together compare: the rows of all of them, under one key."""

import torch
import torch.distributed as dist
from jaxtyping import Float, Int64
from torch import Tensor


def num_together() -> int:
    """How many processes take this step together; 1 where gradients are off.

    Pictures and checks are made by one process alone, without gradients, and it must not wait for the others.
    """
    if not (dist.is_available() and dist.is_initialized() and torch.is_grad_enabled()):
        return 1
    return dist.get_world_size()


def gather_features(features: Float[Tensor, "b D"]) -> Float[Tensor, "B D"]:
    """The rows of all processes, in order of rank; those of other processes are constants here.

    The gradient of this process's own rows is multiplied by the number of processes. If every process computes
    the same value from the result, the mean that DistributedDataParallel takes over processes is then the
    gradient of one process with all rows: each adds the part that runs through its own rows, and the parts
    are complete. It is what a gather whose backward sums over processes gives, without another exchange in
    the backward pass.

    Every process must call this, with equally many rows. Where gradients are off nothing is gathered, see
    `num_together`.
    """
    processes = num_together()
    if processes == 1:
        return features
    constant = features.detach().contiguous()
    rows = [torch.empty_like(constant) for _ in range(processes)]
    dist.all_gather(rows, constant)
    rows[dist.get_rank()] = features + (processes - 1) * (features - constant)  # adds 0, and gradient
    return torch.cat(rows)


def largest_together(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """The largest of the values of all processes, a constant; every process must call this."""
    largest = value.detach().clone()
    if num_together() > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest


def shared_key(keys: Int64[Tensor, " b"]) -> Int64[Tensor, " 1"]:
    """The key of the first row of all that `gather_features` gathers, in every process; each must call this."""
    key = keys[:1].clone()
    if num_together() > 1:
        dist.broadcast(key, src=0)
    return key
