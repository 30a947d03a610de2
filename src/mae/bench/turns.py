"""Timing several ways of doing a thing side by side: whatever else the machine does falls on each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import torch

from mae.training.device import synchronise

_LEAST, _MOST = 5, 60


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Quartiles of what was measured in all turns."""

    lower: float
    median: float
    upper: float

    def text(self, digits: int) -> str:
        """As `1.07 (1.05–1.08)`."""
        low, middle, high = (f"{value:,.{digits}f}" for value in (self.lower, self.median, self.upper))
        return f"{middle} ({low}\N{EN DASH}{high})"


def spread(values: Sequence[float]) -> Spread:
    """Quartiles of two values or more."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(lower=low, median=middle, upper=high)


def ratios(ones: Sequence[float], others: Sequence[float]) -> Spread:
    """Of the first to the second, turn by turn."""
    return spread([one / other for one, other in zip(ones, others, strict=True)])


def take_turns(ways: Mapping[str, Callable[[], float]], *, seconds: float) -> dict[str, list[float]]:
    """What each way measures in each turn: 5 turns at least and 60 at most, in about the time given.

    Args:
        ways: by name; each is called twice before any of it counts, and the order is turned round every other turn, so
            that none always comes in the wake of the same other.
        seconds: to spend on the turns that count.
    """
    for measure in ways.values():
        measure()
    began = perf_counter()
    for measure in ways.values():
        measure()
    turns = max(_LEAST, min(_MOST, int(seconds / (perf_counter() - began))))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            found[name].append(ways[name]())
    return found


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, the device's queue emptied before and after."""
    synchronise(device)
    start = perf_counter()
    run()
    synchronise(device)
    return perf_counter() - start
