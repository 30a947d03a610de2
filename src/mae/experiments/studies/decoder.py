"""Self-attention over all patches, or cross-attention to visible ones? (Fu et al. 2024, tables 1 and 2)"""

from dataclasses import dataclass
from typing import ClassVar

from mae.errors import UsageError
from mae.experiments.core.metrics import FEATURES, RECONSTRUCTION, TRAINING
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """The self-attention decoder, the reference, and cross decoders that predict these shares of the masked patches.

    Raises:
        UsageError: no share, one twice, or one out of range.
    """

    trains: ClassVar[bool] = True
    shares: tuple[float, ...] = (1.0, 1 / 3)
    """Fractions of the masked patches that the cross decoder predicts."""

    def __post_init__(self) -> None:
        different = len(set(map(_name, self.shares))) == len(self.shares) > 0
        if not different or not all(0 < share <= 1 for share in self.shares):
            raise UsageError(f"--shares is {list(self.shares)}; expected different ones, each above 0 and at most 1")

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: `--decoder` or `--mask-predicted` was given.
        """
        paper = {"decoder": "self", "mask_predicted": 1.0}
        variants = [Variant(name="self", what="self-attention over all patches", options=paper)]
        variants += [
            Variant(
                name=_name(share),
                what=f"cross-attention to visible patches, {share:.0%} of the masked ones predicted",
                options={"decoder": "cross", "mask_predicted": share},
            )
            for share in self.shares
        ]
        return Study(
            name="decoder",
            question="Self-attention over all patches, or cross-attention to visible ones?",
            variants=tuple(variants),
            configs=tuple(map(setup.vary, variants)),
            evaluations=setup.evaluations(),
            metrics=setup.metrics(*FEATURES, *RECONSTRUCTION, *TRAINING),
        )


def _name(share: float) -> str:
    return f"cross{100 * share:.4g}"
