"""The machine's limits: a large matrix product, and copying memory."""

from dataclasses import dataclass

import torch

from mae.bench.timing import timed
from mae.training.device import DTYPES

_TRIES = 8
_SIDE = {"cuda": 8192}  # rows of the matrices; 2048 elsewhere
_BYTES = {"cuda": 1 << 30}  # to copy; 256 MiB elsewhere, more than any cache holds


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The best of several tries.

    Attributes:
        matmul: floating-point operations a second in a product of two large square matrices.
        copy: bytes a second read and written, each byte counted twice.
        precision: `fp32`, `bf16` or `fp16`, of the product.
    """

    matmul: float
    copy: float
    precision: str


def measure_ceilings(device: torch.device, precision: str) -> Ceilings:
    """Both, in about a second.

    Args:
        device: where to compute.
        precision: `fp32`, `bf16` or `fp16`.
    """
    side = _SIDE.get(device.type, 2048)
    one, other = torch.randn(2, side, side, device=device).to(DTYPES[precision])
    here = torch.ones(_BYTES.get(device.type, 1 << 28), dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    one @ other
    product = min(timed(lambda: one @ other, device) for _ in range(_TRIES))
    copy = min(timed(lambda: there.copy_(here), device) for _ in range(_TRIES))
    return Ceilings(matmul=2 * side**3 / product, copy=2 * len(here) / copy, precision=precision)
