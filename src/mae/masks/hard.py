"""Masking what is hard to predict, more of it as training goes on."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le

from mae.core.component import Metavar, Share
from mae.core.contracts import Mask
from mae.core.types import MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.planar import plan_in_order
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class HardMasking(Mask):
    """The patches that a teacher expects the largest loss of are masked, and others at random (HPM: Wang et al. 2023).

    Of the masked patches a share are those hardest ones. It rises evenly over the run: at first they are hardly known,
    and a mask of them alone would hide whole objects. How often a position is masked depends on the images.
    """

    kind: ClassVar[str] = "hard"
    uniform: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"difficulty"})

    ratio: Share = 0.75
    """Fraction of the patches masked."""
    first: Annotated[float, Ge(0), Le(1), Metavar("FRACTION")] = 0.0
    """Fraction of the masked patches that are the hardest ones, in the first step."""
    last: Annotated[float, Ge(0), Le(1), Metavar("FRACTION")] = 0.5
    """The same in the last step."""

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample, a pure function of its key, the scores and the progress; see `Mask.plan`.

        Raises:
            UsageError: no scores; see `Mask.num_visible`.
        """
        if request.scores is None:
            raise UsageError(
                "mask hard asks a teacher which patches are hard, and there is none; choose one with --teacher"
            )
        num_tokens, num_visible = request.layout.num_tokens, self.num_visible(request.layout, request.ratio)
        progress = 1.0 if request.progress is None else request.progress
        share = (1 - progress) * self.first + progress * self.last
        rank = request.scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        hardest = rank < round(share * (num_tokens - num_visible))
        chance = uniform(request.keys, num_tokens, Stream.MASK)
        return plan_in_order(torch.where(hardest, 1.0, chance).argsort(dim=1, stable=True), num_visible)
