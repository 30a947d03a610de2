"""Multi-head self-attention."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mae.errors import UsageError


class Attention(nn.Module):
    """Self-attention with one fused projection for queries, keys and values (Vaswani et al. 2017).

    Args:
        dim: width of a token, a multiple of `num_heads`.
        num_heads: heads; the scores are scaled by `(dim / num_heads) ** -0.5`.
    """

    def __init__(self, *, dim: int, num_heads: int) -> None:
        super().__init__()
        if dim % num_heads != 0:
            raise UsageError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Every token looks at every token."""
        batch, length, dim = x.shape
        query, key, value = (  # each [B, heads, L, D / heads]
            part.reshape(batch, length, self.num_heads, dim // self.num_heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)  # split before the heads: gradients then join in one copy
        )
        mixed = scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, dim))
