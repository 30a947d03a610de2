"""Attention pooling: an attention-weighted mean of tokens under a linear head (El-Nouby et al. 2024, AIM)."""

from math import gcd

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.errors import UsageError

_HEAD_DIM = 64


class AttentionPooling(nn.Module):
    """Batch normalisation, attention of one learned query a head, and a linear head (AIM, section 4).

    The query meets the keys of a token through a linear map, and a weighted mean of values is the value of the
    weighted mean, so neither keys nor values are ever made for each token: with D wide tokens in H heads that takes
    H / D of the work, and the result is the same.

    Args:
        dim: width of a token, a multiple of `num_heads`.
        num_heads: heads; the scores are scaled by `(dim / num_heads) ** -0.5`. None: as many as are 64 wide, as in
            every ViT up to L: 12 for ViT-B.
        num_classes: number of classes.

    Raises:
        UsageError: the width does not divide into the heads.
    """

    def __init__(self, *, dim: int, num_heads: int | None = None, num_classes: int) -> None:
        super().__init__()
        num_heads = gcd(dim, max(1, dim // _HEAD_DIM)) if num_heads is None else num_heads
        if dim % num_heads != 0:
            raise UsageError(f"width {dim} does not divide into {num_heads} heads; choose a divisor of the width")
        self.num_heads = num_heads
        self.norm = nn.BatchNorm1d(dim, affine=False, eps=1e-6)
        self.query = nn.Parameter(0.02 * torch.randn(dim))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.head = nn.Linear(dim, num_classes)

    def pool(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        """The value of each image: in each head a mean of its tokens, weighted by their likeness to the query."""
        tokens = self.norm(tokens.flatten(0, 1)).view_as(tokens)
        heads = (self.num_heads, -1)
        key, value = (linear.weight.unflatten(0, heads) for linear in (self.key, self.value))  # [H, D / H, D]
        direction = torch.einsum("hd,hdD->Dh", self.query.unflatten(0, heads), key) * key.shape[1] ** -0.5
        share = (tokens @ direction).softmax(dim=1)  # [B, N, H]
        mixed = share.transpose(1, 2) @ tokens  # [B, H, D]
        return torch.einsum("bhD,hdD->bhd", mixed, value).flatten(1)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B K"]:
        """The logits of each image."""
        return self.head(self.pool(tokens))
