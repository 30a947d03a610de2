"""What the numbers of an online evaluation mean: a name in words, which way is better, and what is normal."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

COLLAPSED_COSINE, COLLAPSED_RANK = 0.98, 5.0
"""Features of which both hold hardly tell images apart: pairs all point one way, and a few directions hold the rest."""


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """One number of an online evaluation.

    Attributes:
        name: in words.
        better: which way is better; None: neither, it only tells of collapse.
        normal: what is usual, and what is not.
        percent: whether it is a share that is shown in percent.
    """

    name: str
    better: Literal["up", "down"] | None
    normal: str
    percent: bool = False

    @property
    def arrow(self) -> str:
        """Which way is better, as a sign."""
        return {"up": "↑", "down": "↓", None: ""}[self.better]

    def shown(self, value: float) -> str:
        """A value as it is read."""
        return f"{value:.1%}" if self.percent else f"{value:.3g}"


MEANINGS: Mapping[str, Meaning] = {
    "held_out": Meaning(
        name="held-out loss",
        better="down",
        normal="near the loss of trained images; rising while that one falls is overfitting",
    ),
    "held_out_train": Meaning(
        name="trained-on loss", better="down", normal="falls; the loss of as many training images, measured alike"
    ),
    "knn": Meaning(
        name="k-NN accuracy",
        better="up",
        normal="above its first look, before the first step that of the weights the run began with, and above the "
        "commonest class",
        percent=True,
    ),
    "probe": Meaning(
        name="probe accuracy", better="up", normal="above its first look and the commonest class", percent=True
    ),
    "chance": Meaning(name="chance", better=None, normal="1 over the number of classes", percent=True),
    "commonest_class": Meaning(
        name="commonest class", better=None, normal="what always answering the commonest class gives", percent=True
    ),
    "effective_rank": Meaning(
        name="effective rank",
        better="up",
        normal="from 1 (all features alike) to the smaller of width and images; below 5 beside a mean cosine above "
        "0.98 is collapse. It compares runs of one method",
    ),
    "feature_std": Meaning(name="feature spread", better=None, normal="from 0 (collapse) to 1 (spread out evenly)"),
    "mean_cosine": Meaning(
        name="mean cosine", better=None, normal="from 0 (spread out evenly) to 1 (collapse: all images look alike)"
    ),
    "uniformity": Meaning(
        name="uniformity", better="down", normal="0 (collapse) to about -4 (spread out evenly in a wide space)"
    ),
    "codes_used": Meaning(
        name="codes used",
        better="up",
        normal="from 1 (collapse) to all codes of the codebook (used evenly): the exponential of their entropy; 0 "
        "before the first step",
    ),
    "codes_restarted": Meaning(
        name="codes restarted", better=None, normal="how often a code that was hardly used began anew at a patch"
    ),
    "alignment": Meaning(
        name="alignment",
        better="down",
        normal="0 to 4; small is good only where the features are spread out: collapsed ones have 0 too",
    ),
}
"""By the name under which `metrics.jsonl` has it. The ranges are those of the definitions
(`mae.evaluation.common.feature_stats`); only the levels of collapse are rules of thumb."""
_OF_CODEBOOK = ("codes_used", "codes_restarted")


def meaning_of(name: str) -> Meaning:
    """What a number means; one that is not known has its own name.

    Where a run has several codebooks, theirs begin with whose it is.
    """
    in_words = name.replace("_", " ")
    if of_codebook := next((known for known in _OF_CODEBOOK if name.endswith(f"_{known}")), None):
        return replace(MEANINGS[of_codebook], name=in_words)
    return MEANINGS.get(name) or Meaning(name=in_words, better=None, normal="")


def looks_collapsed(numbers: Mapping[str, float]) -> bool:
    """Whether features of these numbers hardly tell images apart."""
    cosine, rank = numbers.get("mean_cosine"), numbers.get("effective_rank")
    return cosine is not None and rank is not None and cosine > COLLAPSED_COSINE and rank < COLLAPSED_RANK
