"""Attention within windows of a map, and over all of it, with relative positions (ViTDet: Li et al. 2022)."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from mae.core.types import Grid
from mae.layers.attention import Attention, attend
from mae.layers.drop_path import DropPath
from mae.layers.layer_norm import LayerNorm
from mae.layers.rel_pos import RelativePositions
from mae.layers.transformer import LAYER_NORM_EPS, Mlp


def partition(x: Float[Tensor, "B H W D"], side: int) -> Float[Tensor, "windows side side D"]:
    """Windows of a map in raster order, image after image; the last of a row or column are filled up with zeros."""
    batch, height, width, dim = x.shape
    x = pad(x, (0, 0, 0, -width % side, 0, -height % side))
    x = x.reshape(batch, x.shape[1] // side, side, x.shape[2] // side, side, dim)
    return x.transpose(2, 3).reshape(-1, side, side, dim)


def join_windows(windows: Float[Tensor, "windows side side D"], grid: Grid) -> Float[Tensor, "B H W D"]:
    """The map whose windows these are, without what they were filled up with; the inverse of `partition`."""
    side, dim = windows.shape[1], windows.shape[3]
    rows, columns = (-(-length // side) for length in grid)
    x = windows.reshape(-1, rows, columns, side, side, dim).transpose(2, 3)
    return x.reshape(-1, rows * side, columns * side, dim)[:, : grid[0], : grid[1]]


class MapAttention(Attention):
    """Self-attention on a map, with the weights of `Attention` and, if asked for, relative positions.

    Args:
        dim: see `Attention`.
        num_heads: see `Attention`.
        window: side of the windows; 0: every token attends to every token.
        positions: the grid whose relative positions are learned; None: none are.
    """

    def __init__(self, *, dim: int, num_heads: int, window: int, positions: Grid | None) -> None:
        super().__init__(dim=dim, num_heads=num_heads)
        self.window = window
        self.rel_pos = None if positions is None else RelativePositions(grid=positions, dim=dim // num_heads)

    def on_map(self, x: Float[Tensor, "B H W D"]) -> Float[Tensor, "B H W D"]:
        """Tokens attend within their window.

        What a border window was filled up with is attended to like any token, as in the published models: a key of
        zeros is still a key, and its value the bias.
        """
        parts = partition(x, self.window) if self.window else x
        query, key, value = self.split(parts.flatten(1, 2))
        bias = None if self.rel_pos is None else self.rel_pos(query, (parts.shape[1], parts.shape[2]))
        mixed = self.join(attend(query, key, value, bias)).reshape(parts.shape)
        return join_windows(mixed, (x.shape[1], x.shape[2])) if self.window else mixed


class MapBlock(nn.Module):
    """A transformer block on a map, with the weights of `Block`.

    Args:
        dim: width of a token.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over `dim`.
        window: see `MapAttention`.
        positions: see `MapAttention`.
        drop_path: stochastic depth for attention and MLP, each drawn separately.
        eps: added to the variance in the layer norms.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        window: int,
        positions: Grid | None,
        drop_path: DropPath,
        eps: float = LAYER_NORM_EPS,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps)
        self.attn = MapAttention(dim=dim, num_heads=num_heads, window=window, positions=positions)
        self.norm2 = LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim=dim, hidden_dim=int(dim * mlp_ratio))
        self.drop_path = drop_path

    def forward(self, x: Float[Tensor, "B L D"], grid: Grid) -> Float[Tensor, "B L D"]:
        """Tokens of a map in raster order, in and out; windows are cut behind the norm."""
        mixed = self.attn.on_map(self.norm1(x).unflatten(1, grid)).flatten(1, 2)
        x = x + self.drop_path(mixed)
        return x + self.drop_path(self.mlp(self.norm2(x)))
