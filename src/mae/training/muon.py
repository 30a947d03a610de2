"""Muon: orthogonalised momentum for the matrices inside blocks, AdamW for all other parameters."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
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
_MOST_TOGETHER = 1 << 24
"""Values in the matrices of one shape that a GPU iterates on together: more would take memory and save no time."""
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
            if group["orthogonal"]:
                for matrices in _together(p for p in group["params"] if p.grad is not None):
                    self._move(matrices, group, skip)

    def _move(self, matrices: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """Update matrices of one shape."""
        momenta = [self._momentum(each) for each in matrices]
        gradients = [each.grad for each in matrices if each.grad is not None]
        rate = group["lr"]
        if skip is not None:  # on the device, so that the host need not wait: the momentum and the weights stay
            taken = skip.to(matrices[0].device) == 0
            gradients = [torch.where(taken, *each) for each in zip(gradients, momenta, strict=True)]
            rate = rate * taken
        torch._foreach_lerp_(momenta, gradients, 1 - _MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, _MOMENTUM)
        if len(ahead) == 1:
            directions = [orthogonal(whole(ahead[0]))]
        else:
            directions = list(orthogonal(torch.stack([whole(each) for each in ahead])).unbind())
        steps = [sharded_like(*each) for each in zip(matrices, directions, strict=True)]
        torch._foreach_mul_(steps, rate * _ADAMW_SIZE * max(matrices[0].shape) ** 0.5)
        torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
        torch._foreach_sub_(matrices, steps)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def _together(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those of one shape and device, not too many at once; one by one where a batch of them gains nothing."""
    alike: dict[Any, list[Tensor]] = defaultdict(list)
    for number, matrix in enumerate(matrices):
        alike[(matrix.shape, matrix.device) if _gains_by_batches(matrix.device) else number].append(matrix)
    for each in alike.values():
        count = max(1, _MOST_TOGETHER // each[0].numel())
        yield from (each[start : start + count] for start in range(0, len(each), count))


def _gains_by_batches(device: torch.device) -> bool:
    """Python asks a GPU for a kernel more slowly than it computes one; a CPU's products are fastest one by one."""
    return device.type != "cpu"


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest matrix with orthogonal rows or columns: singular values of 0.7 to 1.2, except those near 0.

    Args:
        matrix: `[n, m]`, of any scale, or `[B, n, m]`; zeros stay zeros.
    """
    x = matrix.to(torch.bfloat16 if computes_in_bf16(matrix.device) else torch.float32)
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = x.mT if tall else x  # the smaller side gives the smaller products
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(1e-7)
    if _is_wide(*x.shape[-2:]):
        for iterations in _PARTS:
            x = _factor(x @ x.mT, iterations) @ x
    else:
        for _ in range(_ITERATIONS):
            gram = x @ x.mT
            x = _plus_product(x, _plus_product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.mT if tall else x).to(matrix.dtype)


def _factor(gram: Tensor, iterations: int) -> Tensor:
    """What so many iterations multiply a matrix by: a polynomial of its Gram matrix, whose products are smaller.

    An iteration multiplies by `A + B gram + C gram²`, and polynomials of one matrix commute. The addition of A times a
    matrix is part of each product, so that it is rounded once.
    """
    product = None
    for remaining in reversed(range(iterations)):
        factor = _plus_product(gram, gram, gram, beta=_B, alpha=_C)  # without A
        for _ in range(2 if remaining else 0):
            gram = _plus_product(gram, factor, gram, beta=_A)
        if product is None:
            product = factor
            product.diagonal(dim1=-2, dim2=-1).add_(_A)
        else:
            product = _plus_product(product, factor, product, beta=_A)
    assert product is not None
    return product


def _plus_product(x: Tensor, first: Tensor, second: Tensor, *, beta: float, alpha: float = 1.0) -> Tensor:
    """`beta * x + alpha * first @ second`, of matrices or batches of them."""
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    return add(x, first, second, beta=beta, alpha=alpha)


def _is_wide(small: int, large: int) -> bool:
    """Whether iterations on the Gram matrix take fewer operations."""
    return 2 * small <= large


def _orthogonal_flops(small: int, large: int) -> int:
    """Floating-point operations of the products in `orthogonal`."""
    if _is_wide(small, large):
        return sum(4 * small**2 * large + (8 * iterations - 6) * small**3 for iterations in _PARTS)
    return _ITERATIONS * (4 * small**2 * large + 2 * small**3)
