"""Timing several ways of doing a thing side by side: whatever else the machine does falls on each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles
from time import perf_counter

import torch

from mae.training.device import synchronise

_MIN_TURNS, _MAX_TURNS = 5, 60


@dataclass(frozen=True, kw_only=True)
class Quartiles:
    """Quartiles of what was measured in all turns."""

    lower: float
    median: float
    upper: float

    def text(self, digits: int) -> str:
        """As `1.07 (1.05–1.08)`."""
        low, middle, high = (f"{value:,.{digits}f}" for value in (self.lower, self.median, self.upper))
        return f"{middle} ({low}\N{EN DASH}{high})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Quartiles of one value or more."""
    low, middle, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
    return Quartiles(lower=low, median=middle, upper=high)


def ratios(ones: Sequence[float], others: Sequence[float]) -> Quartiles:
    """Quartiles of the ratios of the first to the second, turn by turn."""
    return quartiles([one / other for one, other in zip(ones, others, strict=True)])


def time_interleaved(
    ways: Mapping[str, Callable[[], float]],
    *,
    seconds: float | None = None,
    turns: int | None = None,
    warm_ups: int = 2,
) -> dict[str, list[float]]:
    """What each way measures in each turn; every other turn has the reverse order, so that none always follows another.

    Args:
        ways: by name, each returns what it measured.
        seconds: to spend on the turns that count, about: 5 turns at least and 60 at most.
        turns: how many, instead of `seconds`.
        warm_ups: calls of each way before any counts; with `seconds` the last of them tells how long a turn takes.
    """
    began = perf_counter()
    for _ in range(warm_ups):
        began = perf_counter()
        for measure in ways.values():
            measure()
    if turns is None:
        assert seconds is not None and warm_ups, "give seconds, with a warm-up, or turns"
        turns = max(_MIN_TURNS, min(_MAX_TURNS, int(seconds / (perf_counter() - began))))
    measured: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns):
        for name in list(ways) if turn % 2 == 0 else reversed(list(ways)):
            measured[name].append(ways[name]())
    return measured


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds that a call takes, the device's queue emptied before and after."""
    synchronise(device)
    start = perf_counter()
    run()
    synchronise(device)
    return perf_counter() - start
