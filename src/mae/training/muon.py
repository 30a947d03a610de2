"""Muon: AdamW, but for the matrices inside blocks, which move in orthogonal steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from mae.training.device import computes_in_bf16
from mae.training.sharding import divided_like, whole

_MOMENTUM = 0.95
_ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # a polynomial that brings singular values near 1 quickly, and keeps them there
_ADAMW_SIZE = 0.2
"""The root mean square of AdamW's steps, in rates; the steps here are made as large, so that one rate suits both."""


class Muon(AdamW):
    """AdamW over groups, those marked `orthogonal` by Muon (Jordan et al. 2024; size of steps: Liu et al. 2025).

    A matrix moves along its momentum (Nesterov's) with all singular values made about 1, by five iterations after
    Newton and Schulz, in bfloat16 where the hardware computes in it: where it is emulated it takes very long.
    `torch.optim.Muon` knows no other type, and no parameters beside matrices.

    Args:
        groups: of parameters, each with `weight_decay` and `orthogonal`; those that are must be matrices.
        betas: AdamW's decay rates.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=0.0, betas=betas, fused=True)

    @property
    def step_flops(self) -> int:
        """Floating-point operations of the products that a step makes of its own; a multiply-add counts as 2."""
        matrices = (p for group in self.param_groups if group["orthogonal"] for p in group["params"])
        sides = (sorted(matrix.shape) for matrix in matrices)
        return sum(_ITERATIONS * (4 * small**2 * large + 2 * small**3) for small, large in sides)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; none where `found_inf` is set and not 0, as fused AdamW has it."""
        assert closure is None, "closures are not supported"
        every = self.param_groups
        self.param_groups = [group for group in every if not group["orthogonal"]]
        try:
            super().step()
        finally:
            self.param_groups = every
        still = getattr(self, "found_inf", None)
        for group in every:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is not None:
                    self._move(parameter, group, still)

    def _move(self, parameter: Tensor, group: dict[str, Any], still: Tensor | None) -> None:
        state, gradient, rate = self.state[parameter], parameter.grad, group["lr"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        assert gradient is not None
        if still is not None:  # told on the device: to ask for it would make the host wait
            goes = still.to(parameter.device) == 0
            gradient, rate = torch.where(goes, gradient, momentum), rate * goes
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        direction = divided_like(parameter, orthogonal(whole(gradient.lerp(momentum, _MOMENTUM))))
        size = _ADAMW_SIZE * max(parameter.shape) ** 0.5
        parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction * (rate * size))


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthogonal rows or columns: singular values of 0.7 to 1.2, those near 0 excepted.

    Args:
        matrix: `[n, m]`, of any scale; 0 stays 0.
    """
    x = matrix.to(torch.bfloat16 if computes_in_bf16(matrix.device) else torch.float32)
    x = x.mT if x.shape[0] > x.shape[1] else x  # the smaller side makes the smaller products
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)
