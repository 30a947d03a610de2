"""Should the decoder predict pixels, or per-patch normalised pixels? (He et al. 2021, table 1d)"""

from dataclasses import dataclass
from typing import ClassVar

from mae.experiments.core.metrics import EPOCH, FEATURES, LAPLACIAN, PSNR, PSNR_TRUE_STATISTICS, SSIM
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant


@dataclass(frozen=True, kw_only=True)
class Target:
    """Per-patch normalised pixels, the reference, and pixels as they are."""

    trains: ClassVar[bool] = True

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: `--norm-pix-loss` was given.
        """
        variants = (
            Variant(name="norm_pix", what="per-patch normalised pixels", options={"norm_pix_loss": True}),
            Variant(name="pixel", what="pixels as they are", options={"norm_pix_loss": False}),
        )
        return Study(
            name="target",
            question="Should the decoder predict pixels, or per-patch normalised pixels?",
            variants=variants,
            configs=tuple(map(setup.vary, variants)),
            evaluations=setup.evaluations(),
            metrics=setup.metrics(*FEATURES, PSNR, PSNR_TRUE_STATISTICS, SSIM, LAPLACIAN, EPOCH),
            notes=(
                "The training losses of the two are in different units and are not compared.",
                "Predictions of normalised patches lack brightness and contrast; they are estimated from visible "
                "patches, so that this variant has the harder reconstruction task.",
            ),
        )
