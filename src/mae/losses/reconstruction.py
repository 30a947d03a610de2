"""How far the prediction is from the target."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError:
    """Mean over a patch's values, then over the predicted patches of the whole batch (He et al. 2021, section 3)."""

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32.

        Args:
            pred: predicted values, any floating type.
            target: true values.
            weight: how much each patch counts; None counts each alike.
        """
        per_patch = (pred.float() - target.float()).square().mean(dim=-1)
        if weight is None:
            return per_patch.mean()
        return (per_patch * weight).sum() / weight.sum()
