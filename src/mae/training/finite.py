"""Steps whose loss or gradient is not finite (nan or inf): left out, and counted where the numbers are."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from mae.training.distributed import World

MOST_IN_A_ROW = 3
"""So many broken steps one after another are no accident."""


@dataclass(frozen=True, kw_only=True)
class BrokenSteps:
    """What was counted.

    Attributes:
        left_out: broken steps since the last reading.
        in_a_row: the longest run of them since the count was last begun afresh.
        last: number of the last one, -1 where there was none.
        now: how many the newest steps are; 0 where the newest step was whole.
    """

    left_out: int
    in_a_row: int
    last: int
    now: int


class FiniteSteps:
    """Judges each step on the device, so that nobody waits for it, and counts the broken ones.

    Args:
        device: where the numbers are.
        world: the processes, which all come to the same judgement.
    """

    def __init__(self, device: torch.device, world: World) -> None:
        self._device, self._world = device, world
        self.begin_afresh()

    def begin_afresh(self) -> None:
        """Forget every step judged so far."""
        self._left_out, self._now, self._most = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._last = torch.full((), -1, dtype=torch.int64, device=self._device)

    def judge(self, step: int, *numbers: Tensor) -> Bool[Tensor, ""]:
        """Whether all numbers of a step are finite, in every process."""
        finite = self._world.all(torch.stack([number.detach().float() for number in numbers]).isfinite().all())
        self._now = torch.where(finite, 0, self._now + 1)
        self._most = torch.maximum(self._most, self._now)
        self._left_out = self._left_out + ~finite
        self._last = torch.where(finite, self._last, step)
        return finite

    def read(self) -> BrokenSteps:
        """The counts; waits for the device."""
        left_out, most, last, now = torch.stack([self._left_out, self._most, self._last, self._now]).tolist()
        self._left_out = torch.zeros_like(self._left_out)
        return BrokenSteps(left_out=left_out, in_a_row=most, last=last, now=now)
