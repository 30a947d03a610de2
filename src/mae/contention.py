"""CPU contention: how many cores other processes take, and how threads wait for each other where they do.

No PyTorch here: how its threads wait is chosen before it is loaded.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

import psutil

NOTEWORTHY = 0.5
"""Cores taken by others from which it is worth a word: housekeeping of the system takes less."""

SPIN_COUNT, WAIT_POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_ALONE, _SHARED = "5000", "0"
_SECONDS = 0.05  # the system counts in ticks of 4 or 10 ms

_RANKS = "LOCAL_WORLD_SIZE"  # set by torchrun, whose process is the parent of those of a run on this machine
_NOT_BUSY = {"idle", "iowait", "guest", "guest_nice"}  # a guest's time is in `user` and `nice` already


def num_cores() -> int:
    """Cores that this process may use."""
    return len(_cores())


class Contention:
    """Measures from when it is made, and from look to look."""

    def __init__(self) -> None:
        self._before = _read_times()

    def look(self) -> float:
        """Cores that other processes, or other machines on the same hardware, took on average since the last look."""
        now, before = _read_times(), self._before
        self._before = now
        seconds = max(now.at - before.at, 1e-9)
        return max(0.0, ((now.busy - before.busy) - (now.own - before.own)) / seconds)


class _Times(NamedTuple):
    """A moment, and seconds of processor time until then: of all that computes, and of this run."""

    at: float
    busy: float
    own: float


def _read_times() -> _Times:
    per_core = psutil.cpu_times(percpu=True)
    chosen = [per_core[core] for core in _cores() if core < len(per_core)]
    busy = sum(value for core in chosen for name, value in core._asdict().items() if name not in _NOT_BUSY)
    return _Times(at=time.perf_counter(), busy=busy, own=sum(_own_times()))


def _own_times() -> Iterator[float]:
    """Of this run's processes: this one and its workers, and of several ranks those of all."""
    root = psutil.Process(os.getppid()) if _RANKS in os.environ else psutil.Process()
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # one that has just ended; its parent's children's time holds its own
            yield sum(process.cpu_times()[:4])


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):  # neither macOS nor Windows
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def set_spin_count() -> None:
    """Set `GOMP_SPINCOUNT` for this process and those it starts, unless the user has said how threads wait.

    A thread of GNU OpenMP (PyTorch's on Linux) that waits for the others spins some 300,000 times before it sleeps.
    Where another process has one of the cores, the thread waited for is not running, and the time is spun away. A
    thread that sleeps leaves the core to whoever has work; waking it again takes time, which shows on idle cores.
    So threads spin for a shorter time than usual, and not at all where others take the cores already
    (benchmarks/contention.py has the figures). What is computed stays the same.
    """
    # PyTorch reads it once, when it is loaded.
    if sys.platform != "linux" or "torch" in sys.modules or {SPIN_COUNT, WAIT_POLICY} & os.environ.keys():
        return
    contention = Contention()
    time.sleep(_SECONDS)
    os.environ[SPIN_COUNT] = _SHARED if contention.look() >= NOTEWORTHY else _ALONE
