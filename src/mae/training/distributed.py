"""One process or many: what `torchrun` says of the others, and the few things they agree on."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mae.errors import UsageError


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
        values = torch.tensor([float(flag) for flag in flags])  # on the CPU: a GPU's queue is not waited for
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return tuple(bool(value) for value in values.tolist())

    def all(self, flag: Tensor) -> Tensor:
        """A flag on the run's device, true when it is true in every process; nobody waits for the device."""
        if self.size == 1:
            return flag
        value = flag.float()
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return value.bool()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process through before the others, so that only it downloads what is missing."""
        if not self.is_main:
            dist.barrier()
        yield
        if self.is_main and self.size > 1:
            dist.barrier()

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
    """The world `torchrun` describes in the environment, joined; a world of one without it.

    Raises:
        UsageError: several processes on a device that cannot exchange gradients.
    """
    if not dist.is_torchelastic_launched():
        return World()
    world = World(
        rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), local_rank=int(os.environ["LOCAL_RANK"])
    )
    if world.size > 1:
        if device_type not in ("cpu", "cuda"):
            raise UsageError(f"several processes cannot train on {device_type}; use --device cpu or cuda")
        if device_type == "cuda":
            torch.cuda.set_device(world.local_rank)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    return world
