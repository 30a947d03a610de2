"""What is gained, and what lost, where hidden patches look at visible ones alone? (Fu et al. 2024, tables 1 and 2)"""

from dataclasses import dataclass

from mae.errors import UsageError
from mae.experiments.plan import FEATURES, PICTURES, TRAINING, Bed, Study
from mae.experiments.results import Arm


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The paper's decoder, the reference, and cross-attention that predicts such shares of what is hidden.

    Raises:
        UsageError: no share, one twice, or one out of range.
    """

    shares: tuple[float, ...] = (1.0, 1 / 3)
    """Shares of the hidden patches that the cross decoder predicts."""

    def __post_init__(self) -> None:
        different = len(set(map(_name, self.shares))) == len(self.shares) > 0
        if not different or not all(0 < share <= 1 for share in self.shares):
            raise UsageError(f"--shares is {list(self.shares)}; expected different ones, each above 0 and at most 1")

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: `--decoder` or `--predict-share` was given.
        """
        paper = {"decoder": "self", "predict_share": 1.0}
        arms = [Arm(name="self", what="self-attention of all patches", options=paper)]
        arms += [
            Arm(
                name=_name(share),
                what=f"attention to visible patches alone, {share:.0%} of the hidden ones predicted",
                options={"decoder": "cross", "predict_share": share},
            )
            for share in self.shares
        ]
        return Study(
            name="decoder",
            question="What is gained, and what lost, where hidden patches look at visible ones alone?",
            arms=tuple(arms),
            configs=tuple(map(bed.vary, arms)),
            judgements=bed.judgements(),
            metrics=bed.metrics(*FEATURES, *PICTURES, *TRAINING),
        )


def _name(share: float) -> str:
    return f"cross{100 * share:.4g}"
