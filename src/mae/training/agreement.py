"""What the processes of a run tell each other once a step, in one small collective."""

import signal
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from mae.training.distributed import World

_STOPS = (0, signal.SIGINT, signal.SIGTERM)
"""What may be asked, the stronger later; every signal but Ctrl-C counts as SIGTERM: somebody else wants the machine."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """What one process says, or what all say together.

    Attributes:
        stop: number of the signal that asks to stop, 0 for none; together the strongest.
        save_due: whether it is time for a checkpoint; together whether anybody finds so.
        saved: step of the newest checkpoint of which nothing is left to write here; together the least of these.
        failed: whether a checkpoint could not be written; together whether anybody failed.
    """

    stop: int = 0
    save_due: bool = False
    saved: int = 0
    failed: bool = False


class Agreement:
    """One collective a step: whether its numbers are finite, and everybody's `Word`.

    On a GPU the answer is read one step late, when it has arrived by itself: nobody waits for the device.

    Args:
        device: where the run's numbers are.
        world: the processes.
        late: whether the answer is read a step late; None: on a GPU.
    """

    def __init__(self, device: torch.device, world: World, *, late: bool | None = None) -> None:
        self._device, self._world = device, world
        self._late = device.type == "cuda" if late is None else late
        self._heard: list[_Heard] = []
        self._word = Word()

    def exchange(self, finite: Bool[Tensor, ""], word: Word) -> Bool[Tensor, ""]:
        """Tell the others; whether every process found its numbers finite, on the device."""
        if self._world.size == 1:
            self._word = word
            return finite
        stop = _STOPS.index(word.stop if word.stop in _STOPS else signal.SIGTERM)
        # The smallest of each is taken: all must be finite and have saved, and one suffices for the rest.
        said = torch.tensor([word.saved, -stop, -word.save_due, -word.failed], dtype=torch.float64)
        if self._device.type == "cuda":
            said = said.pin_memory().to(self._device, non_blocking=True)
        agreed = self._world.minimum(torch.cat([finite.double().reshape(1), said]))
        self._heard = [*self._heard[-1:], _Heard(agreed)]
        return agreed[0].bool()

    def read(self) -> Word:
        """What all said: in the last exchange, or in the one before it where the answer is read late."""
        if self._world.size == 1:
            return self._word
        heard = self._heard[0 if self._late else -1] if len(self._heard) > self._late else None
        if heard is None:
            return Word()  # nobody has said anything yet
        saved, stop, save_due, failed = heard.read()[1:]
        return Word(stop=_STOPS[int(-stop)], save_due=bool(save_due), saved=int(saved), failed=bool(failed))


class _Heard:
    """An answer on its way from the device."""

    def __init__(self, agreed: Float64[Tensor, " n"]) -> None:
        self._copy = agreed.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if agreed.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """Its numbers; waits until they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._copy.tolist()
        return values
