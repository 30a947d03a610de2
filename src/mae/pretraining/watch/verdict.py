"""What a run has reached, in a sentence or two: for its page."""

from collections.abc import Mapping, Sequence

from mae.meanings import looks_collapsed, meaning_of
from mae.report.terminal.console import NO_BASELINE, NOTHING_TO_PREDICT
from mae.training.log import LogRow

_ACCURACIES = ("knn", "probe")


def verdict(losses: Sequence[LogRow], looks: Sequence[LogRow], baselines: Mapping[str, float]) -> str:
    """Whether the loss beats trivial predictors, and whether the features are sound.

    Args:
        losses: rows with a loss; the last twentieth of them is what is compared.
        looks: rows with an evaluation, see `read_looks`.
        baselines: reconstruction terms of trivial predictors, by name.
    """
    return " ".join([*_of_loss(losses, baselines), *_of_features([row["evaluation"] for row in looks])])


def _of_loss(rows: Sequence[LogRow], baselines: Mapping[str, float]) -> list[str]:
    if not rows or not baselines:
        return []
    last = rows[-max(1, len(rows) // 20) :]
    loss = sum(row["terms"]["reconstruction"] for row in last) / len(last)
    name, best = min(baselines.items(), key=lambda pair: pair[1])
    if best < NO_BASELINE:
        return [f"There was nothing to predict: {NOTHING_TO_PREDICT}."]
    words, share = name.replace("_", " "), 1 - loss / best
    if share <= 0:
        return [
            f"The reconstruction loss ({loss:.4f}) is not below that of the best trivial predictor ({words}, "
            f"{best:.4f}): the model has not learned to reconstruct yet."
        ]
    return [
        f"The reconstruction loss ({loss:.4f}) is {share:.0%} below the best trivial predictor ({words}, {best:.4f})."
    ]


def _of_features(looks: Sequence[Mapping[str, float]]) -> list[str]:
    if len(looks) < 2:  # the first is that of the initial weights
        return []
    first, last = looks[0], looks[-1]
    told = []
    if looks_collapsed(last):
        told.append("The features hardly tell images apart.")
    elif "effective_rank" in first and "effective_rank" in last:
        told.append(
            "The features have not collapsed, which tells little of their use "
            f"(effective rank {last['effective_rank']:.3g}, {first['effective_rank']:.3g} before the first step)."
        )
    told += [
        f"The {meaning_of(name).name} is {last[name]:.1%}, {first[name]:.1%} before the first step."
        for name in _ACCURACIES
        if name in first and name in last
    ]
    return told
