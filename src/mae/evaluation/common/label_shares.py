"""Parts of a labelled set of several sizes, each within the next larger one."""

from collections.abc import Sequence

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.randomness import permutation


def draw_shares(labels: Int64[Tensor, " n"], fractions: Sequence[float], *, seed: int) -> list[Int64[Tensor, " part"]]:
    """The rows of each share of the samples, ascending, drawn class by class.

    A class gives the nearest whole number of its samples to the share, half a sample up, and at least one. It gives
    them in one order, so the rows of a smaller share are among those of a larger one. A function of labels, shares and
    seed alone, on every machine.

    Args:
        labels: classes, `>= 0`.
        fractions: in (0, 1].
        seed: `0 <= seed < 2**63`.
    """
    order = permutation(seed, 0, len(labels))
    by_class = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]  # of a sample in its class
    wanted = [(fraction * counts.double() + 0.5).floor().long().clamp(min=1) for fraction in fractions]
    return [by_class[place < number[labels[by_class]]].sort().values for number in wanted]


def can_hold_out(labels: Int64[Tensor, " n"]) -> bool:
    """Whether a class has two samples, so that `hold_out` can choose by one of them."""
    return bool((torch.bincount(labels) > 1).any())
