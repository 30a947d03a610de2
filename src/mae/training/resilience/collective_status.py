"""What the processes of a run exchange in each step, in one small collective."""

import signal
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from mae.training.distributed import World

_STOPS = (0, signal.SIGINT, signal.SIGTERM)
"""Signals that stop a run, the stronger later; all but Ctrl-C count as SIGTERM: somebody else wants the machine."""


@dataclass(frozen=True, kw_only=True)
class StepStatus:
    """The status of one process, or of all combined.

    Attributes:
        stop: number of the signal that asks to stop, 0 for none; combined: the strongest.
        save_due: whether it is time for a checkpoint; combined: in any process.
        saved: step up to which checkpoints are written; combined: the smallest.
        failed: whether a checkpoint could not be written; combined: in any process.
    """

    stop: int = 0
    save_due: bool = False
    saved: int = 0
    failed: bool = False


class StatusExchange:
    """One collective per step: whether its numbers are finite, and the combined `StepStatus`.

    On a GPU the result is read one step late, when it has arrived: the host does not wait for the device.

    Args:
        device: where the run's numbers are.
        world: the processes.
        late: whether the result is read a step late; None: on a GPU.
    """

    def __init__(self, device: torch.device, world: World, *, late: bool | None = None) -> None:
        self._device, self._world = device, world
        self._late = device.type == "cuda" if late is None else late
        self._results: list[_Result] = []
        self._status = StepStatus()

    def exchange(self, finite: Bool[Tensor, ""], status: StepStatus) -> Bool[Tensor, ""]:
        """Send this process's status; returns whether every process found its numbers finite, on the device."""
        if self._world.size == 1:
            self._status = status
            return finite
        stop = _STOPS.index(status.stop if status.stop in _STOPS else signal.SIGTERM)
        # The minimum of each: all must be finite and have saved, while one process suffices for the rest.
        sent = torch.tensor([status.saved, -stop, -status.save_due, -status.failed], dtype=torch.float64)
        if self._device.type == "cuda":
            sent = sent.pin_memory().to(self._device, non_blocking=True)
        agreed = self._world.minimum(torch.cat([finite.double().reshape(1), sent]))
        self._results = [*self._results[-1:], _Result(agreed)]
        return agreed[0].bool()

    def read(self) -> StepStatus:
        """The combined status of the last exchange, or of the one before it where the result is read late."""
        if self._world.size == 1:
            return self._status
        result = self._results[0 if self._late else -1] if len(self._results) > self._late else None
        if result is None:
            return StepStatus()  # no result has arrived yet
        saved, stop, save_due, failed = result.read()[1:]
        return StepStatus(stop=_STOPS[int(-stop)], save_due=bool(save_due), saved=int(saved), failed=bool(failed))


class _Result:
    """A result on its way from the device."""

    def __init__(self, agreed: Float64[Tensor, " n"]) -> None:
        self._copy = agreed.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if agreed.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Its numbers; waits until they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._copy.tolist()
        return values
