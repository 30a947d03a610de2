"""How good features of single layers are, by quick scores that compare layers and moments of one run."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.common.feature_stats import effective_rank, singular_spectrum
from mae.evaluation.common.metrics import majority_share, top_k_accuracy
from mae.evaluation.common.neighbours import knn_rank
from mae.randomness import FIXED_EPOCH, permutation

_K = 20
_PENALTIES = torch.logspace(-2, 4, 7).tolist()
_FEWEST = 8


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerStats:
    """Of the features of one layer.

    Attributes:
        spectrum: singular values over their sum, the largest first.
        effective_rank: see `FeatureStats`.
        knn: accuracy of the vote of the 20 nearest, in [0, 1]; None where there are no classes.
        probe: accuracy of a linear classifier by least squares, likewise.
    """

    spectrum: Float64[Tensor, " k"]
    effective_rank: float
    knn: float | None
    probe: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves:
    """Labelled rows in a half to learn from and a half to be tested on.

    Attributes:
        train: rows.
        test: rows.
        labels: of all rows, numbered without gaps; rows of neither half may hold anything.
        num_classes: how many there are.
        majority: accuracy of always saying the commonest class.
    """

    train: Int64[Tensor, " a"]
    test: Int64[Tensor, " b"]
    labels: Int64[Tensor, " n"]
    num_classes: int
    majority: float


def halves_of(labels: Int64[Tensor, " n"], *, seed: int) -> Halves | None:
    """The two halves of the rows whose label is not negative, drawn; None where they are too few or of one class.

    Args:
        labels: a class of each row.
        seed: decides what is drawn.
    """
    rows = (labels >= 0).nonzero().squeeze(1)
    drawn = rows[permutation(seed, FIXED_EPOCH, len(rows))]
    train, test = drawn[: len(rows) // 2], drawn[len(rows) // 2 :]
    if len(rows) < _FEWEST or len(labels[train].unique()) < 2:
        return None
    classes = labels[rows].unique()
    numbered = torch.searchsorted(classes, labels)
    return Halves(
        train=train,
        test=test,
        labels=numbered,
        num_classes=len(classes),
        majority=majority_share(numbered[train], numbered[test], num_classes=len(classes)),
    )


def measure_layer(features: Float[Tensor, "n D"], halves: Halves | None, *, device: torch.device) -> LayerStats:
    """The numbers of a layer's features.

    The penalty of the linear classifier is chosen by leave-one-out within the training half. These accuracies are of
    few images and of features of one kind: they compare layers, and no published figure.

    Args:
        features: one row an image.
        halves: of the rows; None: no accuracies.
        device: where neighbours are searched.

    Raises:
        UsageError: fewer than two rows.
        MAEError: features that are not finite, or a row of zeros.
    """
    if len(features) < 2:
        raise UsageError(f"{len(features)} feature vectors; expected two or more, give more images")
    spectrum = singular_spectrum(features)
    return LayerStats(
        spectrum=spectrum,
        effective_rank=effective_rank(spectrum),
        knn=None if halves is None else _knn(features, halves, device),
        probe=None if halves is None else _probe(features, halves),
    )


def _knn(features: Float[Tensor, "n D"], halves: Halves, device: torch.device) -> float:
    ranked = knn_rank(
        features[halves.train],
        halves.labels[halves.train],
        features[halves.test],
        ks=[_K],
        num_classes=halves.num_classes,
        device=device,
    )[_K]
    return top_k_accuracy(ranked[:, :1], halves.labels[halves.test])


def _probe(features: Float[Tensor, "n D"], halves: Halves) -> float:
    from sklearn.linear_model import RidgeClassifierCV  # here: scikit-learn takes long to import
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    (x, y), (test_x, test_y) = (
        (features[rows].double().numpy(), halves.labels[rows].numpy()) for rows in (halves.train, halves.test)
    )
    probe = make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=_PENALTIES))
    return float(probe.fit(x, y).score(test_x, test_y))
