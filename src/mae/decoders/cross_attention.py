"""A light transformer whose tokens look at the visible ones alone."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.core.component import options_of
from mae.core.types import Encoded, Grid, Layout, MaskPlan, take_rows
from mae.decoders.transformer import TransformerDecoder
from mae.layers.init import init_normal_
from mae.layers.layer_norm import LayerNorm
from mae.layers.pos_embed import make_pos_embed
from mae.layers.transformer import LAYER_NORM_EPS, Blocks, CrossBlock, init_linears


@dataclass(frozen=True, kw_only=True)
class CrossAttention(TransformerDecoder):
    """Masked tokens see the visible ones alone, which is faster (CrossMAE, Fu et al. 2024)."""

    kind: ClassVar[str] = "cross"
    reads: ClassVar[Literal["last", "levels"]] = "levels"
    min_tokens: ClassVar[int] = 2

    def build(
        self, *, encoder: Any, layout: Layout, num_outputs: int, activation_checkpointing: bool = False
    ) -> "CrossDecoder":
        """The network, with fresh weights from PyTorch's global generator; see `Decoder.build`."""
        return CrossDecoder(
            encoder_dim=encoder.embed_dim,
            encoder_depth=len(encoder.blocks),
            grid=layout.grid,
            num_outputs=num_outputs,
            activation_checkpointing=activation_checkpointing,
            **options_of(self),
        )


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
        norm_eps: added to the variance in every layer norm.
        pos_embed: `sincos2d` or `learned`.
        activation_checkpointing: see `Blocks`.
    """

    def __init__(  # noqa: PLR0913 - the sizes of an architecture
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
        norm_eps: float = LAYER_NORM_EPS,
        pos_embed: str = "sincos2d",
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.mixture = nn.Parameter(torch.empty(depth, encoder_depth + 1))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = make_pos_embed(pos_embed, grid=grid, dim=embed_dim)
        size = {"dim": embed_dim, "num_heads": num_heads, "memory_dim": encoder_dim}
        self.blocks = Blocks(
            *(CrossBlock(**size, mlp_ratio=mlp_ratio, eps=norm_eps) for _ in range(depth)),
            activation_checkpointing=activation_checkpointing,
        )
        self.norm = LayerNorm(embed_dim, eps=norm_eps)
        self.pred = nn.Linear(embed_dim, num_outputs)
        init_linears(self)
        init_normal_(self.mask_token, std=0.02)
        init_normal_(self.mixture, std=(encoder_depth + 1) ** -0.5)

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Float[Tensor, "B M P"]:
        """Predict the tokens in `plan.predicted` from all the encoder's levels."""
        stacked = torch.stack(list(encoded.levels))  # [levels, B, L, D]
        memories = torch.tensordot(self.mixture.to(stacked.dtype), stacked, dims=1)  # [depth, B, L, D]
        x = self.mask_token + take_rows(self.pos_embed(layout.grid), plan.predicted)
        for block, memory in zip(self.blocks, memories, strict=True):
            x = self.blocks.through(block, x, memory)
        return self.pred(self.norm(x))
