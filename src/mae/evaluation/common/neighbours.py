"""Exact nearest neighbours of features by cosine, their votes, and few-shot draws."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import normalize

from mae.errors import MAEError, UsageError
from mae.evaluation.common.hold_out import check_labels
from mae.randomness import permutation

_QUERY_BLOCK = 16384
"""Test samples held at once; the training features are read once for each block."""


@torch.no_grad()
def knn_rank(
    train_features: Float[Tensor, "n D"],
    train_labels: Int64[Tensor, " n"],
    test_features: Float[Tensor, "m D"],
    *,
    ks: Sequence[int],
    num_classes: int,
    temperature: float = 0.07,
    top: int = 5,
    chunk: int = 256,
    bank_chunk: int = 16384,
    device: torch.device,
) -> dict[int, Int64[Tensor, "m top"]]:
    """The classes of each test sample by the vote of its k nearest training samples, for each k from one search.

    A vote weighs exp(s / temperature) for cosine similarity s. Classes with equal votes, or none, come in the order of
    their numbers. A k above n lets all n vote.

    Args:
        train_features: any scale; see `nearest`.
        train_labels: classes in `[0, num_classes)`.
        test_features: likewise.
        ks: how many neighbours vote, each `>= 1`.
        num_classes: number of classes.
        temperature: the smaller, the more the very nearest count.
        top: classes to return, those of most votes first.
        chunk: see `nearest`.
        bank_chunk: see `nearest`.
        device: see `nearest`.

    Returns:
        For each k the `min(top, num_classes)` first classes, on the CPU.

    Raises:
        UsageError: no training sample, no k or one below 1, or labels out of range.
        MAEError: features that are not finite.
    """
    check_labels(train_labels, num_classes)
    if not ks or min(ks) < 1:
        raise UsageError(f"k is {list(ks)}; expected numbers of neighbours, each at least 1")
    train_labels, top = train_labels.cpu(), min(top, num_classes)
    ranked: dict[int, list[Tensor]] = {k: [torch.empty(0, top, dtype=torch.int64)] for k in ks}
    for block in test_features.split(_QUERY_BLOCK):
        similarity, neighbours = nearest(
            train_features,
            block,
            k=min(max(ks), len(train_features)),
            chunk=chunk,
            bank_chunk=bank_chunk,
            device=device,
        )
        for near, rows in zip(similarity.split(chunk), neighbours.split(chunk), strict=True):
            # Relative to the nearest: the same vote, and no exponent can overflow.
            votes, labels = ((near - near[:, :1]).double() / temperature).exp(), train_labels[rows]
            for k, parts in ranked.items():
                tally = votes.new_zeros(len(votes), num_classes).scatter_add_(1, labels[:, :k], votes[:, :k])
                parts.append(tally.argsort(dim=1, descending=True, stable=True)[:, :top])
    return {k: torch.cat(parts) for k, parts in ranked.items()}


@torch.no_grad()
def nearest(
    bank: Float[Tensor, "n D"],
    queries: Float[Tensor, "m D"],
    *,
    k: int,
    chunk: int = 256,
    bank_chunk: int = 16384,
    device: torch.device,
) -> tuple[Float32[Tensor, "m k"], Int64[Tensor, "m k"]]:
    """The cosine similarities and rows of the k nearest of a bank, nearest first, equal ones by row.

    Exact, and the same however the work is cut: similarities are summed in float64 and rounded to float32, so copies of
    a sample are equally near wherever they stand. The bank may be mapped from a file larger than memory: it is read
    once, in order; beside it memory holds the queries and `chunk * bank_chunk` similarities.

    Args:
        bank: any scale; each row is normalised to length 1.
        queries: likewise.
        k: how many, between 1 and n.
        chunk: queries compared at a time.
        bank_chunk: rows of the bank compared at a time.
        device: where features are compared; MPS, which has no float64, leaves it to the CPU.

    Raises:
        MAEError: features that are not finite.
    """
    device = torch.device("cpu") if device.type == "mps" else device
    parts = _unit(queries, device).split(chunk)
    best = [torch.empty(len(part), 0, dtype=torch.int64, device=device) for part in parts]
    for start in range(0, len(bank), bank_chunk):
        columns = _unit(bank[start : start + bank_chunk], device).T
        for number, part in enumerate(parts):
            keys = _sort_keys((part @ columns).float(), start)
            keys = torch.cat([best[number], keys.topk(min(k, keys.shape[1]), dim=1).values], dim=1)
            best[number] = keys.topk(min(k, keys.shape[1]), dim=1).values
    return _from_sort_keys(torch.cat(best).cpu())


def nearest_others(
    bank: Float[Tensor, "n D"], rows: Int64[Tensor, " q"], *, k: int, device: torch.device
) -> tuple[Float32[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """What `nearest` finds for some rows of the bank itself, without each row itself; k is between 1 and n - 1."""
    similarities, places = nearest(bank, bank[rows], k=k + 1, device=device)
    other = places != rows.unsqueeze(1)
    other[other.all(dim=1), -1] = False  # a row with so many copies that it is not among its own nearest
    kept = other.nonzero()[:, 1].reshape(len(rows), -1)
    return similarities.gather(1, kept), places.gather(1, kept)


def few_shot_draws(
    labels: Int64[Tensor, " n"], *, shots: int, draws: int, seed: int, num_classes: int
) -> Int64[Tensor, "draws picked"]:
    """The rows of `shots` samples of each class, drawn without replacement, for each of several draws.

    Args:
        labels: classes in `[0, num_classes)`.
        shots: samples of each class in a draw.
        draws: how many draws; each is a function of seed and number alone, on every machine.
        seed: of the draws, `0 <= seed < 2**63`.
        num_classes: number of classes.

    Returns:
        `shots * num_classes` rows a draw, class by class.

    Raises:
        UsageError: a class has fewer samples than a draw takes.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    fewest = int(counts.argmin())
    if counts[fewest] < shots:
        raise UsageError(f"class {fewest} has {int(counts[fewest])} samples; a draw takes {shots}, so ask for fewer")
    first = (counts.cumsum(0) - counts).unsqueeze(1)  # of each class among the samples sorted by class

    def draw(number: int) -> Tensor:
        order = permutation(seed, number, len(labels))
        by_class = order[labels[order].argsort(stable=True)]
        return by_class[first + torch.arange(shots)].flatten()

    return torch.stack([draw(number) for number in range(draws)])


def _unit(features: Float[Tensor, "n D"], device: torch.device) -> Float64[Tensor, "n D"]:
    if not features.isfinite().all():
        raise MAEError("the features hold values that are not finite; the model that made them is broken")
    return normalize(features.to(device, torch.float64), dim=1)


def _sort_keys(similarity: Float32[Tensor, "B n"], start: int) -> Int64[Tensor, "B n"]:
    """Similarity and row in one whole number each, no two alike: the larger the nearer, of equally near the lower row.

    `topk` alone may return any of equal values; of such keys it has no choice, on any device.
    """
    bits = similarity.add_(0.0).view(torch.int32)  # -0.0 becomes 0.0
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return keys.mul_(1 << 32).sub_(torch.arange(start, start + similarity.shape[1], device=similarity.device))


def _from_sort_keys(keys: Int64[Tensor, "m k"]) -> tuple[Float32[Tensor, "m k"], Int64[Tensor, "m k"]]:
    ordered = -(-keys >> 32)
    bits = ordered.int()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32), (ordered << 32) - keys
