"""Conversion faults that show in the weights themselves."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mae.errors import MAEError
from mae.interop.imports.convert import Converted

_FRESH = 1e-6
"""Norm weights of an untrained model differ from 1 by at most this."""


def check_weights(path: Path, converted: Converted, *, biased: bool, rows_first: bool) -> None:
    """Refuse trained weights that lost their biases, and transposed positions.

    Args:
        path: of the file, for messages.
        converted: the weights.
        biased: whether queries, keys and values have biases in this format.
        rows_first: whether the position embedding encodes rows before columns in this format.

    Raises:
        MAEError: one of these faults.
    """
    for part in ("encoder", "decoder"):
        own = {name: weight for name, weight in converted.weights.items() if name.startswith(part)}
        if biased and is_trained(own):
            _check_biases(path, own, part)
    kinds = {kind for kind in (converted.positions, converted.decoder_positions) if kind is not None}
    if len(kinds) > 1 and "rows first" in kinds:
        raise MAEError(
            f"{path}: the position embeddings of encoder and decoder differ in the order of rows and columns "
            f"({converted.positions}, {converted.decoder_positions}): one was transposed; download the file again"
        )
    if "rows first" in kinds and not rows_first:
        raise MAEError(
            f"{path}: its position embedding encodes rows first, MAE's columns first. Either it was transposed, or the "
            "model was trained so: then give --rows-first True"
        )


def is_trained(weights: Mapping[str, Tensor]) -> bool:
    """Whether a training step was ever taken: norm weights are initialised to 1."""
    norms = [weight for name, weight in weights.items() if name.endswith("norm1.weight")]
    return any(bool((norm - 1).abs().max() > _FRESH) for norm in norms)


def _check_biases(path: Path, weights: Mapping[str, Tensor], part: str) -> None:
    """Check query and value biases; a key bias does not change attention, and some codes never train it."""
    biases = [weight for name, weight in weights.items() if name.endswith("attn.qkv.bias")]
    for what, number in (("query", 0), ("value", 2)):
        if biases and not any(bool(bias.chunk(3)[number].any()) for bias in biases):
            raise MAEError(
                f"{path}: the {what} biases of all {len(biases)} blocks of its {part} are exactly 0, though its norms "
                "are trained: the program that wrote the file lost them; get another file"
            )
