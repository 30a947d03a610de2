"""How unlikely the prediction holds the true classes."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from mae.core.contracts import Loss
from mae.core.types import cross_entropy, weighted_mean


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Loss):
    """Cross-entropy of logits, for a target of classes such as `codes` (BEiT: Bao et al. 2021).

    A uniform prediction of K classes has log K. Nothing is asked of a token without a class.
    """

    kind: ClassVar[str] = "cross_entropy"
    reads_classes: ClassVar[bool] = True

    def __call__(
        self, pred: Float[Tensor, "B M K"], target: Float[Tensor, "B M 1"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32.

        Args:
            pred: logits, any floating type.
            target: numbers of the classes, NaN without one.
            weight: see `MeanSquaredError`.
        """
        return weighted_mean(cross_entropy(pred, target), weight)
