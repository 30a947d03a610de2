"""Low-rank adaptation: small trained matrices beside frozen attention weights (Hu et al. 2021)."""

from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from mae.errors import UsageError
from mae.layers.attention import Attention

_ADAPTED = ("qkv", "proj")


class LoRALinear(nn.Linear):
    """A frozen linear layer plus a trained product of low rank: `W' = W + (alpha / rank) up down`.

    `down` starts Kaiming-uniform and `up` at zero, so that at first nothing changes (Hu et al. 2021, section 4.1).
    The frozen weights keep their names.

    Args:
        base: the layer whose weights are taken over, not copied, and frozen.
        rank: rows of `down`, columns of `up`; at least 1.
        alpha: strength of the product, divided by the rank.
    """

    def __init__(self, base: nn.Linear, *, rank: int, alpha: float) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        self.scale = alpha / rank
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        if not self.down.is_meta:  # see `init_normal_`
            nn.init.kaiming_uniform_(self.down, a=sqrt(5))

    def forward(self, input: Float[Tensor, "*L I"]) -> Float[Tensor, "*L O"]:
        """The layer's output plus the product's."""
        return super().forward(input) + self.scale * linear(linear(input, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """A plain layer with this layer's weights, the product added to them in place."""
        self.weight += self.scale * self.up @ self.down
        plain = nn.Linear(self.in_features, self.out_features, device="meta")
        plain.weight, plain.bias = self.weight, self.bias
        return plain


def add_lora(module: nn.Module, *, rank: int, alpha: float | None = None) -> None:
    """Freeze a module and train only low-rank products, beside `qkv` and `proj` of each of its `Attention`s.

    Args:
        module: such as an encoder; changed in place.
        rank: rank of the products, at least 1.
        alpha: their strength, divided by the rank; None: the rank, so a strength of 1.

    Raises:
        UsageError: a rank below 1, no attention to adapt, or attention that is adapted already.
    """
    if rank < 1:
        raise UsageError(f"LoRA rank is {rank}; expected at least 1")
    attentions = _attentions(module)
    if not attentions or any(isinstance(attention.qkv, LoRALinear) for attention in attentions):
        raise UsageError("LoRA needs a module with attention that has no LoRA yet; call merge_lora before adding anew")
    module.requires_grad_(False)
    for attention in attentions:
        for name in _ADAPTED:
            base = getattr(attention, name)
            setattr(attention, name, LoRALinear(base, rank=rank, alpha=rank if alpha is None else alpha))


def merge_lora(module: nn.Module) -> None:
    """Fold the products into the frozen weights and leave plain linear layers, still frozen.

    The module computes the same as before, at the cost it had without LoRA.
    """
    for attention in _attentions(module):
        for name in _ADAPTED:
            layer = getattr(attention, name)
            if isinstance(layer, LoRALinear):
                setattr(attention, name, layer.merged())


def _attentions(module: nn.Module) -> list[Attention]:
    return [layer for layer in module.modules() if isinstance(layer, Attention)]
