"""Should the decoder predict pixels, or patches standardised one by one? (He et al. 2021, table 1d)"""

from dataclasses import dataclass

from mae.experiments.plan import EPOCH, FEATURES, LAPLACIAN, PSNR, PSNR_TOLD, SSIM, Bed, Study
from mae.experiments.results import Arm


@dataclass(frozen=True, kw_only=True)
class Target:
    """Standardised patches, the reference, and plain pixels."""

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: `--norm-pix-loss` was given.
        """
        arms = (
            Arm(name="norm_pix", what="each patch standardised", options={"norm_pix_loss": True}),
            Arm(name="pixel", what="pixels as they are", options={"norm_pix_loss": False}),
        )
        return Study(
            name="target",
            question="Should the decoder predict pixels, or patches standardised one by one?",
            arms=arms,
            configs=tuple(map(bed.vary, arms)),
            judgements=bed.judgements(),
            metrics=bed.metrics(*FEATURES, PSNR, PSNR_TOLD, SSIM, LAPLACIAN, EPOCH),
            notes=(
                "The training losses of the two are in different units and are not compared.",
                "Pictures of standardised patches need brightness and contrast from elsewhere: here they are estimated "
                "from visible patches, and so these pictures have the harder task.",
            ),
        )
