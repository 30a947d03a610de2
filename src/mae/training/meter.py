"""The numbers of the steps since the last log row, summed on the device and read once."""

from time import perf_counter
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sums loss, terms and gradient norm without asking the device for them, and times the wait for data."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was counted; time runs from now."""
        self._sums: dict[str, Tensor] = {}
        self._counted: Tensor | int = 0
        self._steps = 0
        self._waited = 0.0
        self._began = perf_counter()

    def waited(self, seconds: float) -> None:
        """Time spent waiting for a batch."""
        self._waited += seconds

    def left_out(self, seconds: float) -> None:
        """Time spent on other things than training, such as saving; it does not count in the speed."""
        self._began += seconds

    def step(self, values: dict[str, Tensor], finite: Tensor) -> None:
        """The named numbers of one optimizer step; those of a step that is not finite are left out of the means."""
        for name, value in values.items():
            value = torch.where(finite, value.detach().float(), 0.0)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counted = self._counted + finite
        self._steps += 1

    def read(self, samples_per_step: int) -> tuple[Tensor, list[str], dict[str, Any]]:
        """Means of the numbers since the last call, their names, and how fast it went; starts afresh.

        The means are nan where every step since then was left out.
        """
        seconds = max(perf_counter() - self._began, 1e-9)
        names = list(self._sums)
        means = torch.stack([self._sums[name] for name in names]) / self._counted
        speed = {
            "images_per_second": self._steps * samples_per_step / seconds,
            "data_wait": self._waited / seconds,
        }
        self.begin()
        return means, names, speed
