"""How spread out features are, measured without labels: a model whose features collapse shows it here first."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import log, sqrt

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from mae.errors import MAEError, UsageError
from mae.randomness import permutation

_VALUES = 1 << 22
"""Numbers computed with at a time: 32 MB in 64 bits, however many rows there are."""

_RANK_EPS = 1e-7  # the paper's, for float32
_UNIFORMITY_ROWS = 10_000
_UNIFORMITY_SEED = 0


@dataclass(frozen=True, kw_only=True)
class FeatureStats:
    """Label-free numbers of n features of width D; all but the first use directions alone (length 1).

    They compare runs of one method; between methods a higher rank need not mean better features.

    Attributes:
        effective_rank: RankMe (Garrido et al. 2023, equations 1 and 2): the exponential of the entropy of the
            singular values, 1e-7 added to each one's share, not centred and not normalised, as in the paper.
            From 1 (collapsed; the 1e-7 adds up to 0.002 at D = 1000) to min(n, D).
        feature_std: std (divided by n) of each dimension, their mean times sqrt(D) (SimSiam, Chen &
            He 2021, section 4.1): 0 when collapsed, near 1 when spread out evenly, never above 1.
        mean_cosine: mean cosine of all pairs of different rows: 1 when collapsed, 0 when spread out evenly,
            at least -1 / (n - 1).
        uniformity: log of the mean of exp(-2 |x - y|^2) over pairs of different rows, of 10,000 rows at most (Wang &
            Isola 2020, section 4.1): 0 when collapsed, the lower the more uniform, about -4 in a wide space.
        alignment: mean of |x - y|^2 between the features of two views of each image (same section, alpha = 2):
            from 0 (the views are alike) to 4; None when no views were given.
    """

    effective_rank: float
    feature_std: float
    mean_cosine: float
    uniformity: float
    alignment: float | None

    def as_dict(self) -> dict[str, float | None]:
        """The numbers by name."""
        return asdict(self)


@torch.no_grad()
def measure_spread(
    features: Float[Tensor, "n D"], *, views: tuple[Float[Tensor, "m D"], Float[Tensor, "m D"]] | None = None
) -> FeatureStats:
    """The numbers of a feature matrix.

    The matrix is read once, piece by piece, and may lie in a memory-mapped file. Beside it there is memory for a
    D x D and a 10,000 x D matrix in 64 bits. Deterministic: the rows for `uniformity` are drawn by a fixed key.

    Args:
        features: one row an image, any scale; on the CPU.
        views: features of two views of the same images, row by row.

    Raises:
        UsageError: fewer than two rows, or views that do not match.
        MAEError: features that are not finite, or a row of zeros, which has no direction.
    """
    n, width = features.shape
    if n < 2:
        raise UsageError(f"{n} feature vectors; how spread out they are shows from 2 on, give more images")
    gram = torch.zeros(width, width, dtype=torch.float64)
    sums, squares = torch.zeros(2, width, dtype=torch.float64)
    # Sums from one row's direction on: rows alike then give 0, where E[x^2] - E[x]^2 leaves a rounding error.
    _, first = next(_pieces(features[:1]))  # [1, D]
    for rows, directions in _pieces(features):
        gram.addmm_(rows.T, rows)
        sums += (directions - first).sum(dim=0)
        squares += (directions - first).square().sum(dim=0)
    variance = (squares / n - (sums / n).square()).clamp_min(0)
    total = sums + n * first
    return FeatureStats(
        effective_rank=effective_rank(_shares(gram, min(n, width))),
        feature_std=float(variance.sqrt().mean()) * sqrt(width),
        mean_cosine=(float(total.square().sum()) - n) / (n * (n - 1)),  # of all pairs, less each row with itself
        uniformity=_uniformity(features),
        alignment=None if views is None else alignment(*views),
    )


@torch.no_grad()
def alignment(first: Float[Tensor, "n D"], second: Float[Tensor, "m E"]) -> float:
    """Mean squared distance of the directions of two views' features, in [0, 4].

    Wang & Isola 2020, section 4.1, with alpha = 2.

    Args:
        first: features of one view, one row an image; on the CPU.
        second: features of the other view of the same images in the same order.

    Raises:
        UsageError: no rows, or views of different shapes.
        MAEError: features that are not finite, or a row of zeros.
    """
    if first.shape != second.shape or len(first) == 0:
        raise UsageError(
            f"views with features of shapes {tuple(first.shape)} and {tuple(second.shape)}; expected two of the "
            "same shape, a row for each image, and at least one row"
        )
    pairs = zip(_pieces(first), _pieces(second), strict=True)
    return sum(float((x - y).square().sum()) for (_, x), (_, y) in pairs) / len(first)


@torch.no_grad()
def singular_spectrum(features: Float[Tensor, "n D"]) -> Float64[Tensor, " min_n_D"]:
    """The singular values of a feature matrix over their sum, the largest first; see `FeatureStats.effective_rank`.

    Raises:
        MAEError: see `measure_spread`.
    """
    gram = torch.zeros(features.shape[1], features.shape[1], dtype=torch.float64)
    for rows, _ in _pieces(features):
        gram.addmm_(rows.T, rows)
    return _shares(gram, min(features.shape))


def effective_rank(shares: Float64[Tensor, " count"]) -> float:
    """RankMe of singular values that add up to 1; see `FeatureStats.effective_rank`."""
    raised = shares + _RANK_EPS
    return float((-raised * raised.log()).sum().exp())


def _pieces(features: Float[Tensor, "n D"]) -> Iterator[tuple[Float64[Tensor, "b D"], Float64[Tensor, "b D"]]]:
    """Some rows at a time in 64 bits, as they are and with length 1."""
    for part in features.split(max(1, _VALUES // features.shape[1])):
        rows = part.double()
        length = rows.norm(dim=1, keepdim=True)
        if not length.isfinite().all():
            raise MAEError("the features hold values that are not finite; the model that made them is broken")
        if (length == 0).any():
            raise MAEError(
                "a feature vector is all zeros and has no direction; the model that made it is broken, or collapsed"
            )
        yield rows, rows / length


def _shares(gram: Float64[Tensor, "D D"], count: int) -> Float64[Tensor, " count"]:
    """Of the matrix behind a Gram matrix, whose eigenvalues are the squares of its `count` singular values."""
    singular = torch.linalg.eigvalsh(gram)[-count:].flip(0).clamp_min(0).sqrt()
    return singular / singular.sum()


def _uniformity(features: Float[Tensor, "n D"]) -> float:
    chosen = permutation(_UNIFORMITY_SEED, 0, len(features))[:_UNIFORMITY_ROWS].sort().values  # in the file's order
    directions = torch.cat([part for _, part in _pieces(features[chosen])])
    n, step = len(directions), max(1, _VALUES // len(directions))
    total = 0.0
    for start in range(0, n, step):
        cosine = directions[start : start + step] @ directions[start:].T
        total += float((4 * cosine - 4).exp().triu(diagonal=1).sum())  # |x - y|^2 is 2 - 2 cosine; each pair once
    return log(total / (n * (n - 1) / 2))
