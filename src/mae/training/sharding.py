"""A module sharded over the processes (FSDP2), for models whose weights and averages do not fit on every GPU.

DTensor's and FSDP's classes are recognised by their methods where possible: importing them takes more than a second,
which a run that shards nothing need not wait for.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mae.training.device import autocast

_DTYPES = {"bf16": torch.bfloat16}


def shard(module: nn.Module, precision: str, *, trained: bool = True) -> None:
    """Shard a module's parameters over the processes, in place; make its optimizer afterwards.

    Each member of an `nn.Sequential` is gathered for its computation and freed after it, the rest with the whole
    module; one without parameters stays as it is. Methods that compute with the parameters beside `forward` are named
    by a module's `forward_methods`. With `bf16` they are gathered, and gradients computed, in bf16; what the module
    itself is given, weights, averages and the sums of gradients over processes stay in float32.

    Args:
        module: on its device; every process has the same weights.
        precision: `fp32` or `bf16`.
        trained: whether a backward pass follows each forward pass; without one, shards are freed after the latter.
    """
    if next(module.parameters(), None) is None:
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    policy = MixedPrecisionPolicy(param_dtype=_DTYPES.get(precision), reduce_dtype=torch.float32)
    # The whole module is given images, of which targets are made: they stay as exact as they are.
    uncast = replace(policy, cast_forward_inputs=False)
    blocks = [block for each in module.modules() if isinstance(each, nn.Sequential) for block in each]
    for block in blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(module, mp_policy=uncast, reshard_after_forward=None if trained else True)
    for each in (*blocks, module):
        for method in getattr(each, "forward_methods", ()):
            register_fsdp_forward_method(each, method)


def is_sharded(module: nn.Module) -> bool:
    """Whether `shard` was applied to it."""
    return hasattr(module, "set_requires_gradient_sync")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one; every process must call it."""
    full: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return full


def sharded_like(like: Tensor, tensor: Tensor) -> Tensor:
    """This process's shard of a tensor, if `like` is sharded; all have the whole tensor, so nothing is sent."""
    if not _is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def autocast_if_sharded(module: nn.Module, precision: str, device: torch.device) -> AbstractContextManager[object]:
    """For what is computed beside `forward`: gathered weights may be of another type, elsewhere nothing changes."""
    return autocast(precision, device) if is_sharded(module) else nullcontext()


@contextmanager
def exchanging_gradients(module: nn.Module, exchange: bool) -> Iterator[None]:
    """Whether the backward passes inside exchange gradients between processes; otherwise these accumulate."""
    if is_sharded(module):
        module.set_requires_gradient_sync(exchange)  # type: ignore[operator]
        yield
    elif isinstance(module, DistributedDataParallel) and not exchange:
        with module.no_sync():
            yield
    else:
        yield
