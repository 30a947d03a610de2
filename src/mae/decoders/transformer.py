"""The options of every decoder that is a light transformer."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mae.core.component import Alias, Depth, Epsilon, MlpRatio, Width
from mae.core.contracts import Decoder


@dataclass(frozen=True, kw_only=True)
class TransformerDecoder(Decoder):
    """A decoder of transformer blocks."""

    embed_dim: Width = 512
    """Width of the decoder's tokens."""
    depth: Depth = 8
    """Blocks of the decoder."""
    num_heads: Width = 16
    """Attention heads of the decoder."""
    mlp_ratio: Annotated[MlpRatio, Alias("mlp_ratio")] = 4.0
    """Hidden width of the MLPs over the token width."""
    norm_eps: Annotated[Epsilon, Alias("norm_eps")] = 1e-06
    """Added to the variance in every layer norm."""
    pos_embed: Annotated[Literal["sincos2d", "learned"], Alias("pos_embed")] = "sincos2d"
    """sincos2d: fixed positions, for any image size. learned: trained ones, for one size."""
