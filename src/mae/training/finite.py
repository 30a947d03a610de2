"""Steps whose loss or gradient is not finite (nan or inf): left out, and counted where the numbers are."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

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


def all_finite(*numbers: Tensor) -> Bool[Tensor, ""]:
    """Whether all numbers of a step are finite, on their device."""
    return torch.stack([number.detach().float() for number in numbers]).isfinite().all()


class FiniteSteps:
    """Counts the broken steps on the device, so that nobody waits for it.

    Args:
        device: where the numbers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.begin_afresh()

    def begin_afresh(self) -> None:
        """Forget every step judged so far."""
        self._left_out, self._now, self._most = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._last = torch.full((), -1, dtype=torch.int64, device=self._device)

    def count(self, step: int, finite: Bool[Tensor, ""]) -> None:
        """Take note of a step, which all processes found finite, or not all."""
        self._now = torch.where(finite, 0, self._now + 1)
        self._most = torch.maximum(self._most, self._now)
        self._left_out = self._left_out + ~finite
        self._last = torch.where(finite, self._last, step)

    def read(self) -> BrokenSteps:
        """The counts; waits for the device."""
        left_out, most, last, now = torch.stack([self._left_out, self._most, self._last, self._now]).tolist()
        self._left_out = torch.zeros_like(self._left_out)
        return BrokenSteps(left_out=left_out, in_a_row=most, last=last, now=now)
