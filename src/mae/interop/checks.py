"""Accidents of conversion that can be seen in what came in."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mae.errors import MAEError
from mae.interop.official import Converted

_FRESH = 1e-6
"""Norms of a model that was never trained are ones to this much."""


def check_weights(path: Path, converted: Converted, *, biased: bool, rows_first: bool) -> None:
    """Refuse trained weights without biases that they must have, and positions turned round on the way.

    Args:
        path: of the file, for messages.
        converted: the weights.
        biased: whether queries, keys and values are to have biases.
        rows_first: whether sines of the row are to come before those of the column.

    Raises:
        MAEError: see above.
    """
    for part in ("encoder", "decoder"):
        own = {name: weight for name, weight in converted.weights.items() if name.startswith(part)}
        if biased and is_trained(own):
            _check_biases(path, own, part)
    kinds = {kind for kind in (converted.positions, converted.decoder_positions) if kind is not None}
    if len(kinds) > 1 and "rows first" in kinds:
        raise MAEError(
            f"{path}: the positions of its encoder and its decoder differ in the order of rows and columns "
            f"({converted.positions}, {converted.decoder_positions}): one of them was transposed; get the file anew"
        )
    if "rows first" in kinds and not rows_first:
        raise MAEError(
            f"{path}: its positions count rows first, where MAE's count columns first: they were transposed, or it was "
            "trained so; if it was, give --rows-first True"
        )


def is_trained(weights: Mapping[str, Tensor]) -> bool:
    """Whether a step was ever taken: the norms before the blocks begin as ones."""
    norms = [weight for name, weight in weights.items() if name.endswith("norm1.weight")]
    return any(bool((norm - 1).abs().max() > _FRESH) for norm in norms)


def _check_biases(path: Path, weights: Mapping[str, Tensor], part: str) -> None:
    """Those of queries and values; a key's bias changes no attention, and some never train it."""
    biases = [weight for name, weight in weights.items() if name.endswith("attn.qkv.bias")]
    for what, number in (("query", 0), ("value", 2)):
        if biases and not any(bool(bias.chunk(3)[number].any()) for bias in biases):
            raise MAEError(
                f"{path}: the {what} biases of all {len(biases)} blocks of its {part} are exactly 0, though its norms "
                "are trained: what wrote this file has lost them; get the file anew"
            )
