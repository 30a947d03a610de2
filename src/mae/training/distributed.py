"""One process or many: what `torchrun` says of the others, and what passes between them."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mae.errors import MAEError, Stopped, UsageError
from mae.training.device import choose_device

_Item = TypeVar("_Item")

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
        local_size: how many of them there are on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

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
        if not self.is_main:
            return self._hear()
        with self._telling_failure():
            value = make()
        return self._tell({"value": value})["value"]

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process through before the others, so that only it downloads what is missing.

        Raises:
            MAEError: it failed there, in every process.
        """
        if self.size == 1:
            yield
        elif self.is_main:
            with self._telling_failure():
                yield
            self._tell({"value": None})
        else:
            self._hear()
            yield

    @contextmanager
    def _telling_failure(self) -> Iterator[None]:
        try:
            yield
        except (MAEError, OSError) as error:
            self._tell(_as_told(error))
            raise

    def _hear(self) -> Any:
        told = self._tell({})
        self._raise_told(told)
        return told["value"]

    def _raise_told(self, told: Mapping[str, Any]) -> None:
        """Fail as another process did, if it did."""
        if "error" in told:
            raise told_by_main((UsageError if told["usage"] else MAEError)(told["error"]), self)

    def _tell(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """What the main process says, in every process."""
        return json.loads(self._bytes_of_main(json.dumps(told).encode()))

    def in_turns(
        self,
        items: Sequence[_Item],
        compute: Callable[[_Item], Mapping[str, Tensor]],
        *,
        only_main: bool = False,
    ) -> Iterator[Mapping[str, Tensor]]:
        """What is computed from each item, in their order, in every process; each process computes its share of them.

        Every process must read it to its end, with the same items. Of several processes the tensors come back on the
        CPU.

        Args:
            items: what to compute from.
            compute: makes named tensors of one of them.
            only_main: whether the main process alone is given them, and the others as many empty mappings.

        Raises:
            MAEError: computing failed, in every process and at the first item for which it did.
        """
        if self.size == 1:
            yield from map(compute, items)
            return
        for start in range(0, len(items), self.size):
            told: dict[str, Any] = {}
            tensors: dict[str, Tensor] = {}
            try:
                for item in items[start + self.rank : start + self.rank + 1]:
                    # Copies: safetensors takes no two tensors that share memory.
                    found = {
                        name: values.cpu().clone(memory_format=torch.contiguous_format)
                        for name, values in compute(item).items()
                    }
                    tensors, told = found, {"names": list(found)}  # it would forget their order
            except (MAEError, OSError) as error:
                told = _as_told(error)
            everyone = [json.loads(data) for data in self._bytes_of_each(json.dumps(told).encode())]
            for told in everyone:
                self._raise_told(told)
            parts = self._bytes_of_each(save(tensors), only_main=only_main)
            for told, data in zip(everyone[: len(items) - start], parts, strict=False):
                loaded = load(data) if data else {}
                yield {name: loaded[name] for name in told["names"] if data}

    def whole_batch(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in order of rank, without gradients; each must have as many."""
        if self.size == 1:
            return rows
        constant = rows.detach().contiguous()
        parts = [torch.empty_like(constant) for _ in range(self.size)]
        dist.all_gather(parts, constant)
        return torch.cat(parts)

    def _bytes_of_each(self, data: bytes, *, only_main: bool = False) -> list[bytes]:
        """What each process gives, in order of rank; nothing in the others where only the main one wants it."""
        lengths = self.whole_batch(torch.tensor([len(data)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if not only_main:
            rows = self.whole_batch(padded.unsqueeze(0))
        elif self.is_main:
            rows = torch.empty(self.size, len(padded), dtype=torch.uint8)
            dist.gather(padded, list(rows))
        else:
            dist.gather(padded)
            return [b""] * self.size
        return [row[:length].numpy().tobytes() for row, length in zip(rows, lengths, strict=True)]

    def _bytes_of_main(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)])
        self.broadcast(length)
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_main else _empty_bytes(length)
        self.broadcast(values)
        return bytes(values.numpy())

    def wrap(self, module: nn.Module, device: torch.device) -> nn.Module:
        """The module as all processes train it together."""
        if self.size == 1 or hasattr(module, "set_requires_gradient_sync"):  # FSDP has seen to it
            return module
        return DistributedDataParallel(module, device_ids=[device] if device.type == "cuda" else None)


def told_by_main(error: MAEError, world: World) -> MAEError:
    """Mark an error that every process raises: the main one alone tells the user."""
    error.told_by_main = not world.is_main
    return error


class LostProcess(MAEError):
    """Another process of the run died or cannot be reached."""


def _as_told(error: MAEError | OSError) -> dict[str, Any]:
    return {"error": str(error), "usage": isinstance(error, UsageError)}


def _empty_bytes(length: Tensor) -> Tensor:
    return torch.empty(int(length), dtype=torch.uint8)


@contextmanager
def joined_world(device: str, *, advice: str = "") -> Iterator[tuple[World, torch.device]]:
    """The processes that `torchrun` started and this one's device, until they part; a world of one without it.

    Each of them must enter this. A program that has joined its processes by itself computes alone in each of them.

    Args:
        device: `auto`, `cpu`, `cuda` or `mps`.
        advice: what to do where another process is lost, as a sentence.

    Raises:
        UsageError: there is no such device, several processes cannot share it, or they compute on different kinds.
        LostProcess: another process died, did not come, or said nothing for too long.
    """
    chosen, world = choose_device(device), _told_world()
    parting = chosen.type != "cuda"
    try:
        with explained_lost_process(world, advice):
            if world.size > 1:
                _meet(world, chosen.type)
                _check_alike(world, chosen.type)
            here = torch.device("cuda", torch.cuda.current_device()) if chosen.type == "cuda" else chosen
            yield world, here
        parting = True
    except Stopped:  # all stop together
        parting = True
        raise
    finally:
        # NCCL's group waits at its end for the other processes, which may know nothing of this one's failure: it is
        # left to the end of the program, so that the user is told at once and torchrun ends the others.
        if parting and world.size > 1 and dist.is_initialized():
            # The group's threads drop the tensors of the last exchange once Python is idle. If they still had to, the
            # group's end would wait for them and they for Python, or a program that ends now would be aborted.
            time.sleep(_POLL_SECONDS)
            dist.destroy_process_group()


def _told_world() -> World:
    """What `torchrun` says in the environment."""
    if not dist.is_torchelastic_launched() or dist.is_initialized():
        return World()
    named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in named)
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def _meet(world: World, device_type: str) -> None:
    if device_type not in ("cpu", "cuda"):
        raise UsageError(f"several processes cannot compute together on {device_type}; use --device cpu or cuda")
    if device_type == "cuda":
        if (gpus := torch.cuda.device_count()) < world.local_size:
            raise UsageError(
                f"{world.local_size} processes were started on this machine, which shows {gpus} GPU(s); each needs one "
                f"of its own: start {gpus}, as by --gpus {gpus} or torchrun's --nproc-per-node {gpus}"
            )
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    timeout = timedelta(seconds=_timeout_seconds())
    store = _store_of_this_start(world, timeout)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout)


def _check_alike(world: World, device_type: str) -> None:
    """See that all processes compute on the same kind of device: a machine that shows no GPU would use its CPU.

    Raises:
        UsageError: they do not, in every process.
    """
    kinds = [kind.decode() for kind in world._bytes_of_each(device_type.encode())]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        text = (
            f"process 0 computes on {kinds[0]} and process {other} on {kinds[other]}; all need the same kind of "
            "device: see that every machine shows its GPUs (nvidia-smi), or give --device cpu"
        )
        raise told_by_main(UsageError(text), world)


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
        for other in range(1, world.size):
            store.set(f"{own}/welcome/{store.get(f'{own}/{other}').decode()}", "")
        return dist.PrefixStore(own, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        start = store.get("start").decode()
        store.set(f"{start}/{world.rank}", own)
        if store.check([f"{start}/welcome/{own}"]):
            return dist.PrefixStore(start, store)
        time.sleep(_POLL_SECONDS)
    seconds = timeout.total_seconds()
    raise LostProcess(f"process {world.rank} of {world.size} waited {seconds:g} s for the main one, which is gone")


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
def explained_lost_process(world: World, advice: str) -> Iterator[None]:
    """Turns PyTorch's error for a process that does not answer into one that says so, with some advice.

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
            f"one, stands beside this. {advice}".rstrip()
        ) from error
