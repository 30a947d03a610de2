"""The light transformers that predict what was hidden: by self-attention, or by attention to visible tokens alone."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.layers.pos_embed import make_pos_embed
from mae.layers.transformer import LAYER_NORM_EPS, Blocks, CrossBlock, init_linears, make_blocks
from mae.types import Grid, MaskPlan


class MAEDecoder(nn.Module):
    """Mask tokens put where patches are hidden, own positions, blocks, one linear head (section 3, "MAE decoder").

    Args:
        encoder_dim: width of the encoder's tokens.
        num_prefix: tokens that lead the encoder's sequence and have no place in the grid.
        grid: the token grid whose positions are kept ready.
        embed_dim: width of a token here.
        depth: number of blocks.
        num_heads: attention heads.
        num_outputs: values predicted for a patch.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        pos_embed: `sincos2d` or `learned`.
    """

    needs_maps: ClassVar[bool] = False
    """Whether it reads what leaves each block of the encoder, or the last tokens alone."""

    def __init__(
        self,
        *,
        encoder_dim: int,
        num_prefix: int,
        grid: Grid,
        embed_dim: int,
        depth: int,
        num_heads: int,
        num_outputs: int,
        mlp_ratio: float = 4.0,
        pos_embed: str = "sincos2d",
    ) -> None:
        super().__init__()
        self.num_prefix = num_prefix
        self.embed = nn.Linear(encoder_dim, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = make_pos_embed(pos_embed, grid=grid, dim=embed_dim)
        self.blocks = make_blocks(dim=embed_dim, depth=depth, num_heads=num_heads, mlp_ratio=mlp_ratio)
        self.norm = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self.pred = nn.Linear(embed_dim, num_outputs)
        init_linears(self)
        nn.init.normal_(self.mask_token, std=0.02)

    def forward(self, maps: Sequence[Float[Tensor, "B L D"]], plan: MaskPlan, grid: Grid) -> Float[Tensor, "B M P"]:
        """Predict the tokens in `plan.predicted` from the encoded visible ones, the last of `maps`.

        Every token of the grid takes part in the attention; norm and head run on the predicted ones alone.
        """
        x = self.embed(maps[-1])
        prefix, visible = x[:, : self.num_prefix], x[:, self.num_prefix :]
        everywhere = self.mask_token.to(x.dtype).expand(x.shape[0], plan.hidden.shape[1], -1)  # [B, N, K]
        tokens = everywhere.scatter(1, plan.visible.unsqueeze(-1).expand_as(visible), visible)
        x = torch.cat([prefix, tokens + self.pos_embed(grid)], dim=1)
        x = self.blocks(x)[:, self.num_prefix :]
        predicted = x.gather(1, plan.predicted.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.pred(self.norm(predicted))


class CrossDecoder(nn.Module):
    """Tokens to predict look at the visible ones, and never at each other (CrossMAE, Fu et al. 2024, section 3).

    So any part of them can be predicted, each as it would be beside all others, and the cost is that of the part. Each
    block looks at a mixture of its own of what entered the encoder's first block and what left each (section 3.3).
    Unlike there, what left the last block has passed the encoder's final norm, which thus learns.

    Args:
        encoder_dim: width of the encoder's tokens.
        encoder_depth: blocks of the encoder.
        grid: the token grid whose positions are kept ready.
        embed_dim: width of a token here.
        depth: number of blocks.
        num_heads: attention heads.
        num_outputs: values predicted for a patch.
        mlp_ratio: hidden width of the MLPs over `embed_dim`.
        pos_embed: `sincos2d` or `learned`.
    """

    needs_maps: ClassVar[bool] = True
    """Whether it reads what leaves each block of the encoder, or the last tokens alone."""

    def __init__(
        self,
        *,
        encoder_dim: int,
        encoder_depth: int,
        grid: Grid,
        embed_dim: int,
        depth: int,
        num_heads: int,
        num_outputs: int,
        mlp_ratio: float = 4.0,
        pos_embed: str = "sincos2d",
    ) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.empty(depth, encoder_depth + 1))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = make_pos_embed(pos_embed, grid=grid, dim=embed_dim)
        size = {"dim": embed_dim, "num_heads": num_heads, "memory_dim": encoder_dim}
        self.blocks = Blocks(*(CrossBlock(**size, mlp_ratio=mlp_ratio) for _ in range(depth)))
        self.norm = nn.LayerNorm(embed_dim, eps=LAYER_NORM_EPS)
        self.pred = nn.Linear(embed_dim, num_outputs)
        init_linears(self)
        nn.init.normal_(self.mask_token, std=0.02)
        nn.init.normal_(self.mixture, std=(encoder_depth + 1) ** -0.5)

    def forward(self, maps: Sequence[Float[Tensor, "B L D"]], plan: MaskPlan, grid: Grid) -> Float[Tensor, "B M P"]:
        """Predict the tokens in `plan.predicted` from the `maps` of the visible ones, see `MAEEncoder.maps`."""
        stacked = torch.stack(list(maps))  # [maps, B, L, D]
        memories = torch.tensordot(self.mixture.to(stacked.dtype), stacked, dims=1)  # [depth, B, L, D]
        x = self.mask_token + self.pos_embed(grid)[plan.predicted]
        for block, memory in zip(self.blocks, memories, strict=True):
            x = self.blocks.through(block, x, memory)
        return self.pred(self.norm(x))
