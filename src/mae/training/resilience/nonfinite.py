"""Steps whose loss or gradient is not finite (nan or inf): skipped, and counted on the device."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

MAX_CONSECUTIVE = 3
"""So many such steps one after another are no accident."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteSteps:
    """The counts.

    Attributes:
        skipped: steps since the last reading that were not finite.
        consecutive: the longest sequence of them since the last reset.
        last: number of the last one, -1 where there was none.
        now: length of the sequence that the newest step ends; 0 where the newest step was finite.
    """

    skipped: int
    consecutive: int
    last: int
    now: int


def all_finite(*numbers: Tensor) -> Bool[Tensor, ""]:
    """Whether all numbers of a step are finite, on their device."""
    return torch.stack([number.detach().float() for number in numbers]).isfinite().all()


class NonFiniteCounter:
    """Counts steps that are not finite on the device, so that the host does not wait for it.

    Args:
        device: where the numbers are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget every step so far."""
        self._skipped, self._now, self._most = torch.zeros(3, dtype=torch.int64, device=self._device)
        self._last = torch.full((), -1, dtype=torch.int64, device=self._device)

    def count(self, step: int, finite: Bool[Tensor, ""]) -> None:
        """Count a step, given whether all processes found it finite."""
        self._now = torch.where(finite, 0, self._now + 1)
        self._most = torch.maximum(self._most, self._now)
        self._skipped = self._skipped + ~finite
        self._last = torch.where(finite, self._last, step)

    def read(self) -> NonFiniteSteps:
        """The counts; waits for the device."""
        skipped, most, last, now = torch.stack([self._skipped, self._most, self._last, self._now]).tolist()
        self._skipped = torch.zeros_like(self._skipped)
        return NonFiniteSteps(skipped=skipped, consecutive=most, last=last, now=now)
