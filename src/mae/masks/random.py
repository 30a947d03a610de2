"""MAE's mask: a uniformly random share of the patches of each image."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from mae.core.component import Share, ShareOfAll
from mae.core.contracts import Mask
from mae.core.types import MaskPlan, MaskRequest
from mae.randomness import Stream, uniform


@dataclass(frozen=True, kw_only=True)
class RandomMasking(Mask):
    """A random fraction of the patches, uniformly without replacement (He et al. 2021, section 3)."""

    kind: ClassVar[str] = "random"

    ratio: Share = 0.75
    """Fraction of the patches masked."""
    predicted: ShareOfAll = 1.0
    """Fraction of the masked patches predicted in training; with --decoder cross the others cost nothing."""

    @property
    def predicts_all(self) -> bool:  # type: ignore[override]
        """Whether all masked tokens are predicted."""
        return self.predicted == 1

    def plan(self, request: MaskRequest) -> MaskPlan:
        """The mask of each sample, a pure function of its key.

        With the same key a higher ratio masks what a lower one masks, and more.

        Raises:
            UsageError: see `num_visible`.
        """
        num_tokens, num_visible = request.layout.num_tokens, self.num_visible(request.layout, request.ratio)
        order = uniform(request.keys, num_tokens, Stream.MASK).argsort(dim=1, stable=True)  # [B, N]
        num_predicted = max(1, round(self.predicted * (num_tokens - num_visible)))
        visible, predicted = order[:, :num_visible], order[:, num_visible : num_visible + num_predicted]
        hidden: Bool[Tensor, "B N"] = torch.ones_like(order, dtype=torch.bool).scatter_(1, visible, False)
        rest = num_visible + num_predicted == num_tokens
        return MaskPlan(visible=visible, predicted=predicted, hidden=hidden, predicts_rest=rest)
