"""Blocks in which mask tokens and encoded ones look at each other."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.core.types import Encoded, Grid, Layout, MaskPlan, take_rows, take_tokens
from mae.layers.init import init_normal_
from mae.layers.layer_norm import LayerNorm
from mae.layers.pos_embed import make_pos_embed
from mae.layers.transformer import LAYER_NORM_EPS, init_linears, make_blocks


class MAEDecoder(nn.Module):
    """Mask tokens put where patches are hidden, own positions, blocks, one linear head (section 3, "MAE decoder").

    Args:
        encoder_dim: width of the encoder's tokens.
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

    def __init__(
        self,
        *,
        encoder_dim: int,
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
        self.embed = nn.Linear(encoder_dim, embed_dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = make_pos_embed(pos_embed, grid=grid, dim=embed_dim)
        self.blocks = make_blocks(
            dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            eps=norm_eps,
            activation_checkpointing=activation_checkpointing,
        )
        self.norm = LayerNorm(embed_dim, eps=norm_eps)
        self.pred = nn.Linear(embed_dim, num_outputs)
        init_linears(self)
        init_normal_(self.mask_token, std=0.02)

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Float[Tensor, "B M P"]:
        """Predict the tokens in `plan.predicted` from the encoder's last level.

        Every token of the grid takes part in the attention; norm and head run on the predicted ones alone.
        """
        x, lead = self.embed(encoded.tokens), encoded.num_prefix
        prefix, tokens = x[:, :lead], x[:, lead:]
        if encoded.places is not None and plan.predicts_rest:
            # Attention asks for no order: with the predicted tokens in front the last block computes them alone.
            positions = self.pos_embed(layout.grid)
            masked = self.mask_token + take_rows(positions, plan.predicted)
            visible = tokens + take_rows(positions, encoded.places)
            x = self.blocks(torch.cat([masked, prefix, visible], dim=1), masked.shape[1])
            return self.pred(self.norm(x))
        if encoded.places is not None:
            everywhere = self.mask_token.to(x.dtype).expand(x.shape[0], plan.hidden.shape[1], -1)  # [B, N, K]
            tokens = everywhere.scatter(1, encoded.places.unsqueeze(-1).expand_as(tokens), tokens)
        x = self._through_blocks(prefix, tokens, layout.grid)
        return self.pred(self.norm(take_tokens(x, plan.predicted)))

    def complete(
        self, prefix: Float[Tensor, "B S K"], tokens: Float[Tensor, "B N K"], grid: Grid
    ) -> Float[Tensor, "B N P"]:
        """Predict every token of a whole grid: embedded tokens where visible, mask tokens where hidden."""
        return self.pred(self.norm(self._through_blocks(prefix, tokens, grid)))

    def _through_blocks(
        self, prefix: Float[Tensor, "B S K"], tokens: Float[Tensor, "B N K"], grid: Grid
    ) -> Float[Tensor, "B N K"]:
        x = torch.cat([prefix, tokens + self.pos_embed(grid)], dim=1)
        return self.blocks(x)[:, prefix.shape[1] :]
