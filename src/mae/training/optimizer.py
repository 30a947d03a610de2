"""AdamW or Muon, and the papers' parameter groups."""

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.optim import AdamW

from mae.training.muon import Muon

PEAK_RATES = {"adamw": 1e-3, "muon": 2e-3}
"""What suits batches of 64 to 256; measured in docs/results/ablations.md."""


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters with and without weight decay, by name.

    Vectors and biases have none; class and mask tokens have, as in the official code, where they have three
    dimensions too.
    """
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    plain = [(name, p) for name, p in named if p.ndim <= 1 or name.endswith(".bias")]
    decayed = [(name, p) for name, p in named if not (p.ndim <= 1 or name.endswith(".bias"))]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def layered_groups(
    module: nn.Module,
    *,
    layer_of: Callable[[str], int],
    num_layers: int,
    decay: float,
    weight_decay: float,
    undecayed: Collection[str],
) -> list[dict[str, Any]]:
    """Trainable parameters by layer, by name, with layer-wise learning-rate decay (BEiT; MAE, A.1).

    Vectors, biases and the `undecayed` have no weight decay.

    Args:
        module: whose parameters.
        layer_of: from a parameter's name to its layer, 0 nearest the input.
        num_layers: the layer with the full rate, in a transformer its depth + 1.
        decay: factor of the rate from one layer to the one before: `lr_scale = decay ** (num_layers - layer)`.
        weight_decay: of matrices.
        undecayed: names of parameters of two dimensions or more without weight decay, such as positions.
    """
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        layer, plain = layer_of(name), parameter.ndim <= 1 or name.endswith(".bias") or name in undecayed
        fresh = {
            "params": [],
            "weight_decay": 0.0 if plain else weight_decay,
            "lr_scale": decay ** (num_layers - layer),
        }
        groups.setdefault((layer, plain), fresh)["params"].append((name, parameter))
    return list(groups.values())


def make_optimizer(module: nn.Module, *, weight_decay: float, betas: tuple[float, float], kind: str = "adamw") -> AdamW:
    """An optimizer over `parameter_groups`; the engine sets the rate before each step.

    Args:
        module: whose parameters.
        weight_decay: of matrices.
        betas: AdamW's decay rates.
        kind: `adamw`, or `muon` for the matrices of blocks.
    """
    groups = parameter_groups(module, weight_decay)
    if kind == "muon":
        return Muon(_orthogonal_apart(groups), betas=betas)
    return AdamW(groups, lr=0.0, betas=betas, fused=True)


def average_bytes(module: nn.Module, *, kind: str = "adamw") -> int:
    """Of the averages that `make_optimizer`'s keeps: AdamW two a trained parameter, Muon one a matrix of blocks."""
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    return sum(p.nbytes if kind == "muon" and _is_hidden(name, p) else 2 * p.nbytes for name, p in trained)


def _orthogonal_apart(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups with the matrices of blocks in groups of their own; embeddings and heads are none of them."""
    apart = [
        {
            **group,
            "params": [(name, p) for name, p in group["params"] if _is_hidden(name, p) is hidden],
            "orthogonal": hidden,
        }
        for group in groups
        for hidden in (False, True)
    ]
    return [group for group in apart if group["params"]]


def _is_hidden(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 2 and ".blocks." in f".{name}"
