"""LayerScale, which DINOv2 has and this package's blocks have not: a factor that belongs into the layer before it."""

import re
from collections.abc import Mapping

from torch import Tensor

from mae.errors import MAEError

_SCALE = re.compile(r"(blocks\.\d+)\.ls([12])\.gamma")
_SCALED = {"1": "attn.proj", "2": "mlp.fc2"}


def has_layer_scale(encoder: Mapping[str, Tensor]) -> bool:
    """Whether tensors under official names are of blocks with LayerScale."""
    return any(_SCALE.fullmatch(name) for name in encoder)


def fold_layer_scale(encoder: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same encoder without LayerScale (Touvron et al. 2021, "Going deeper with image transformers", section 2.2).

    A block adds `gamma * (W x + b)` to its input, channel by channel; `gamma W` and `gamma b` give the same.

    Raises:
        MAEError: a factor without its layer, or of another width.
    """
    folded = dict(encoder)
    for name in encoder:
        if (found := _SCALE.fullmatch(name)) is None:
            continue
        gamma, layer = folded.pop(name).float(), f"{found[1]}.{_SCALED[found[2]]}"
        for part in ("weight", "bias"):
            tensor = folded.get(f"{layer}.{part}")
            if tensor is None or gamma.ndim != 1 or len(tensor) != len(gamma):
                raise MAEError(f"{name} has no {layer}.{part} of its width; download the file again")
            folded[f"{layer}.{part}"] = tensor.float() * (gamma[:, None] if tensor.ndim == 2 else gamma)
    return folded
