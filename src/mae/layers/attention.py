"""Multi-head self-attention and cross-attention."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mae.errors import UsageError

_MOST_SCORES = 1 << 20
"""Of one head in one image; those of all images and heads are held in memory at once."""


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

    def forward(self, x: Float[Tensor, "B L D"], first: int | None = None) -> Float[Tensor, "B K D"]:
        """Every token attends to every token; or the first ones alone do."""
        query, key, value = self.split(x)
        return self.join(attend(query[:, :, :first], key, value))

    def split(self, x: Float[Tensor, "B L D"]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens, each `[B, heads, L, D / heads]`."""
        batch, length, dim = x.shape
        query, key, value = (
            part.reshape(batch, length, self.num_heads, dim // self.num_heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)  # split before the heads: gradients then join in one copy
        )
        return query, key, value

    def join(self, mixed: Float[Tensor, "B heads L d"]) -> Float[Tensor, "B L D"]:
        """The tokens that leave, of the values that each head mixed for them."""
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def weights(self, x: Float[Tensor, "B L D"], *, queries: int) -> Float[Tensor, "B heads Q L"]:
        """How much each of the first `queries` tokens attends to every token, float32; a row adds up to 1."""
        query, key, _ = self.split(x)
        scores = query[:, :, :queries].float() @ key.float().mT * query.shape[-1] ** -0.5
        return scores.softmax(dim=-1)


class CrossAttention(nn.Module):
    """Cross-attention of tokens to a memory, with one fused projection for keys and values.

    Args:
        dim: width of a token, a multiple of `num_heads`.
        num_heads: heads; the scores are scaled by `(dim / num_heads) ** -0.5`.
        memory_dim: width of a token of the memory.
    """

    def __init__(self, *, dim: int, num_heads: int, memory_dim: int) -> None:
        super().__init__()
        if dim % num_heads != 0:
            raise UsageError(f"width {dim} does not divide into {num_heads} heads")
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.kv = nn.Linear(memory_dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B M K"], memory: Float[Tensor, "B L D"]) -> Float[Tensor, "B M K"]:
        """Every token attends to every token of the memory, and to no other."""
        batch, _, dim = x.shape
        query, key, value = (  # each [B, heads, M or L, K / heads]
            part.reshape(batch, -1, self.num_heads, dim // self.num_heads).transpose(1, 2)
            for part in (self.query(x), *self.kv(memory).chunk(2, dim=-1))
        )
        mixed = attend(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, -1, dim))


def attend(
    query: Float[Tensor, "B heads M d"],
    key: Float[Tensor, "B heads L d"],
    value: Float[Tensor, "B heads L d"],
    bias: Float[Tensor, "B heads M L"] | None = None,
) -> Float[Tensor, "B heads M d"]:
    """Scaled dot-product attention, written out in bfloat16 on a CPU: PyTorch's own takes 3 to 10 times as long there.

    Scores are turned into weights in float32 either way. A bias is added to them, behind the scale.
    """
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] * key.shape[2] <= _MOST_SCORES:
        # Autocast would widen the scores for the softmax and narrow the weights behind it, and keep both. In bfloat16
        # half as much is read and written, and the softmax's own arithmetic is float32 all the same.
        with torch.autocast("cpu", enabled=False):
            scores = (query * query.shape[-1] ** -0.5) @ key.mT
            scores = scores if bias is None else scores + bias
            return scores.softmax(dim=-1).to(value.dtype) @ value
    return scaled_dot_product_attention(query, key, value, attn_mask=bias)
