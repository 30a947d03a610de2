"""Position embeddings: fixed sine-cosine tables, or a learned table."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mae.core.types import Grid
from mae.errors import UsageError
from mae.layers.init import init_normal_


def sincos_1d(positions: Tensor, dim: int) -> Float[Tensor, "L dim"]:
    """Sines then cosines of the positions at `dim / 2` frequencies `10000^(-2 i / dim)` (Vaswani et al. 2017)."""
    frequencies = 10000.0 ** -(torch.arange(dim // 2, dtype=torch.float64, device=positions.device) / (dim / 2))
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def sincos_2d(grid: Grid, dim: int) -> Float[Tensor, "N dim"]:
    """The fixed table of MAE (He et al. 2021, A.1): first half of the width the column, second half the row.

    Positions are patch indices, not normalised. Computed in float64 and rounded once. The column comes
    first because the published weights were trained so.

    Raises:
        UsageError: the width is not a multiple of 4.
    """
    if dim % 4 != 0:
        raise UsageError(f"width {dim} cannot hold sine-cosine positions in two dimensions; it must be a multiple of 4")
    # Always on the CPU: for the sine of a tensor on "meta" PyTorch loads its compiler, which takes seconds.
    down, across = (torch.arange(length, device="cpu") for length in grid)
    rows, columns = torch.meshgrid(down, across, indexing="ij")
    table = torch.cat([sincos_1d(columns.flatten(), dim // 2), sincos_1d(rows.flatten(), dim // 2)], dim=-1)
    return table.float().to(torch.get_default_device())


class SinCosPosEmbed(nn.Module):
    """Fixed two-dimensional positions for any grid. No parameters; nothing to save.

    Args:
        grid: the grid whose table is kept ready; others are computed when asked for.
        dim: width of a token, a multiple of 4.
    """

    table: Tensor

    def __init__(self, *, grid: Grid, dim: int) -> None:
        super().__init__()
        self.built_for = grid
        self.dim = dim
        self.register_buffer("table", sincos_2d(grid, dim), persistent=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "SinCosPosEmbed":
        """Where the model goes its table is made anew: half precision rounds it, and no file brings it back."""
        super()._apply(fn, recurse)
        if not self.table.is_meta:
            self.table = sincos_2d(self.built_for, self.dim).to(self.table)
        return self

    def forward(self, grid: Grid) -> Float[Tensor, "N dim"]:
        """The positions of a grid's tokens in raster order."""
        if grid == self.built_for:
            return self.table
        return sincos_2d(grid, self.dim).to(self.table)


class LearnedPosEmbed(nn.Module):
    """A trained table for one grid, initialised from a normal distribution with std 0.02.

    Args:
        grid: the only grid it knows.
        dim: width of a token.
    """

    def __init__(self, *, grid: Grid, dim: int) -> None:
        super().__init__()
        self.built_for = grid
        self.table = nn.Parameter(torch.empty(grid[0] * grid[1], dim))
        init_normal_(self.table, std=0.02)

    def forward(self, grid: Grid) -> Float[Tensor, "N dim"]:
        """The positions of the grid's tokens in raster order.

        Raises:
            UsageError: another grid than the one it was built for.
        """
        if grid != self.built_for:
            raise UsageError(
                f"learned positions know a grid of {self.built_for[0]}x{self.built_for[1]} patches, "
                f"these images have {grid[0]}x{grid[1]}; use images of the size the model was built for, "
                "or a model with pos_embed='sincos2d'"
            )
        return self.table


class ResampledPosEmbed(nn.Module):
    """A trained table that is resampled for other grids than its own, bicubically, as ViTDet does.

    Args:
        table: the positions to begin with, in raster order.
        grid: that they are for.
    """

    def __init__(self, *, table: Float[Tensor, "N dim"], grid: Grid) -> None:
        super().__init__()
        self.built_for = grid
        self.table = nn.Parameter(table.detach().clone())

    def forward(self, grid: Grid) -> Float[Tensor, "N dim"]:
        """The positions of a grid's tokens in raster order."""
        if grid == self.built_for:
            return self.table
        known = self.table.T.unflatten(1, self.built_for)[None]
        return interpolate(known, size=grid, mode="bicubic", align_corners=False)[0].flatten(1).T


def make_pos_embed(kind: str, *, grid: Grid, dim: int) -> nn.Module:
    """Positions by name: `sincos2d` (the paper's) or `learned`.

    Raises:
        UsageError: no such kind.
    """
    kinds: dict[str, type[SinCosPosEmbed] | type[LearnedPosEmbed]] = {
        "sincos2d": SinCosPosEmbed,
        "learned": LearnedPosEmbed,
    }
    if kind not in kinds:
        raise UsageError(f"pos_embed is {kind!r}; expected one of: {', '.join(kinds)}")
    return kinds[kind](grid=grid, dim=dim)
