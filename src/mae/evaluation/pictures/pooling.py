"""Where a learned pooling looks."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mae.data.dataset.images import ImageSet
from mae.evaluation.extractors.batches import normalised_batches
from mae.models.inference import undisturbed
from mae.models.preprocess import Preprocessing
from mae.report.figures.heat import draw_heat
from mae.report.figures.tones import rgb_channels

if TYPE_CHECKING:
    from mae.models.classifier import PooledProbe

_SHOWN = 8


def draw_pooling(images: ImageSet, classifier: "PooledProbe", wanted: Preprocessing, *, title: str, path: Path) -> None:
    """Write some test images, and how much each of their patches counts in a learned pooling, as one PNG.

    Args:
        images: the test images.
        classifier: pools their patch tokens.
        wanted: how images are cropped and normalised for it.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    readable = images.readable
    numbers = readable[torch.linspace(0, len(readable) - 1, min(_SHOWN, len(readable))).round().long()]
    weights = next(classifier.parameters())
    crops = next(normalised_batches(images, wanted, device=weights.device, numbers=numbers))
    with undisturbed(classifier):
        features = classifier.encode(crops.to(weights))
        counts = classifier.pooling.weights(features.patches).float().cpu()
    draw_heat(
        crops.cpu(),
        counts.unflatten(1, features.grid),
        mean=wanted.mean,
        std=wanted.std,
        rgb=rgb_channels(images.channel_names),
        notes=[[name] for name in images.short_names(numbers.tolist())],
        title=title,
        path=path,
    )
