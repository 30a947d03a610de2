"""The Vision Transformer as the backbone of a detector (ViTDet: Li et al. 2022)."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from mae.core.types import Grid
from mae.encoders.vit import Features
from mae.errors import UsageError
from mae.layers.drop_path import DropPath
from mae.layers.pos_embed import ResampledPosEmbed, sincos_2d
from mae.layers.transformer import Blocks, init_linears
from mae.layers.windows import MapBlock

_GLOBAL_BLOCKS = 4


class MapViT(nn.Module):
    """Patches, positions and blocks, most of which attend within windows; no class token, and no final norm.

    The blocks that end each quarter of the depth attend to the whole map: 2, 5, 8 and 11 of 12. Images may have any
    shape that divides into patches: the absolute positions are resampled, the relative ones too.

    Args:
        patch_embed: from images to `[B, N, D]`.
        grid: that the absolute positions are for.
        embed_dim: width of a token.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        norm_eps: added to the variance in every layer norm.
        window: side of the windows in patches; 0: every block attends to the whole map.
        rel_pos: the grid of the maps it is trained on, for which blocks without windows learn relative positions, and
            those with windows for theirs; None: no block does.
        drop_path: rate of the last block; it rises linearly from 0.
        rank: see `DropPath`.
        world: see `DropPath`.
    """

    num_prefix = 0

    def __init__(  # noqa: PLR0913 - the sizes of an architecture
        self,
        *,
        patch_embed: Any,
        grid: Grid,
        embed_dim: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        norm_eps: float,
        window: int,
        rel_pos: Grid | None,
        drop_path: float = 0.0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.embed_dim = embed_dim
        self.patch_embed = patch_embed
        self.pos_embed = ResampledPosEmbed(table=sincos_2d(grid, embed_dim), grid=grid)
        whole = {depth * quarter // _GLOBAL_BLOCKS - 1 for quarter in range(1, _GLOBAL_BLOCKS + 1)}
        blocks = []
        for number in range(depth):
            side = 0 if number in whole else window
            positions = (side, side) if side else rel_pos
            rate = drop_path * number / max(depth - 1, 1)
            block = MapBlock(
                dim=embed_dim,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                window=side,
                positions=positions if rel_pos else None,
                drop_path=DropPath(rate=rate, rank=rank, world=world),
                eps=norm_eps,
            )
            blocks.append(block)
        self.blocks = Blocks(*blocks)
        init_linears(self.blocks)
        nn.init.xavier_uniform_(patch_embed.proj.weight)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D rows columns"]:
        """The last block's map of normalised images.

        Raises:
            UsageError: images of a wrong shape, or whose sides are no multiples of the patch.
        """
        return self.encode(images, layers=[-1], as_map=True).layers[0]

    def encode(self, images: Float[Tensor, "B C H W"], *, layers: Sequence[int] = (), as_map: bool = False) -> Features:
        """Features of whole images, see `MAEEncoder.encode`; no norm is applied.

        Raises:
            UsageError: images of a wrong shape, or whose sides are no multiples of the patch; no such block.
        """
        depth = len(self.blocks)
        if any(not -depth <= number < depth for number in layers):
            raise UsageError(f"layers {list(layers)} are asked for; this encoder has blocks 0 to {depth - 1}")
        grid = self.patch_embed.grid(images)
        x = self.patch_embed(images) + self.pos_embed(grid)
        left = []
        for block in self.blocks:
            x = block(x, grid)
            left.append(x)
        found = (left[number] for number in layers)
        return Features(
            cls=None,
            mean=x.mean(dim=1),
            patches=x,
            grid=grid,
            layers=tuple(tokens.mT.unflatten(2, grid) if as_map else tokens for tokens in found),
        )
