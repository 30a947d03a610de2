"""How much should be masked? (He et al. 2021, figure 5)"""

from dataclasses import dataclass
from typing import ClassVar

from mae.errors import UsageError
from mae.experiments.core.job import EvalSpec
from mae.experiments.core.metrics import COMMON_MASK_RATIO, EPOCH, FEATURES, LAPLACIAN, PSNR, SSIM, Metric
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant

_OWN = "_own"


@dataclass(frozen=True, kw_only=True)
class MaskRatio:
    """Which ratios are tried; the first is the reference.

    Raises:
        UsageError: fewer than two ratios, one twice, or one out of range.
    """

    trains: ClassVar[bool] = True
    ratios: tuple[float, ...] = (0.75, 0.25, 0.5, 0.9)
    """Mask ratios, between 0 and 1."""

    def __post_init__(self) -> None:
        if len(self.ratios) < 2 or len(set(self.ratios)) < len(self.ratios):
            raise UsageError(f"--ratios is {list(self.ratios)}; expected two different ones or more")
        if not all(0 < ratio < 1 for ratio in self.ratios):
            raise UsageError(f"--ratios is {list(self.ratios)}; expected values between 0 and 1, both excluded")

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: `--mask-ratio` was given.
        """
        variants = tuple(
            Variant(name=f"ratio{ratio:g}", what=f"{ratio:.0%} masked", options={"mask_ratio": ratio}, x=ratio)
            for ratio in self.ratios
        )
        own = Metric(name=f"psnr{_OWN}", title="PSNR of masked pixels at its own ratio", better=None, kind="decibel")
        return Study(
            name="mask_ratio",
            question="How much of an image should be masked?",
            variants=variants,
            configs=tuple(map(setup.vary, variants)),
            evaluations=setup.evaluations(EvalSpec(protocol="reconstruction", options={}, suffix=_OWN)),
            metrics=setup.metrics(*FEATURES, PSNR, SSIM, LAPLACIAN, own, EPOCH),
            notes=(
                f"Reconstruction is evaluated twice: with {COMMON_MASK_RATIO:.0%} masked, which compares the variants, "
                "and at each variant's own ratio, which does not: the more is masked, the harder the task.",
            ),
            axis="mask ratio",
        )
