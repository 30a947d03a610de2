"""The numbers of the steps since the last log row, summed on the device and read once."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sums loss, terms and gradient norm without waiting for the device, and times the wait for data."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset; time runs from now."""
        self._sums: dict[str, Tensor] = {}
        self._counted: Tensor | int = 0
        self._steps = 0
        self._waited = 0.0
        self._began = perf_counter()

    def waited(self, seconds: float) -> None:
        """Add time spent waiting for a batch."""
        self._waited += seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, time does not count in the speed: for other things than training, such as saving."""
        began = perf_counter()
        yield
        self._began += perf_counter() - began

    def step(self, values: dict[str, Tensor], finite: Tensor) -> None:
        """Add the named numbers of one optimizer step; the means exclude steps that are not finite."""
        for name, value in values.items():
            value = torch.where(finite, value.detach().float(), 0.0)
            self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counted = self._counted + finite
        self._steps += 1

    def read(self, samples_per_step: int) -> tuple[Tensor, list[str], dict[str, Any]]:
        """Means of the numbers since the last call, their names, and the speed; then resets.

        The means are nan where every step since then was skipped.
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
