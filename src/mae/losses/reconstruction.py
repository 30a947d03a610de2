"""How far the prediction is from the target."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mae.core.component import Positive
from mae.core.contracts import Loss
from mae.core.types import weighted_mean


class _PatchErrors(torch.autograd.Function):
    """The mean squared error of each patch, for which one tensor of the prediction's size is kept.

    A step's memory is largest here. PyTorch's own loss keeps prediction and target in float32, and its mean makes a
    third tensor for a moment. What is kept is an output too: a second derivative runs through it.
    """

    @staticmethod
    def forward(
        ctx: Any, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"]
    ) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M P"]]:
        difference = pred.to(torch.float32, copy=True).sub_(target)
        ctx.save_for_backward(difference)
        ctx.set_materialize_grads(False)
        # The norm of a patch is exact to rounding; that of all values at once is not on a CPU.
        errors = torch.linalg.vector_norm(difference, dim=-1, keepdim=True).square() / difference.shape[-1]
        return errors, difference

    @staticmethod
    def backward(
        ctx: Any, grad: Float[Tensor, "B M 1"] | None, second: Float[Tensor, "B M P"] | None
    ) -> tuple[Float[Tensor, "B M P"] | None, Float[Tensor, "B M P"] | None]:
        (difference,) = ctx.saved_tensors
        slope = second  # of the difference, which a second derivative alone asks for
        if grad is not None:
            first = difference * (grad * (2 / difference.shape[-1]))
            slope = first if second is None else first + second
        return slope, -slope if slope is not None and ctx.needs_input_grad[1] else None


@dataclass(frozen=True, kw_only=True)
class MeanSquaredError(Loss):
    """Mean over a patch's values, then over the predicted patches of the whole batch (He et al. 2021, section 3)."""

    kind: ClassVar[str] = "mse"

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32.

        Args:
            pred: predicted values, any floating type.
            target: true values.
            weight: how much each patch counts; None counts each alike.
        """
        if torch._C._are_functorch_transforms_active():  # torch.func differentiates PyTorch's own functions alone
            return weighted_mean((pred.float() - target.float()).square(), weight)
        return weighted_mean(_PatchErrors.apply(pred, target)[0], weight)


@dataclass(frozen=True, kw_only=True)
class MeanAbsoluteError(Loss):
    """The mean of |prediction - target|, taken as `MeanSquaredError` takes its own (SimMIM: Xie et al. 2021, 3.4)."""

    kind: ClassVar[str] = "l1"

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32; see `MeanSquaredError` for the arguments."""
        return weighted_mean((pred.float() - target.float()).abs(), weight)


@dataclass(frozen=True, kw_only=True)
class SmoothL1(Loss):
    """Squared where the error is small, absolute where it is large (Girshick 2015, section 2.3).

    With the error e: `e^2 / (2 beta)` where |e| < beta, `|e| - beta / 2` elsewhere.
    """

    kind: ClassVar[str] = "smooth_l1"

    beta: Positive = 1.0
    """Where the one goes over into the other, in units of the target; its limit at 0 is `l1`."""

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32; see `MeanSquaredError` for the arguments."""
        values = functional.smooth_l1_loss(pred.float(), target.float(), reduction="none", beta=self.beta)
        return weighted_mean(values, weight)


@dataclass(frozen=True, kw_only=True)
class KnownValues:
    """A loss that asks nothing where the target is NaN for want of data.

    The mean is still over all values, so each known one counts alike in whatever batch or part of one it stands, and
    parts and processes add up to the whole. The loss is lower by the share that is missing.

    Attributes:
        loss: one of the above.
    """

    loss: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __call__(
        self, pred: Float[Tensor, "B M P"], target: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None
    ) -> Float[Tensor, ""]:
        """The loss in float32; see `MeanSquaredError` for the arguments."""
        known = ~target.isnan()
        return self.loss(torch.where(known, pred, 0), torch.where(known, target, 0), weight)
