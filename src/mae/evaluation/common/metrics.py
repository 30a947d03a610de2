"""Metrics of rankings of classes: top-k accuracy, confusions, and what the commonest class alone reaches."""

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.errors import UsageError


def top_k_accuracy(ranking: Int64[Tensor, "m k"], labels: Int64[Tensor, " m"]) -> float:
    """The share of samples, in [0, 1], whose class is among the k first ones of their ranking.

    Raises:
        UsageError: there is no sample.
    """
    if len(labels) == 0:
        raise UsageError("no test samples; give at least one")
    return float((ranking == labels.unsqueeze(1)).any(dim=1).double().mean())


def confusion_matrix(
    predicted: Int64[Tensor, " m"], labels: Int64[Tensor, " m"], num_classes: int
) -> Int64[Tensor, "K K"]:
    """How many samples of each true class (row) were given each class (column): sparse, as small as the samples."""
    pairs, counts = torch.stack([labels, predicted]).unique(dim=1, return_counts=True)
    return torch.sparse_coo_tensor(pairs, counts, (num_classes, num_classes), check_invariants=True).coalesce()


def majority_share(train_labels: Int64[Tensor, " n"], test_labels: Int64[Tensor, " m"], num_classes: int) -> float:
    """The accuracy, in [0, 1], of always saying the class commonest in training; of equal ones the lowest.

    Raises:
        UsageError: there is no test sample.
    """
    commonest = torch.bincount(train_labels, minlength=num_classes).argmax()
    return top_k_accuracy(commonest.expand(len(test_labels), 1), test_labels)
