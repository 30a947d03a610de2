"""Whether a model is better than what learned nothing: paired differences of accuracy, with bootstrap intervals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from mae.evaluation.common.dense import mean_ious
from mae.evaluation.common.over_seeds import differ_alike, over_seeds, paired_difference
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult

COMMONEST = "commonest class"
"""What predicts the commonest training class for every image."""

_RESAMPLES = 10_000
_MAP_RESAMPLES = 2000
_LEVELS = (0.025, 0.975)

Answer = Literal["better", "unclear", "worse"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much more of the test images a model gets right than a baseline.

    Attributes:
        baseline: what it is compared with.
        share: accuracy of the model minus that of the baseline, in [-1, 1].
        low: lower end of the 95 % interval.
        high: upper end.
    """

    baseline: str
    share: float
    low: float
    high: float

    @property
    def answer(self) -> Answer:
        """Whether the interval lies above or below 0, or holds it."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else "unclear"

    def __str__(self) -> str:
        if self.answer == "unclear":
            return f"{self.baseline} ({100 * self.share:+.1f} points, 95 % interval {_ends(self)})"
        return f"{self.baseline} by {100 * abs(self.share):.1f} points (95 % interval {_ends(self)})"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a protocol's predictions say of a model.

    Attributes:
        accuracy: of the model, in [0, 1].
        low: lower end of its 95 % interval.
        high: upper end.
        test_images: that were compared, near copies of training images left out.
        differences: from each baseline.
        measure: what is compared where it is no accuracy.
        remedy: what narrows the intervals.
    """

    accuracy: float
    low: float
    high: float
    test_images: int
    differences: tuple[Difference, ...]
    measure: str = ""
    remedy: str = "evaluate on more test images"

    @property
    def answer(self) -> Answer:
        """`better` than every baseline, `worse` than one, or neither shown."""
        answers = {difference.answer for difference in self.differences}
        return "worse" if "worse" in answers else "unclear" if "unclear" in answers else "better"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, the sentence among them."""
        return {"answer": self.answer, "text": str(self), **asdict(self)}

    def __str__(self) -> str:
        """One sentence, and what to do where it is bad news."""
        shares = f"{self.accuracy:.1%} ({100 * self.low:.1f} to {100 * self.high:.1f})"
        reached = f"{self.measure} {shares} on" if self.measure else f"{shares} of"
        reached += f" {self.test_images:,} images"
        told = {
            answer: " and ".join(str(difference) for difference in self.differences if difference.answer == answer)
            for answer in ("better", "unclear", "worse")
        }
        better = f"better than {told['better']}"
        if self.answer == "better":
            return f"Verdict: of use here: {reached}, {better}."
        worse = f"worse than {told['worse']}" if told["worse"] else ""
        unclear = f"no difference shown from {told['unclear']}" if told["unclear"] else ""
        parts = "; ".join(filter(None, [worse, unclear, better if told["better"] else ""]))
        if self.answer == "worse":
            return f"Verdict: nothing useful for these classes was learned: {reached}, {parts}. {_ADVICE}."
        unclear_ones = [each for each in self.differences if each.answer == "unclear"]
        told_apart = any(self.accuracy - each.share > _SATURATED for each in unclear_ones)
        advice = _HARDER if told_apart else f"{_ADVICE}, or {self.remedy}"
        return f"Verdict: not shown to be of use here: {reached}, {parts}. {advice}."


_ADVICE = "Train longer, or on more images like these"
_SATURATED = 0.99
_HARDER = "What learned nothing does as well as can be: evaluate on classes that are harder to tell apart"


def verdict_of(task: LabelledTask, result: ProtocolResult) -> Verdict | None:
    """The verdict of a protocol on a labelled set, on test images without a near copy in training.

    Where a protocol evaluates no baselines the commonest class stands for them.

    Returns:
        None where there is no ranking, or every test image has a near copy.
    """
    if result.ranking is None:
        return None
    labels = task.labels("test")
    commonest = torch.bincount(task.labels("train"), minlength=task.num_classes).argmax().expand(len(labels))
    predicted = {THIS_MODEL: result.ranking[:, 0], **(result.baselines or {COMMONEST: commonest})}
    return compare(predicted, labels, counted=task.near_copies < 0)


def compare(
    predicted: Mapping[str, Int64[Tensor, " m"]], labels: Int64[Tensor, " m"], *, counted: Bool[Tensor, " m"]
) -> Verdict | None:
    """Compare a model with its baselines by a paired bootstrap over test images.

    A difference is -1, 0 or 1 for each image, so a resample of the images is one multinomial draw.

    Args:
        predicted: the class of each test image by `THIS_MODEL` and by each baseline.
        labels: the true classes.
        counted: which test images count.

    Returns:
        None where no image counts.
    """
    if not counted.any():
        return None
    right = {name: (classes == labels)[counted].int() for name, classes in predicted.items()}
    ours = right[THIS_MODEL]
    low, high = _interval(ours, lowest=0)
    differences = []
    for name, theirs in right.items():
        if name != THIS_MODEL:
            lower, upper = _interval(ours - theirs, lowest=-1)
            share = float((ours - theirs).double().mean())
            differences.append(Difference(baseline=name, share=share, low=lower, high=upper))
    return Verdict(
        accuracy=float(ours.double().mean()),
        low=low,
        high=high,
        test_images=len(ours),
        differences=tuple(differences),
    )


def compare_maps(counts: Mapping[str, Int64[Tensor, "m 3 K"]]) -> Verdict:
    """Compare maps of classes by their mean intersection over union, by a paired bootstrap over test images.

    Args:
        counts: `class_counts` of each test image, by `THIS_MODEL` and by each baseline.
    """
    shows = counts[THIS_MODEL].sum(dim=(1, 2)) > 0  # a draw of images without a pixel that counts has no IoU
    counts = {who: of_each[shows] for who, of_each in counts.items()} if shows.any() else counts
    count = len(counts[THIS_MODEL])
    draws = torch.from_numpy(
        np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=_MAP_RESAMPLES)
    ).double()
    # In the first row every image counts once.
    weights = torch.cat([torch.ones(1, count, dtype=torch.float64), draws])
    scores = {
        who: mean_ious((weights @ of_each.double().flatten(1)).unflatten(1, of_each.shape[1:]))
        for who, of_each in counts.items()
    }
    ours = scores[THIS_MODEL]
    differences = []
    for who, theirs in scores.items():
        if who != THIS_MODEL:
            lower, upper = _ends_of((ours[1:] - theirs[1:]).numpy(), count=count, lowest=-1)
            differences.append(Difference(baseline=who, share=float(ours[0] - theirs[0]), low=lower, high=upper))
    low, high = _ends_of(ours[1:].numpy(), count=count, lowest=0)
    return Verdict(
        accuracy=float(ours[0]),
        low=low,
        high=high,
        test_images=count,
        differences=tuple(differences),
        measure="mean IoU",
    )


def compare_seeds(
    scores: Mapping[str, Sequence[float]], *, baseline: str, measure: str, test_images: int
) -> Verdict | None:
    """Compare a model with a baseline by a number of each seed: Student's intervals, of the paired differences too.

    Args:
        scores: of each seed in [0, 1], by `THIS_MODEL` and by whatever else was trained.
        baseline: which of these.
        measure: what the number is.
        test_images: that it was taken on.

    Returns:
        None without the baseline; of one seed, and where all seeds differ alike: these say nothing of chance.
    """
    ours, theirs = scores[THIS_MODEL], scores.get(baseline)
    if theirs is None or len(ours) < 2:
        return None
    reached, gap = over_seeds(ours), paired_difference(ours, theirs)
    assert reached.low is not None and reached.high is not None and gap.low is not None and gap.high is not None
    if differ_alike(gap.low, gap.high):
        return None
    return Verdict(
        accuracy=reached.mean,
        low=reached.low,
        high=reached.high,
        test_images=test_images,
        differences=(Difference(baseline=baseline, share=gap.mean, low=gap.low, high=gap.high),),
        measure=f"{measure}, mean of {len(ours)} seeds,",
        remedy="train with more --seeds",
    )


def _ends_of(resampled: np.ndarray, *, count: int, lowest: float) -> tuple[float, float]:
    """The 95 % percentile interval of means of so many images, whose values are from `lowest` to 1.

    Images that all say the same resample to the same: there other values have the largest share that Clopper and
    Pearson's exact interval allows what was never seen.
    """
    low, high = map(float, np.quantile(resampled, _LEVELS))
    if low < high:
        return low, high
    unseen = 1 - _LEVELS[0] ** (1 / count)
    return low - unseen * (low - lowest), high + unseen * (1 - high)


def _interval(values: Tensor, *, lowest: float) -> tuple[float, float]:
    """The 95 % interval of the mean of values of -1, 0 and 1, by bootstrap."""
    counts = torch.stack([(values == value).sum() for value in (-1, 0, 1)]).numpy()
    total = int(counts.sum())
    draws = np.random.default_rng(0).multinomial(total, counts / total, size=_RESAMPLES)
    return _ends_of((draws[:, 2] - draws[:, 0]) / total, count=total, lowest=lowest)


def _ends(difference: Difference) -> str:
    """The ends of the interval in points, with the sign that `by ... points` has where it is one."""
    ends = [100 * difference.low, 100 * difference.high]
    if difference.answer == "worse":
        ends = [-end for end in reversed(ends)]
    return f"{ends[0]:.1f} to {ends[1]:.1f}"


def overall(verdicts: Mapping[str, Verdict]) -> str:
    """One answer for several protocols, by their titles; empty where there is none."""
    if not verdicts:
        return ""
    answers = {verdict.answer for verdict in verdicts.values()}
    by = _joined(verdicts)
    if answers == {"better"}:
        return f"Of use here: better than what learned nothing by {by}."
    if "better" not in answers and "worse" in answers:
        return f"Nothing useful for these classes was learned: what learned nothing does as well or better by {by}."
    if "better" in answers:
        good = _joined(title for title, verdict in verdicts.items() if verdict.answer == "better")
        return f"Of use in part: better than what learned nothing by {good} alone; see each part below."
    return f"Not shown to be of use here: no difference from what learned nothing by {by}."


def _joined(titles: Iterable[str]) -> str:
    """Titles in the middle of a sentence; a first word in capitals, such as k-NN's, stays."""
    return " and by ".join(title if title[1:2].isupper() else title[:1].lower() + title[1:] for title in titles)
