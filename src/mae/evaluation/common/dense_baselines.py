"""What patch tokens must beat: those of random weights, and the pixels of the patches themselves."""

from dataclasses import replace
from math import isqrt

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mae.evaluation.extractors.extractor import PATCHES, Extractor, model_extractor, random_weights

_SIDE, _SHORTEST = 8, 2  # a patch's pixels are averaged down to this; one pixel alone would have no contrast
_VALUES = 1024
"""Of a patch that sides are shortened to, from 17 channels on: the covariance of those of 200 would take gigabytes."""


def dense_baselines(extractor: Extractor, grid: tuple[int, int]) -> list[Extractor]:
    """The same model with random weights (where it is ours), and the pixels, on the same images and patches.

    Args:
        extractor: the model.
        grid: rows and columns of its patches.
    """
    rows, columns = grid
    side = max(_SHORTEST, min(_SIDE, isqrt(_VALUES // extractor.preprocessing.in_chans)))

    def encode(images: Tensor) -> dict[str, Tensor]:
        inner = min(side, images.shape[2] // rows), min(side, images.shape[3] // columns)
        small = adaptive_avg_pool2d(images.float().nan_to_num(nan=0.0), (rows * inner[0], columns * inner[1]))
        patches = small.unflatten(2, (rows, inner[0])).unflatten(4, (columns, inner[1]))
        return {PATCHES: patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)}

    pixels = Extractor(
        name="raw pixels",
        encode=encode,
        preprocessing=extractor.preprocessing,
        identity=f"pixels of {rows} x {columns} patches, sides up to {side}",
    )
    if extractor.model is None:
        return [pixels]
    fresh = model_extractor(random_weights(extractor.model), name="random weights")
    return [replace(fresh, preprocessing=extractor.preprocessing), pixels]
