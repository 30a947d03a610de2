"""Whether two variants differ: differences paired by seed, their confidence interval, and the verdict in words."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Literal

import numpy as np
from scipy.stats import ttest_rel

from mae.evaluation.common.over_seeds import differ_alike
from mae.experiments.core.metrics import Metric
from mae.experiments.core.results import StudyResult

CONFIDENCE = 0.95

Verdict = Literal[
    "better",
    "worse",
    "not distinguishable",
    "no verdict: one seed",
    "no verdict: no seed in common",
    "no verdict: all seeds differ alike",
    "no verdict: interval not finite",
    "not compared",
]


@dataclass(frozen=True, kw_only=True)
class SampleSummary:
    """Mean and spread of some values.

    Attributes:
        mean: of the values; None where there are none.
        std: of the sample, divided by `count - 1`; None for fewer than two.
        count: how many.
    """

    mean: float | None
    std: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a variant lies from the reference, in the metric's units.

    Attributes:
        mean: of other - reference over the seeds that both have; None where there are none.
        low: lower end of the 95 % confidence interval of the mean; None for fewer than two pairs.
        high: its upper end.
        pairs: seeds that both have.
        verdict: on the other variant.
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


def summarise(values: Iterable[float]) -> SampleSummary:
    """Mean and sample standard deviation."""
    array = np.fromiter(values, dtype=float)
    return SampleSummary(
        mean=float(array.mean()) if len(array) else None,
        std=float(array.std(ddof=1)) if len(array) > 1 else None,
        count=len(array),
    )


def compare(reference: Mapping[int, float], other: Mapping[int, float], metric: Metric) -> Difference:
    """The paired difference of two variants and the verdict on the second.

    Runs of the same seed share their initial weights, order, crops and masks as far as the variants allow, so they are
    compared with each other. The interval is that of Student's paired t-test. It covers what another seed would change,
    and neither another data set nor other test images.

    Args:
        reference: finite values by seed.
        other: likewise, of the variant that is compared with it.
        metric: knows which direction is better.
    """
    seeds = sorted(reference.keys() & other.keys())
    before, after = [reference[seed] for seed in seeds], [other[seed] for seed in seeds]
    mean, low, high = None, None, None
    if seeds:
        mean = float(np.subtract(after, before).mean())
    if len(seeds) > 1:
        with warnings.catch_warnings():  # on differences that are nearly equal, for which there is no verdict anyway
            warnings.simplefilter("ignore", RuntimeWarning)
            interval = ttest_rel(after, before).confidence_interval(CONFIDENCE)
        low, high = float(interval.low), float(interval.high)
    return Difference(mean=mean, low=low, high=high, pairs=len(seeds), verdict=_verdict(low, high, len(seeds), metric))


def _verdict(low: float | None, high: float | None, pairs: int, metric: Metric) -> Verdict:
    if metric.better is None:
        return "not compared"
    if low is None or high is None:
        return "no verdict: one seed" if pairs else "no verdict: no seed in common"
    if not (isfinite(low) and isfinite(high)):
        return "no verdict: interval not finite"  # as of values so large that their squares overflow
    if low <= 0 <= high:
        return "not distinguishable"
    if differ_alike(low, high):
        return "no verdict: all seeds differ alike"
    return "better" if (low > 0) == (metric.better == "higher") else "worse"


def differences(result: StudyResult) -> dict[tuple[str, str], Difference]:
    """Every variant but the reference against it, by the metric's and the variant's name."""
    return {
        (metric.name, variant.name): compare(
            result.values(metric.name, result.reference), result.values(metric.name, variant.name), metric
        )
        for metric in result.metrics
        for variant in result.others
    }


def sentence(metric: Metric, difference: Difference, *, variant: str, reference: str) -> str:
    """The verdict for a reader, such as "linear probe, top-1: improved is better by 1.2 points (95 % interval ...)".

    Args:
        metric: what was measured.
        difference: of the two variants in it.
        variant: name of the other variant.
        reference: name of the reference.
    """
    mean, unit = difference.mean, f" {metric.gap_unit}".rstrip()
    if mean is None:
        return f"{metric.title}: no verdict: not measured with the same seed in {variant} and {reference}"
    if difference.identical:
        return f"{metric.title}: {variant} and {reference} are identical ({difference.pairs} seeds)"
    if difference.verdict in ("better", "worse"):
        # The size of the difference; the verdict gives its direction.
        low, high = sorted(abs(end) for end in (difference.low, difference.high) if end is not None)
        statement = f"{variant} is {difference.verdict} by {metric.gap_digits(abs(mean))}{unit}"
        return f"{metric.title}: {statement} ({_interval(metric, low, high)}, {difference.pairs} seeds)"
    gap = f"{metric.gap_digits(mean, sign=True)}{unit}"
    if difference.low is None or difference.high is None:
        return f"{metric.title}: {difference.verdict}; {variant} differs by {gap}"
    gap += f" ({_interval(metric, difference.low, difference.high)}, {difference.pairs} seeds)"
    if difference.verdict != "not distinguishable":
        return f"{metric.title}: {difference.verdict}; {variant} differs by {gap}"
    return f"{metric.title}: {variant} is not distinguishable: {gap}"


def _interval(metric: Metric, low: float, high: float) -> str:
    return f"{100 * CONFIDENCE:.0f} % interval {metric.gap_digits(low)} to {metric.gap_digits(high)}"


def caveat(result: StudyResult) -> str:
    """What the intervals cover, and how many differences chance alone would bring."""
    comparisons = len(result.others) * sum(metric.better is not None for metric in result.metrics)
    return (
        "An interval covers what other seeds would change (initial weights, order, crops, masks, randomness of "
        "fine-tuning, which images are reconstructed), for this data set and these options alone. By chance, "
        "about one in twenty comparisons of variants that do not differ is called different. Comparisons here, "
        f"metrics times variants: {comparisons}; the intervals are not corrected for that."
    )
