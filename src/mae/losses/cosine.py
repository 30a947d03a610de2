"""The angle between prediction and target."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from mae.core.contracts import Loss
from mae.core.types import weighted_mean


@dataclass(frozen=True, kw_only=True)
class CosineDistance(Loss):
    """1 minus the cosine of prediction and target of each token, for features: their length does not count.

    From 0 for one direction to 2 for the opposite one; 1 where one of the two is zero. It is half the squared distance
    of the two vectors scaled to length 1, which unlike the cosine's own formula is exactly 0 where they are the same.
    """

    kind: ClassVar[str] = "cosine"
    ignores_length: ClassVar[bool] = True

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32; see `MeanSquaredError` for the arguments."""
        ours, theirs = (normalize(values.float(), dim=-1) for values in (pred, target))
        one_is_zero = ours.any(dim=-1) != theirs.any(dim=-1)  # has no direction: neither near nor far
        distance = ((ours - theirs).square().sum(dim=-1) + one_is_zero) / 2
        return weighted_mean(distance.unsqueeze(-1), weight)
