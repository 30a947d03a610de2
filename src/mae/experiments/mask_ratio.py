"""How much should be hidden? (He et al. 2021, figure 5)"""

from dataclasses import dataclass

from mae.errors import UsageError
from mae.experiments.plan import (
    COMMON_RATIO,
    EPOCH,
    FEATURES,
    LAPLACIAN,
    PSNR,
    SSIM,
    Bed,
    Judgement,
    Study,
)
from mae.experiments.results import Arm, Metric

_OWN = "_own"


@dataclass(frozen=True, kw_only=True)
class MaskRatio:
    """Which ratios are tried; the first is the reference.

    Raises:
        UsageError: fewer than two ratios, one twice, or one out of range.
    """

    ratios: tuple[float, ...] = (0.75, 0.25, 0.5, 0.9)
    """Shares of patches hidden."""

    def __post_init__(self) -> None:
        if len(self.ratios) < 2 or len(set(self.ratios)) < len(self.ratios):
            raise UsageError(f"--ratios is {list(self.ratios)}; expected two different ones or more")
        if not all(0 < ratio < 1 for ratio in self.ratios):
            raise UsageError(f"--ratios is {list(self.ratios)}; expected shares between 0 and 1, both excluded")

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: `--mask-ratio` was given.
        """
        arms = tuple(
            Arm(name=f"ratio{ratio:g}", what=f"{ratio:.0%} hidden", options={"mask_ratio": ratio}, place=ratio)
            for ratio in self.ratios
        )
        own = Metric(name=f"psnr{_OWN}", title="PSNR of hidden pixels at its own ratio", better=None, kind="decibel")
        return Study(
            name="mask_ratio",
            question="How much of an image should be hidden?",
            arms=arms,
            configs=tuple(map(bed.vary, arms)),
            judgements=bed.judgements(Judgement(protocol="reconstruction", options={}, suffix=_OWN)),
            metrics=bed.metrics(*FEATURES, PSNR, SSIM, LAPLACIAN, own, EPOCH),
            notes=(
                f"Pictures are judged twice: with {COMMON_RATIO:.0%} hidden, which compares the arms, and with as "
                "much hidden as each was trained with, which does not: the more is hidden, the harder the task.",
            ),
            axis="mask ratio",
        )
