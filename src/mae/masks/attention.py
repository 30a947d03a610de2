"""Attention-guided masking: what a teacher looks at most is masked."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt

from mae.core.component import Metavar, Share, ShareOfAll
from mae.core.contracts import Mask
from mae.core.types import Layout, MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.masks.planar import plan_in_order
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class AttentionMasking(Mask):
    """The patches that a teacher's class token attends to most are masked (AttMask: Kakogeorgiou et al. 2022).

    Samples that are not `guided`, and their number is drawn, get a random mask: with all of them guided the encoder
    would never see what matters. With `hints` some of the most attended patches, at random, stay visible after all, and
    as many that come next are masked in their place. How often a position is masked depends on the images.

    The masked patches are a random part of the most attended ones, masked and hints together. The more of the visible
    patches are hints the larger that set is: just below the visible share only the least attended patch is sure to stay
    visible, and the mask is nearly a random one. At that share it would be one, which is refused.
    """

    kind: ClassVar[str] = "attention"
    uniform: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})

    ratio: Share = 0.75
    """Fraction of the patches masked."""
    guided: ShareOfAll = 0.5
    """Fraction of the samples whose masks follow the teacher."""
    hints: Annotated[float, Ge(0), Lt(1), Metavar("FRACTION")] = 0.0
    """Fraction of all patches that stay visible among the most attended ones; below the visible share, 1 - ratio."""

    def num_visible(self, layout: Layout, ratio: float | None = None) -> int:
        """How many tokens stay visible; see `Mask.num_visible`.

        Raises:
            UsageError: hints that are all the visible tokens; see `Mask.num_visible`.
        """
        count = super().num_visible(layout, ratio)
        if round(self.hints * layout.num_tokens) >= count:
            raise UsageError(
                f"mask_hints {self.hints} leaves nothing to follow at mask_ratio {self.ratio}: all of the {count} "
                f"visible patches would be hints, and the mask random; expected at most "
                f"{(count - 1) / layout.num_tokens:.4g}"
            )
        return count

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample, a pure function of its key and of the teacher's scores; see `Mask.plan`.

        Raises:
            UsageError: no scores; see `Mask.num_visible`.
        """
        if request.scores is None:
            raise UsageError("mask attention reads a teacher's attention, and there is none; choose one with --teacher")
        num_tokens, num_visible = request.layout.num_tokens, self.num_visible(request.layout, request.ratio)
        draws = uniform(request.keys, num_tokens + 1, Stream.MASK)
        guided, chance = draws[:, :1] < self.guided, draws[:, 1:]
        hints = round(self.hints * num_tokens)
        rank = request.scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        # Of those attended to most as many as there are hints come first after all others, by chance.
        attended = rank < num_tokens - num_visible + hints
        first = torch.where(guided & ~attended, -1.0, chance)
        return plan_in_order(first.argsort(dim=1, stable=True), num_visible)
