"""Directions in which features vary most."""

import torch
from jaxtyping import Float64
from torch import Tensor


def principal_axes(centred: Float64[Tensor, "n D"]) -> tuple[Float64[Tensor, " r"], Float64[Tensor, "r D"]]:
    """Sums of squares along the principal axes, and these, of length 1, the largest first; r is the smaller of n and D.

    Args:
        centred: features minus their mean. Where they are wider than many, as raw pixels of many channels, no matrix of
            their width squared is made, which would take gigabytes.
    """
    if len(centred) < centred.shape[1]:
        _, spread, axes = torch.linalg.svd(centred, full_matrices=False)
        return spread.square(), axes
    squares, directions = torch.linalg.eigh(centred.T @ centred)  # ascending
    return squares.clamp(min=0).flip(0), directions.T.flip(0)
