"""Protocols on labelled images: read, crop and normalise as the model was trained, then judge."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from mae.data.base import LabelledData, LabelledSplit
from mae.data.images import ImageSet, load_images
from mae.data.loaders import evaluation_batches, normalise
from mae.errors import UsageError
from mae.evaluation.comparison import KnnReport, compare_knn
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder

_BATCH_SIZE = 128


def knn_on(model: MaskedAutoencoder, labelled: LabelledData, *, k: int = 20) -> KnnReport:
    """Weighted k-NN of a trained model's mean tokens on labelled images, beside its comparators.

    Args:
        model: with a configuration that holds its channel statistics, as a run leaves it.
        labelled: images that vote and images that are judged.
        k: how many neighbours vote.

    Raises:
        UsageError: the model does not say how its images are normalised.
        MAEError: images that cannot be read.
    """
    config = model.config
    if config is None or config.mean is None or config.std is None:
        raise UsageError(
            "the model holds no channel statistics; use one that a run has trained, or set its mean and std"
        )
    (train, train_labels), (test, test_labels) = (_readable(part, config) for part in (labelled.train, labelled.test))
    return compare_knn(
        model,
        partial(_batches, train, config),
        train_labels,
        partial(_batches, test, config),
        test_labels,
        num_classes=len(labelled.class_names),
        k=k,
    )


def _readable(part: LabelledSplit, config: ModelConfig) -> tuple[ImageSet, Tensor]:
    """The images of a split that can be read, and their labels."""
    images = load_images(part.source, in_chans=config.in_chans)
    return images, part.labels[images.readable]


def _batches(images: ImageSet, config: ModelConfig) -> Iterator[Tensor]:
    mean, std = torch.tensor(config.mean), torch.tensor(config.std)
    for crops in evaluation_batches(images, img_size=config.img_size, batch_size=_BATCH_SIZE):
        yield normalise(crops, mean, std)
