"""How deep should the decoder be? (He et al. 2021, table 1a)"""

from dataclasses import dataclass

from mae.errors import UsageError
from mae.experiments.plan import FEATURES, PICTURES, TRAINING, Bed, Study
from mae.experiments.results import Arm


@dataclass(frozen=True, kw_only=True)
class DecoderDepth:
    """Which depths are tried; the first is the reference.

    Raises:
        UsageError: fewer than two depths, one twice, or one below 1.
    """

    depths: tuple[int, ...] = (8, 1, 2, 4)
    """Blocks of the decoder."""

    def __post_init__(self) -> None:
        if len(self.depths) < 2 or len(set(self.depths)) < len(self.depths) or min(self.depths) < 1:
            raise UsageError(f"--depths is {list(self.depths)}; expected two different ones or more, each 1 or more")

    def study(self, bed: Bed) -> Study:
        """The plan.

        Raises:
            UsageError: `--decoder-depth` was given.
        """
        arms = tuple(
            Arm(name=f"depth{depth}", what=f"{depth} decoder block(s)", options={"decoder_depth": depth}, place=depth)
            for depth in self.depths
        )
        return Study(
            name="decoder_depth",
            question="How deep should the decoder be?",
            arms=arms,
            configs=tuple(map(bed.vary, arms)),
            judgements=bed.judgements(),
            metrics=bed.metrics(*FEATURES, *PICTURES, *TRAINING),
            axis="decoder blocks",
        )
