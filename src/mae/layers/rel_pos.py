"""Relative positions of the tokens of a map, one table for rows and one for columns (Li et al. 2022, MViTv2)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import interpolate

from mae.core.types import Grid


class RelativePositions(nn.Module):
    """What is added to the scores of queries and keys: `q . rows[dy] + q . columns[dx]`.

    The query is not scaled here, unlike in the product with the key. The tables begin as zeros, so that a pre-trained
    encoder begins as what it was.

    Args:
        grid: rows and columns of the map; for others the tables are interpolated.
        dim: width of a head.
    """

    def __init__(self, *, grid: Grid, dim: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(2 * grid[0] - 1, dim))
        self.columns = nn.Parameter(torch.zeros(2 * grid[1] - 1, dim))

    def forward(self, query: Float[Tensor, "B heads L d"], grid: Grid) -> Float[Tensor, "B heads L L"]:
        """The scores to add for the tokens of a map in raster order."""
        height, width = grid
        q = query.unflatten(2, grid)
        by_row = torch.einsum("bnyxd,yjd->bnyxj", q, _between(self.rows, height).to(q.dtype))
        by_column = torch.einsum("bnyxd,xkd->bnyxk", q, _between(self.columns, width).to(q.dtype))
        return (by_row[..., :, None] + by_column[..., None, :]).reshape(*query.shape[:3], height * width)


def _between(table: Float[Tensor, "S d"], length: int) -> Float[Tensor, "length length d"]:
    """The entry for each query and key along one axis: that of query minus key."""
    if len(table) != 2 * length - 1:
        table = interpolate(table.T[None], size=2 * length - 1, mode="linear")[0].T
    place = torch.arange(length, device=table.device)
    return table[place[:, None] - place[None] + length - 1]
