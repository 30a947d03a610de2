"""One process or many: what `torchrun` says of the others, and the few things they agree on."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run.

    Attributes:
        rank: this process's number.
        size: how many there are.
        local_rank: this process's number on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over all processes."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values)
        return values / self.size

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag, true when it is true in any process."""
        if self.size == 1:
            return flags
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        values = torch.tensor([float(flag) for flag in flags], device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return tuple(bool(value) for value in values.tolist())

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module as all processes train it together."""
        if self.size == 1:
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def leave(self) -> None:
        """End the communication that `join_world` began."""
        if self.size > 1:
            dist.destroy_process_group()


def join_world(device_type: str) -> World:
    """The world `torchrun` describes in the environment, joined; a world of one without it."""
    world = World(
        rank=int(os.environ.get("RANK", "0")),
        size=int(os.environ.get("WORLD_SIZE", "1")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )
    if world.size > 1:
        if device_type == "cuda":
            torch.cuda.set_device(world.local_rank)
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    return world
