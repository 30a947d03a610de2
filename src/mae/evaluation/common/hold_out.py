"""A part of the training samples on which options of a probe are chosen, and the checks all classifiers share."""

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.errors import UsageError
from mae.randomness import permutation


def hold_out(labels: Int64[Tensor, " n"], *, seed: int) -> tuple[Int64[Tensor, " fitted"], Int64[Tensor, " held"]]:
    """The rows to fit on and the rows to choose by, ascending: a tenth of each class is held out.

    A tenth is rounded up, but a class's only sample is not held out. The division is a function of labels and seed
    alone, on every machine.

    Raises:
        UsageError: no class has two samples.
    """
    order = permutation(seed, 0, len(labels))
    by_class = order[labels[order].argsort(stable=True)]
    counts = torch.bincount(labels)
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[by_class]]  # of a sample in its class
    tenth = ((counts + 9) // 10).where(counts > 1, 0)[labels[by_class]]
    held = by_class[place < tenth]
    if len(held) == 0:
        raise UsageError("no class has two samples, so none can be held out; give more training samples")
    return by_class[place >= tenth].sort().values, held.sort().values


def check_labels(labels: Int64[Tensor, " n"], num_classes: int) -> None:
    """Refuse labels that no classifier can be fitted to.

    Raises:
        UsageError: none, or labels outside `[0, num_classes)`.
    """
    if len(labels) == 0:
        raise UsageError("no training samples; give at least one")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UsageError(f"labels lie between {lowest} and {highest}; expected 0 to {num_classes - 1}")
