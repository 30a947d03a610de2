"""How deep should the decoder be? (He et al. 2021, table 1a)"""

from dataclasses import dataclass
from typing import ClassVar

from mae.errors import UsageError
from mae.experiments.core.metrics import FEATURES, RECONSTRUCTION, TRAINING
from mae.experiments.core.plan import Study, StudySetup
from mae.experiments.core.results import Variant


@dataclass(frozen=True, kw_only=True)
class DecoderDepth:
    """Which depths are tried; the first is the reference.

    Raises:
        UsageError: fewer than two depths, one twice, or one below 1.
    """

    trains: ClassVar[bool] = True
    depths: tuple[int, ...] = (8, 1, 2, 4)
    """Blocks of the decoder."""

    def __post_init__(self) -> None:
        if len(self.depths) < 2 or len(set(self.depths)) < len(self.depths) or min(self.depths) < 1:
            raise UsageError(f"--depths is {list(self.depths)}; expected two different ones or more, each 1 or more")

    def study(self, setup: StudySetup) -> Study:
        """The plan.

        Raises:
            UsageError: `--decoder-depth` was given.
        """
        variants = tuple(
            Variant(name=f"depth{depth}", what=f"{depth} decoder block(s)", options={"decoder_depth": depth}, x=depth)
            for depth in self.depths
        )
        return Study(
            name="decoder_depth",
            question="How deep should the decoder be?",
            variants=variants,
            configs=tuple(map(setup.vary, variants)),
            evaluations=setup.evaluations(),
            metrics=setup.metrics(*FEATURES, *RECONSTRUCTION, *TRAINING),
            axis="decoder blocks",
        )
