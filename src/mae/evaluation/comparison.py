"""k-NN accuracy of a model beside what it must beat: chance, the commonest class, raw pixels, random weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Int64
from torch import Tensor, bincount

from mae.errors import UsageError
from mae.evaluation.features import Encode, Pooling, extract, model_features, random_weights, raw_pixels
from mae.evaluation.knn import knn_accuracy
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.report.inference import undisturbed

BatchFactory = Callable[[], Iterator[Tensor]]
"""Starts over at each call: normalised images `[B, C, H, W]`, in the order of their labels."""


@dataclass(frozen=True, kw_only=True)
class KnnReport:
    """Top-1 shares in [0, 1]; a model that learned nothing is no better than the four below it.

    Attributes:
        accuracy: of the model's features.
        chance: of a guess among the classes.
        majority: of always saying the class commonest among the training samples.
        raw_pixels: of the pixels as features (`raw_pixels`).
        random_weights: of the same architecture with fresh weights (`random_weights`).
        k: how many neighbours voted.
        n_train: training samples.
        n_test: test samples.
    """

    accuracy: float
    chance: float
    majority: float
    raw_pixels: float
    random_weights: float
    k: int
    n_train: int
    n_test: int


def compare_knn(
    model: MaskedAutoencoder,
    train_batches_factory: BatchFactory,
    train_labels: Int64[Tensor, " n"],
    test_batches_factory: BatchFactory,
    test_labels: Int64[Tensor, " m"],
    *,
    num_classes: int,
    k: int = 20,
    pooling: Pooling = "mean",
) -> KnnReport:
    """Judge a model's frozen features by weighted k-NN, and its comparators by the same one.

    Deterministic for deterministic batches; the model's mode and PyTorch's generators are left as they were.

    Args:
        model: with the configuration it was built from.
        train_batches_factory: the images that vote; called once for each of the three features.
        train_labels: their classes in `[0, num_classes)`.
        test_batches_factory: the images that are classified, likewise.
        test_labels: their classes in `[0, num_classes)`.
        num_classes: number of classes.
        k: how many neighbours vote; at most all training samples do.
        pooling: which of the encoder's outputs is the feature.

    Raises:
        UsageError: images and labels differ in number, labels out of range, no samples, or a model without
            configuration or without the class token that is asked for.
        MAEError: features that are not finite.
    """
    _check_labels("training", train_labels, num_classes)
    _check_labels("test", test_labels, num_classes)

    def accuracy(encode: Encode) -> float:
        train = _features("training", encode, train_batches_factory, len(train_labels))
        test = _features("test", encode, test_batches_factory, len(test_labels))
        return knn_accuracy(train, train_labels, test, test_labels, ks=[k], num_classes=num_classes)[k]

    with undisturbed(model):  # around the batches too: a loader draws its seed from the global generator
        trained = accuracy(model_features(model, pooling))
        untrained = accuracy(model_features(random_weights(model), pooling))
        pixels = accuracy(raw_pixels)
    commonest = bincount(train_labels, minlength=num_classes).argmax()
    return KnnReport(
        accuracy=trained,
        chance=1 / num_classes,
        majority=float((test_labels == commonest).double().mean()),
        raw_pixels=pixels,
        random_weights=untrained,
        k=min(k, len(train_labels)),
        n_train=len(train_labels),
        n_test=len(test_labels),
    )


def _check_labels(which: str, labels: Int64[Tensor, " n"], num_classes: int) -> None:
    if len(labels) == 0:
        raise UsageError(f"no {which} samples; give at least one")
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UsageError(f"{which} labels lie between {lowest} and {highest}; expected 0 to {num_classes - 1}")


def _features(which: str, encode: Encode, batches: BatchFactory, expected: int) -> Tensor:
    features = extract(encode, batches())
    if len(features) != expected:
        raise UsageError(f"{len(features)} {which} images came with {expected} labels; each image needs one label")
    return features
