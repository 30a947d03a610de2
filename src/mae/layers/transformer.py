"""The pre-norm transformer block of the Vision Transformer, and the initialisation MAE gives it."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mae.layers.attention import Attention, CrossAttention
from mae.layers.drop_path import DropPath
from mae.layers.layer_norm import LayerNorm

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
        drop_path: stochastic depth for attention and MLP, each drawn separately; None: none.
        eps: added to the variance in the layer norms.
    """

    forward_methods: ClassVar[tuple[str, ...]] = ("attention_weights",)

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        drop_path: DropPath | None = None,
        eps: float = LAYER_NORM_EPS,
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps)
        self.attn = Attention(dim=dim, num_heads=num_heads)
        self.norm2 = LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim=dim, hidden_dim=int(dim * mlp_ratio))
        self.drop_path = drop_path or DropPath(rate=0.0)

    def forward(self, x: Float[Tensor, "B L D"], first: int | None = None) -> Float[Tensor, "B K D"]:
        """Tokens in, tokens out: all, or the first ones alone, for which the others are only keys and values."""
        x = x[:, :first] + self.drop_path(self.attn(self.norm1(x), first))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def attention_weights(self, x: Float[Tensor, "B L D"], *, queries: int) -> Float[Tensor, "B heads Q L"]:
        """How much each of the first `queries` tokens attends to every token, see `Attention.weights`."""
        return self.attn.weights(self.norm1(x), queries=queries)


class CrossBlock(nn.Module):
    """`x + attention(norm(x), memory)`, then `x + mlp(norm(x))`: tokens see the memory and not each other.

    Args:
        dim: width of a token.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over `dim`.
        memory_dim: width of a token of the memory.
        eps: added to the variance in the layer norms.
    """

    def __init__(
        self, *, dim: int, num_heads: int, mlp_ratio: float, memory_dim: int, eps: float = LAYER_NORM_EPS
    ) -> None:
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps)
        self.norm_memory = LayerNorm(memory_dim, eps=eps)
        self.attn = CrossAttention(dim=dim, num_heads=num_heads, memory_dim=memory_dim)
        self.norm2 = LayerNorm(dim, eps=eps)
        self.mlp = Mlp(dim=dim, hidden_dim=int(dim * mlp_ratio))

    def forward(self, x: Float[Tensor, "B M K"], memory: Float[Tensor, "B L D"]) -> Float[Tensor, "B M K"]:
        """Tokens in, tokens out."""
        x = x + self.attn(self.norm1(x), self.norm_memory(memory))
        return x + self.mlp(self.norm2(x))


def apply_block(block: nn.Module, *inputs: Any) -> Tensor:
    """The output of a block."""
    return block(*inputs)


class Blocks(nn.Sequential):
    """Blocks, one after the other.

    Args:
        blocks: modules in order, or one ordered dictionary of them.
        activation_checkpointing: whether a block is computed again in the backward pass instead of keeping its
            activations: memory for one block instead of all, and about a third more arithmetic (Chen et al. 2016).

    Attributes:
        apply_block: calls one of them with its inputs where gradients are recorded; see `compile_blocks`.
    """

    def __init__(self, *blocks: Any, activation_checkpointing: bool = False) -> None:
        super().__init__(*blocks)
        self.activation_checkpointing = activation_checkpointing
        self.apply_block: Callable[..., Tensor] = apply_block

    def forward(self, x: Float[Tensor, "B L D"], first: int | None = None) -> Float[Tensor, "B K D"]:
        """Tokens in, tokens out: all, or the first ones alone, whose number only the last block is told."""
        *others, last = self
        for block in others:
            x = self.through(block, x)
        return self.through(last, x) if first is None else self.through(last, x, first)

    def through(self, block: nn.Module, *inputs: Any) -> Tensor:
        """The output of one of the blocks, with activation checkpointing where that is on."""
        if not torch.is_grad_enabled():  # evaluations have many shapes, each of which would be compiled
            return apply_block(block, *inputs)
        if self.activation_checkpointing:
            return checkpoint(self.apply_block, block, *inputs, use_reentrant=False)
        return self.apply_block(block, *inputs)


def make_blocks(
    *,
    dim: int,
    depth: int,
    num_heads: int,
    mlp_ratio: float,
    drop_path: float = 0.0,
    rank: int = 0,
    world: int = 1,
    eps: float = LAYER_NORM_EPS,
    activation_checkpointing: bool = False,
) -> Blocks:
    """Blocks of one kind, one after the other.

    Args:
        dim: width of a token.
        depth: how many.
        num_heads: attention heads.
        mlp_ratio: hidden width of the MLP over `dim`.
        drop_path: rate of the last block; it rises linearly from 0.
        rank: see `DropPath`.
        world: see `DropPath`.
        eps: added to the variance in the layer norms.
        activation_checkpointing: see `Blocks`.
    """
    rates = (drop_path * number / max(depth - 1, 1) for number in range(depth))
    return Blocks(
        *(
            Block(
                dim=dim,
                num_heads=num_heads,
                mlp_ratio=mlp_ratio,
                drop_path=DropPath(rate=rate, rank=rank, world=world),
                eps=eps,
            )
            for rate in rates
        ),
        activation_checkpointing=activation_checkpointing,
    )


def init_linears(module: nn.Module) -> None:
    """MAE's initialisation of transformer weights: every linear layer Xavier-uniform with zero bias.

    The fused query-key-value matrix is initialised as the one matrix it is, so its fan-out counts all three.
    Layer norms keep PyTorch's ones and zeros.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
