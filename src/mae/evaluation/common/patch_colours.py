"""Patch tokens as colours: principal components as red, green and blue (DINOv2: Oquab et al. 2024, figure 1)."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float32, Float64
from torch import Tensor

from mae.evaluation.common.principal_axes import principal_axes

ENDS = (0.01, 0.99)
"""Quantiles of a component between which its colour goes from 0 to full; what lies beyond is clipped."""

_ROUNDING = 1e-6  # shares of variance, and differences of loadings, that are none


@dataclass(frozen=True, kw_only=True, eq=False)
class PatchColours:
    """A basis of colours, fitted to some tokens; others can be painted in it too.

    Attributes:
        mean: of the tokens it was fitted to.
        components: their principal components of length 1, that of the largest variance first. Of each the largest
            loading is positive; of equally large ones the first decides. All 0 where there is no further variance.
        low: of each component the score that has none of its colour.
        high: of each component the score that has its full colour.
        explained: the share of the variance that each component has, in [0, 1]; fewer of tokens of width 1 or 2.
    """

    mean: Float64[Tensor, " D"]
    components: Float64[Tensor, "3 D"]
    low: Float64[Tensor, " 3"]
    high: Float64[Tensor, " 3"]
    explained: tuple[float, ...]

    def paint(self, tokens: Float[Tensor, "*n D"]) -> Float32[Tensor, "*n 3"]:
        """Red, green and blue in [0, 1]; a half of each whose component does not change."""
        scores = (tokens.double() - self.mean) @ self.components.T
        span = self.high - self.low
        return torch.where(span > 0, (scores - self.low) / span, 0.5).clamp(0, 1).float()


@torch.no_grad()
def fit_colours(tokens: Float[Tensor, "n D"]) -> PatchColours:
    """The basis of colours of some tokens: principal components of all of them, with no background cut away."""
    mean = tokens.double().mean(dim=0)
    centred = tokens.double() - mean
    squares, axes = principal_axes(centred)
    shares = (squares / squares.sum())[:3]
    shares = torch.where(shares > _ROUNDING, shares, 0)
    largest = axes[:3] * (shares > 0).unsqueeze(1)  # [3, D], fewer of narrower tokens
    sizes = largest.abs()
    deciding = (sizes >= sizes.amax(dim=1, keepdim=True) * (1 - _ROUNDING)).int().argmax(dim=1, keepdim=True)
    components = torch.zeros(3, tokens.shape[1], dtype=torch.float64)
    components[: len(largest)] = largest * largest.gather(1, deciding).sign()
    ends = torch.tensor(ENDS, dtype=torch.float64)
    low, high = torch.quantile(centred @ components.T, ends, dim=0)
    return PatchColours(mean=mean, components=components, low=low, high=high, explained=tuple(shares.tolist()))
