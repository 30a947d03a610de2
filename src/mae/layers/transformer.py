"""The pre-norm transformer block of the Vision Transformer, and the initialisation MAE gives it."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mae.layers.attention import Attention, CrossAttention
from mae.layers.drop_path import DropPath

LAYER_NORM_EPS = 1e-6


class Mlp(nn.Module):
    """Two linear layers with a GELU between them.

    Args:
        dim: width of a token.
        hidden_dim: width between the layers.
    """

    def __init__(self, *, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Each token by itself."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))` (Dosovitskiy et al. 2020).

    Args:
        dim: width of a token.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over `dim`.
        drop_path: probability that a sample skips attention or MLP while training, each drawn by itself.
    """

    def __init__(self, *, dim: int, num_heads: int, mlp_ratio: float, drop_path: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.attn = Attention(dim=dim, num_heads=num_heads)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(dim=dim, hidden_dim=int(dim * mlp_ratio))
        self.drop_path = DropPath(rate=drop_path)

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Tokens in, tokens out."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class CrossBlock(nn.Module):
    """`x + attention(norm(x), memory)`, then `x + mlp(norm(x))`: tokens see the memory and not each other.

    Args:
        dim: width of a token.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over `dim`.
        memory_dim: width of a token of the memory.
    """

    def __init__(self, *, dim: int, num_heads: int, mlp_ratio: float, memory_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.norm_memory = nn.LayerNorm(memory_dim, eps=LAYER_NORM_EPS)
        self.attn = CrossAttention(dim=dim, num_heads=num_heads, memory_dim=memory_dim)
        self.norm2 = nn.LayerNorm(dim, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(dim=dim, hidden_dim=int(dim * mlp_ratio))

    def forward(self, x: Float[Tensor, "B M K"], memory: Float[Tensor, "B L D"]) -> Float[Tensor, "B M K"]:
        """Tokens in, tokens out."""
        x = x + self.attn(self.norm1(x), self.norm_memory(memory))
        return x + self.mlp(self.norm2(x))


class Blocks(nn.Sequential):
    """Blocks, one after the other.

    Attributes:
        recompute: whether a block is computed again in the backward pass instead of keeping what it computed on the
            way: memory for one block instead of all, and about a third more arithmetic (Chen et al. 2016).
    """

    recompute = False

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Tokens in, tokens out."""
        for block in self:
            x = self.through(block, x)
        return x

    def through(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """What one of the blocks makes of its inputs, kept or to be computed again."""
        again = self.recompute and torch.is_grad_enabled()
        return checkpoint(block, *inputs, use_reentrant=False) if again else block(*inputs)


def make_blocks(*, dim: int, depth: int, num_heads: int, mlp_ratio: float, drop_path: float = 0.0) -> Blocks:
    """`depth` blocks, one after the other; their drop path rises in a straight line from 0 to `drop_path`."""
    rates = (drop_path * number / max(depth - 1, 1) for number in range(depth))
    return Blocks(*(Block(dim=dim, num_heads=num_heads, mlp_ratio=mlp_ratio, drop_path=rate) for rate in rates))


def init_linears(module: nn.Module) -> None:
    """MAE's initialisation of transformer weights: every linear layer Xavier-uniform with zero bias.

    The fused query-key-value matrix is initialised as the one matrix it is, so its fan-out counts all three.
    Layer norms keep PyTorch's ones and zeros.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)


def set_norm_eps(module: nn.Module, eps: float) -> None:
    """Let every layer norm of a module add `eps` to the variance; without this call it is 1e-6."""
    for layer in module.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.eps = eps
