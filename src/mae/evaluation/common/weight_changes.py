"""How far the weights of a model moved between two moments of its training."""

import re
from collections import defaultdict
from collections.abc import Mapping
from math import sqrt

from torch import Tensor

from mae.errors import UsageError

_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.")


def relative_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """By group of parameters, the length of the change over the length of the weights before, in order of the model.

    A group is a block of the encoder or the decoder, or what else the encoder, the decoder or another part has. This
    is the net change: a step that is taken back does not show.

    Args:
        before: parameters by name.
        after: those of the same model later.

    Raises:
        UsageError: parameters of other names or shapes.
    """
    if before.keys() != after.keys() or any(before[name].shape != after[name].shape for name in before):
        raise UsageError("the two have other parameters; expected two moments of one model")
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, old in before.items():
        group = squares[group_of(name)]
        group[0] += float((after[name].double() - old.double()).square().sum())
        group[1] += float(old.double().square().sum())
    return {name: sqrt(moved / length) if length else float("nan") for name, (moved, length) in squares.items()}


def group_of(name: str) -> str:
    """The group of a parameter, by its name."""
    block = _BLOCK.match(name)
    if block is not None:
        return f"{block[1]} block {block[2]}"
    part = name.partition(".")[0]
    return f"{part}, rest" if part in ("encoder", "decoder") else part
