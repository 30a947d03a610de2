"""Whether two arms differ: differences paired by seed, their interval, and the verdict in words."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
from scipy.stats import t as student

from mae.experiments.results import Metric, StudyResult

CONFIDENCE = 0.95
_ROUNDING = 1e-9

Verdict = Literal[
    "better",
    "worse",
    "not distinguishable",
    "no verdict: one seed",
    "no verdict: no seed in common",
    "no verdict: all seeds differ alike",
    "not judged",
]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Some values in short.

    Attributes:
        mean: of them; None where there are none.
        deviation: the sample's, divided by `count - 1`; None for fewer than two.
        count: how many.
    """

    mean: float | None
    deviation: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an arm lies from the reference, in the metric's units.

    Attributes:
        mean: of other - reference over the seeds that both have; None where there is none.
        low: lower end of the 95 % confidence interval of the mean; None for fewer than two pairs.
        high: its upper end.
        pairs: seeds that both have.
        verdict: on the other arm.
    """

    mean: float | None
    low: float | None
    high: float | None
    pairs: int
    verdict: Verdict

    @property
    def identical(self) -> bool:
        """Whether every pair agrees to the last digit."""
        return self.pairs > 1 and self.mean == self.low == self.high == 0


def summarise(values: Iterable[float]) -> Spread:
    """Mean and sample deviation of values."""
    array = np.fromiter(values, dtype=float)
    return Spread(
        mean=float(array.mean()) if len(array) else None,
        deviation=float(array.std(ddof=1)) if len(array) > 1 else None,
        count=len(array),
    )


def compare(reference: Mapping[int, float], other: Mapping[int, float], metric: Metric) -> Difference:
    """The paired difference of two arms and the verdict on the second.

    Runs of the same seed share their initial weights, order, crops and masks as far as the arms allow, so they are
    compared with each other. The interval is Student's t with `pairs - 1` degrees of freedom (Student, 1908) over
    the differences. It covers what another seed would change, and neither another data set nor other test images.

    Args:
        reference: finite values by seed.
        other: likewise, of the arm that is judged.
        metric: tells which direction is better.
    """
    seeds = sorted(reference.keys() & other.keys())
    gaps = summarise(other[seed] - reference[seed] for seed in seeds)
    low, high = None, None
    if gaps.mean is not None and gaps.deviation is not None:
        reach = float(student.ppf((1 + CONFIDENCE) / 2, gaps.count - 1)) * gaps.deviation / sqrt(gaps.count)
        low, high = gaps.mean - reach, gaps.mean + reach
    return Difference(
        mean=gaps.mean, low=low, high=high, pairs=gaps.count, verdict=_verdict(low, high, gaps.count, metric)
    )


def _verdict(low: float | None, high: float | None, pairs: int, metric: Metric) -> Verdict:
    if metric.better is None:
        return "not judged"
    if low is None or high is None:
        return "no verdict: one seed" if pairs else "no verdict: no seed in common"
    if low <= 0 <= high:
        return "not distinguishable"
    if high - low <= _ROUNDING * max(abs(low), abs(high)):
        return "no verdict: all seeds differ alike"  # as counts of few test images may: their spread is not 0
    return "better" if (low > 0) == (metric.better == "higher") else "worse"


def differences(result: StudyResult) -> dict[tuple[str, str], Difference]:
    """Every arm but the reference against it, by the metric's and the arm's name."""
    return {
        (metric.name, arm.name): compare(
            result.values(metric.name, result.reference), result.values(metric.name, arm.name), metric
        )
        for metric in result.metrics
        for arm in result.others
    }


def sentence(metric: Metric, difference: Difference, *, arm: str, reference: str) -> str:
    """The verdict for a reader, such as "linear probe, top-1: improved is better by 1.2 points (95 % interval ...)".

    Args:
        metric: what was measured.
        difference: of the two arms in it.
        arm: name of the arm that is judged.
        reference: name of the arm it is compared with.
    """
    mean, unit = difference.mean, f" {metric.gap_unit}".rstrip()
    if mean is None:
        return f"{metric.title}: no verdict: not measured with the same seed in {arm} and {reference}"
    if difference.identical:
        return f"{metric.title}: {arm} and {reference} are identical ({difference.pairs} seeds)"
    if difference.verdict in ("better", "worse"):
        # By how much, in the direction of the verdict: no sign to think about.
        low, high = sorted(abs(end) for end in (difference.low, difference.high) if end is not None)
        finding = f"{arm} is {difference.verdict} by {metric.gap_digits(abs(mean))}{unit}"
        return f"{metric.title}: {finding} ({_interval(metric, low, high)}, {difference.pairs} seeds)"
    gap = f"{metric.gap_digits(mean, sign=True)}{unit}"
    if difference.low is None or difference.high is None:
        return f"{metric.title}: {difference.verdict}; {arm} differs by {gap}"
    gap += f" ({_interval(metric, difference.low, difference.high)}, {difference.pairs} seeds)"
    if difference.verdict != "not distinguishable":
        return f"{metric.title}: {difference.verdict}; {arm} differs by {gap}"
    return f"{metric.title}: {arm} is not distinguishable: {gap}"


def _interval(metric: Metric, low: float, high: float) -> str:
    return f"{100 * CONFIDENCE:.0f} % interval {metric.gap_digits(low)} to {metric.gap_digits(high)}"


def caveat(result: StudyResult) -> str:
    """What the intervals cover, and how many verdicts chance alone would bring."""
    comparisons = len(result.others) * sum(metric.better is not None for metric in result.metrics)
    return (
        "An interval covers what other seeds would change (initial weights, order, crops, masks, what fine-tuning "
        "draws, which held-out images pictures are judged on), given this data set and these options; it says nothing "
        "of others. About one in twenty comparisons of arms "
        "that do not differ is called different by chance. Comparisons here, judged metrics times arms: "
        f"{comparisons}; the intervals are not widened for that."
    )
