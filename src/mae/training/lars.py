"""LARS: the optimizer that trains linear probes with very large batches."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """Momentum whose step is scaled layer by layer to the norm of the weights (You et al. 2017, algorithm 1).

    For a weight `w` of two dimensions or more with gradient `g`, then `u = g + weight_decay w` and
    `q = trust |w| / |u|` (1 where either norm is zero); biases and other vectors have `u = g`, `q = 1`. Then
    `mu = momentum mu + q u` and `w -= lr mu`: as MAE's linear probe does it (He et al. 2021, A.1).

    Args:
        params: parameters or groups of them, as any PyTorch optimizer takes them.
        lr: the rate; the engine sets it before each step.
        momentum: share of the last step kept.
        weight_decay: strength of the pull to zero.
        trust: size of a step over the norm of its weights, at a rate of 1.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})
        for group in self.param_groups:  # at once, so that a checkpoint has them whether a step was taken or not
            for weight in group["params"]:
                self.state[weight]["mu"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                mu = self.state[weight]["mu"]
                mu.mul_(group["momentum"]).add_(_scaled(weight, weight.grad, group))
                weight.add_(mu, alpha=-group["lr"])


def _scaled(weight: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
    """The gradient with weight decay, scaled to the weights' norm; a vector's as it is."""
    if weight.ndim <= 1:
        return gradient
    update = gradient + group["weight_decay"] * weight
    weight_norm, update_norm = weight.norm(), update.norm()
    ratio = group["trust"] * weight_norm / update_norm
    return update * torch.where((weight_norm > 0) & (update_norm > 0), ratio, 1.0)  # no wait for the device
