"""Weighted k-nearest-neighbour classification of frozen features (Wu et al. 2018, section 3.4; DINO, section 4)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import normalize

from mae.errors import MAEError, UsageError


@torch.no_grad()
def knn_predict(
    train_features: Float[Tensor, "n D"],
    train_labels: Int64[Tensor, " n"],
    test_features: Float[Tensor, "m D"],
    *,
    ks: Sequence[int],
    num_classes: int,
    temperature: float = 0.07,
    chunk: int = 256,
) -> dict[int, Int64[Tensor, " m"]]:
    """The class of each test sample by the vote of its k nearest training samples, for each k from one pass.

    Nearness is the cosine similarity s of the features, a vote weighs exp(s / temperature). The search is exact.
    Equally near training samples come in the order of their numbers; of classes with equal votes the lowest wins.
    A k above n lets all n vote and keeps its own key.

    Args:
        train_features: any scale; each is normalised to length 1.
        train_labels: classes in `[0, num_classes)`.
        test_features: likewise.
        ks: how many neighbours vote, each `>= 1`.
        num_classes: number of classes.
        temperature: the smaller, the more the very nearest count.
        chunk: test samples compared at a time; memory is `chunk * n` similarities.

    Raises:
        UsageError: no training sample, no k or one below 1, or labels out of range.
        MAEError: features that are not finite.
    """
    _check(train_features, train_labels, test_features, ks, num_classes)
    bank = normalize(train_features.float(), dim=1)
    num_neighbours = min(max(ks), len(bank))
    predicted: dict[int, list[Tensor]] = {k: [] for k in ks}
    for queries in normalize(test_features.float(), dim=1).split(chunk):
        similarity, neighbours = _nearest(queries @ bank.T, num_neighbours)
        # Relative to the nearest: the same vote, and no exponent can overflow.
        votes = ((similarity - similarity[:, :1]).double() / temperature).exp()
        labels = train_labels[neighbours]
        for k in ks:
            tally = votes.new_zeros(len(queries), num_classes)
            predicted[k].append(tally.scatter_add_(1, labels[:, :k], votes[:, :k]).argmax(dim=1))
    return {k: torch.cat(parts) for k, parts in predicted.items()}


def knn_accuracy(
    train_features: Float[Tensor, "n D"],
    train_labels: Int64[Tensor, " n"],
    test_features: Float[Tensor, "m D"],
    test_labels: Int64[Tensor, " m"],
    *,
    ks: Sequence[int],
    num_classes: int,
    temperature: float = 0.07,
    chunk: int = 256,
) -> dict[int, float]:
    """The share of test samples given their right class, in [0, 1], for each k; see `knn_predict`.

    Raises:
        UsageError: no training or test sample, no k or one below 1, or labels out of range.
        MAEError: features that are not finite.
    """
    if len(test_labels) == 0:
        raise UsageError("no test samples to judge; give at least one")
    predicted = knn_predict(
        train_features,
        train_labels,
        test_features,
        ks=ks,
        num_classes=num_classes,
        temperature=temperature,
        chunk=chunk,
    )
    return {k: float((classes == test_labels).double().mean()) for k, classes in predicted.items()}


def _nearest(similarity: Float[Tensor, "m n"], k: int) -> tuple[Float[Tensor, "m k"], Int64[Tensor, "m k"]]:
    """The k largest of each row, equal ones in the order of their numbers, which `topk` alone leaves open."""
    values, found = similarity.topk(k, dim=1)
    # Where more samples are as near as the last one, topk may have taken any of them.
    open_rows = ((similarity >= values[:, -1:]).sum(dim=1) > k).nonzero().flatten()
    if len(open_rows):
        found[open_rows] = similarity[open_rows].argsort(dim=1, descending=True, stable=True)[:, :k]
    found = found.sort(dim=1).values
    values, order = similarity.gather(1, found).sort(dim=1, descending=True, stable=True)
    return values, found.gather(1, order)


def _check(
    train_features: Float[Tensor, "n D"],
    train_labels: Int64[Tensor, " n"],
    test_features: Float[Tensor, "m D"],
    ks: Sequence[int],
    num_classes: int,
) -> None:
    if len(train_features) == 0:
        raise UsageError("no training samples to vote; give at least one")
    if not ks or min(ks) < 1:
        raise UsageError(f"k is {list(ks)}; expected numbers of neighbours, each at least 1")
    lowest, highest = int(train_labels.min()), int(train_labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UsageError(f"labels lie between {lowest} and {highest}; expected 0 to {num_classes - 1}")
    if not (train_features.isfinite().all() and test_features.isfinite().all()):
        raise MAEError("the features hold values that are not finite; the model that made them is broken")
