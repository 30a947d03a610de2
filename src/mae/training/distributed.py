"""One process or many: what `torchrun` says of the others, and what passes between them."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mae.errors import MAEError, UsageError

_TIMEOUT = "OPENMAE_TIMEOUT"
_TIMEOUT_SECONDS = 1800.0
_POLL_SECONDS = 0.05


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

    def minimum(self, values: Tensor) -> Tensor:
        """The smallest of each of a tensor's values over all processes; nobody waits for a GPU."""
        if self.size == 1:
            return values
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.MIN)
        return values

    def broadcast(self, values: Tensor) -> None:
        """Write the main process's values over those of the others."""
        if self.size > 1:
            dist.broadcast(values, src=0)

    def from_main(self, make: Callable[[], Any]) -> Any:
        """What the main process makes, a JSON value, in every process; the others wait.

        Raises:
            MAEError: making it failed, in every process.
        """
        if self.size == 1:
            return make()
        failure: MAEError | OSError | None = None
        told: dict[str, Any] = {}
        if self.is_main:
            try:
                told = {"value": make()}
            except (MAEError, OSError) as error:
                failure, told = error, {"error": str(error), "usage": isinstance(error, UsageError)}
        told = json.loads(self._bytes_of_main(json.dumps(told).encode()))
        if failure is not None:
            raise failure
        if "error" in told:
            raise (UsageError if told["usage"] else ToldByMain)(told["error"])
        return told["value"]

    def _bytes_of_main(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        self.broadcast(length)
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else _empty_bytes(length)
        self.broadcast(values)
        return bytes(values.numpy())

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
        if self.size == 1 or hasattr(module, "set_requires_gradient_sync"):  # FSDP has seen to it
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)

    def leave(self) -> None:
        """End the communication that `join_world` began."""
        if self.size > 1:
            dist.destroy_process_group()


class ToldByMain(MAEError):
    """A failure of the main process, in another one; the user has it from the main one already."""

    told_by_main = True


class LostProcess(MAEError):
    """Another process of the run died or cannot be reached."""


def _empty_bytes(length: Tensor) -> Tensor:
    return torch.empty(int(length), dtype=torch.uint8)


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
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
        timeout = timedelta(seconds=_timeout_seconds())
        store = _store_of_this_start(world, timeout)
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)
    return world


def _store_of_this_start(world: World, timeout: timedelta) -> dist.Store:
    """Where the processes leave each other their addresses.

    torchrun keeps one store for all starts of a run, and PyTorch 2.15 finds there the addresses of processes that have
    died. So the main process makes up a name for this start, and another one takes it only if that process welcomes
    it by a name that it has made up itself: what earlier starts wrote does neither.
    """
    store: dist.Store = next(dist.rendezvous("env://", timeout=timeout))[0]
    own = uuid4().hex
    if world.is_main:
        store.set("start", own)
        for rank in range(1, world.size):
            store.set(f"{own}/welcome/{store.get(f'{own}/{rank}').decode()}", "")
        return dist.PrefixStore(own, store)
    while True:
        start = store.get("start").decode()
        store.set(f"{start}/{world.rank}", own)
        if store.check([f"{start}/welcome/{own}"]):
            return dist.PrefixStore(start, store)
        time.sleep(_POLL_SECONDS)


def was_restarted() -> bool:
    """Whether `torchrun` starts this run anew after a process of it failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def may_be_restarted() -> bool:
    """Whether `torchrun` would start this run anew if a process of it failed (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def _timeout_seconds() -> float:
    """How long a process may be silent before it counts as lost; the main one is, while it evaluates."""
    text = os.environ.get(_TIMEOUT, str(_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e6:
        raise UsageError(f"{_TIMEOUT} is {text!r}; expected seconds, from 1 to a million")
    return seconds


@contextmanager
def explained_lost_process(world: World) -> Iterator[None]:
    """Turns PyTorch's error for a process that does not answer into one that says what to do.

    Raises:
        LostProcess: another process died, or said nothing for too long.
    """
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        # gloo raises plain errors, which name it or the file of its source; NCCL's are DistErrors.
        if world.size == 1 or not (isinstance(error, dist.DistError) or "gloo" in words.lower() or "NCCL" in words):
            raise
        raise LostProcess(
            f"process {world.rank} of {world.size} lost another one, which died or said nothing for "
            f"{_timeout_seconds():g} s ({words.splitlines()[0].split('. ')[0]}); its own message, if it had time for "
            "one, stands beside this. Go on from the last checkpoint with --resume"
        ) from error
