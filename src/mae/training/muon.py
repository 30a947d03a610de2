"""Muon: orthogonalised momentum for the matrices inside blocks, AdamW for all other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from mae.training.device import computes_in_bf16
from mae.training.sharding import sharded_like, whole

_MOMENTUM = 0.95
_PARTS = (3, 2)
"""Newton-Schulz iterations that share a Gram matrix: in all five, rounding in bfloat16 would swamp small values."""
_ITERATIONS = sum(_PARTS)
_A, _B, _C = 3.4445, -4.7750, 2.0315  # a polynomial that brings singular values near 1 quickly, and keeps them there
_ADAMW_SIZE = 0.2
"""RMS of AdamW's steps in units of the learning rate; the steps here get the same RMS, so that one rate suits both."""


class Muon(AdamW):
    """Muon for groups marked `orthogonal` (Jordan et al. 2024; step size: Liu et al. 2025), AdamW for the others.

    A matrix moves along its Nesterov momentum with all singular values made about 1 by five Newton-Schulz iterations,
    times `0.2 * sqrt(max(n, m))`: the learning rate and weight decay are those of AdamW (`match_rms_adamw` of
    `torch.optim.Muon`). The iterations compute in bfloat16 where the hardware does, else in float32.

    `torch.optim.Muon` takes the same steps in one process up to rounding in bfloat16 (a hundredth of the way of nine
    steps), but does not fit here: it cannot skip a step by `found_inf`, so that the host would wait for the GPU in
    every step; its iterations run on FSDP2's shards, with 108 collectives for 8 matrices where 8 suffice, 2.7 times the
    time in two processes, and rounding that moves a sharded run 1.4 % away from the same run in one process; and it
    computes in bfloat16 alone, which is slow and coarse where it is emulated.

    Args:
        groups: of parameters, each with `weight_decay` and `orthogonal`; orthogonal ones must be matrices.
        betas: AdamW's decay rates.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        super().__init__(groups, lr=0.0, betas=betas, fused=True)

    @property
    def step_flops(self) -> int:
        """Floating-point operations of a step's matrix products; a multiply-add counts as 2."""
        matrices = (p for group in self.param_groups if group["orthogonal"] for p in group["params"])
        return sum(_orthogonal_flops(*sorted(matrix.shape)) for matrix in matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; none where `found_inf` is set and not 0, as fused AdamW does."""
        assert closure is None, "closures are not supported"
        every = self.param_groups
        self.param_groups = [group for group in every if not group["orthogonal"]]
        try:
            super().step()
        finally:
            self.param_groups = every
        skip = getattr(self, "found_inf", None)
        for group in every:
            for parameter in group["params"] if group["orthogonal"] else ():
                if parameter.grad is not None:
                    self._move(parameter, group, skip)

    def _move(self, parameter: Tensor, group: dict[str, Any], skip: Tensor | None) -> None:
        state, gradient, rate = self.state[parameter], parameter.grad, group["lr"]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        assert gradient is not None
        if skip is not None:  # on the device, so that the host need not wait: the momentum and the weights stay
            taken = skip.to(parameter.device) == 0
            gradient, rate = torch.where(taken, gradient, momentum), rate * taken
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        direction = sharded_like(parameter, orthogonal(whole(gradient.lerp(momentum, _MOMENTUM))))
        size = _ADAMW_SIZE * max(parameter.shape) ** 0.5
        parameter.mul_(1 - rate * group["weight_decay"]).sub_(direction * (rate * size))


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthogonal rows or columns: singular values of 0.7 to 1.2, except those near 0.

    Args:
        matrix: `[n, m]`, of any scale; zeros stay zeros.
    """
    x = matrix.to(torch.bfloat16 if computes_in_bf16(matrix.device) else torch.float32)
    x = x.mT if x.shape[0] > x.shape[1] else x  # the smaller side gives the smaller products
    x = x / x.norm().clamp_min(1e-7)
    if _is_wide(*x.shape):
        for iterations in _PARTS:
            x = _factor(x @ x.mT, iterations) @ x
    else:
        for _ in range(_ITERATIONS):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if matrix.shape[0] > matrix.shape[1] else x).to(matrix.dtype)


def _factor(gram: Tensor, iterations: int) -> Tensor:
    """What so many iterations multiply a matrix by: a polynomial of its Gram matrix, whose products are smaller.

    An iteration multiplies by `A + B gram + C gram²`, and polynomials of one matrix commute. The addition of A times a
    matrix is part of each product, so that it is rounded once.
    """
    product = None
    for remaining in reversed(range(iterations)):
        factor = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)  # without A
        for _ in range(2 if remaining else 0):
            gram = torch.addmm(gram, factor, gram, beta=_A)
        if product is None:
            product = factor
            product.diagonal().add_(_A)
        else:
            product = torch.addmm(product, factor, product, beta=_A)
    assert product is not None
    return product


def _is_wide(small: int, large: int) -> bool:
    """Whether iterations on the Gram matrix take fewer operations."""
    return 2 * small <= large


def _orthogonal_flops(small: int, large: int) -> int:
    """Floating-point operations of the products in `orthogonal`."""
    if _is_wide(small, large):
        return sum(4 * small**2 * large + (8 * iterations - 6) * small**3 for iterations in _PARTS)
    return _ITERATIONS * (4 * small**2 * large + 2 * small**3)
