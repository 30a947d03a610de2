"""AdamW with the paper's parameter groups."""

from typing import Any

from torch import nn
from torch.optim import AdamW


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed and undecayed trainable parameters, by name.

    Vectors and biases are not decayed; class and mask tokens are, as in the official code: they have three
    dimensions there too.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    plain = [(name, p) for name, p in named if p.ndim <= 1 or name.endswith(".bias")]
    decayed = [(name, p) for name, p in named if not (p.ndim <= 1 or name.endswith(".bias"))]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_optimizer(module: nn.Module, *, weight_decay: float, betas: tuple[float, float]) -> AdamW:
    """AdamW over `parameter_groups`; the engine sets the rate before each step."""
    return AdamW(parameter_groups(module, weight_decay), lr=0.0, betas=betas, fused=True)
