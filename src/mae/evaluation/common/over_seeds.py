"""What a number is over several seeds: its mean, and Student's interval of it and of paired differences."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_CONFIDENCE = 0.95
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class OverSeeds:
    """The mean of a number over seeds.

    Attributes:
        mean: over the seeds.
        low: lower end of the 95 % confidence interval of the mean; None for one seed.
        high: its upper end.
        values: of each seed.
    """

    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    def __str__(self) -> str:
        """In percent, with half the interval."""
        shown = f"{100 * self.mean:.1f}"
        return shown if self.low is None or self.high is None else f"{shown} ± {50 * (self.high - self.low):.1f}"


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """The mean of some values and Student's interval of it."""
    low = high = None
    if len(values) > 1:
        from scipy.stats import ttest_1samp  # here: slow to import

        with warnings.catch_warnings():  # of values that are nearly equal
            warnings.simplefilter("ignore", RuntimeWarning)
            interval = ttest_1samp(values, 0.0).confidence_interval(_CONFIDENCE)
        low, high = float(interval.low), float(interval.high)
    return OverSeeds(mean=float(np.mean(values)), low=low, high=high, values=tuple(values))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> OverSeeds:
    """How much larger one number is than another, seed by seed: Student's paired t-test."""
    return over_seeds([one - other for one, other in zip(ours, theirs, strict=True)])


def differ_alike(low: float, high: float) -> bool:
    """Whether all seeds differ by the same, as scores on few test images may: an interval without width, but not at 0.

    Args:
        low: lower end of the interval of the differences.
        high: its upper end.
    """
    return not low <= 0 <= high and high - low <= _ROUNDING * max(abs(low), abs(high))
