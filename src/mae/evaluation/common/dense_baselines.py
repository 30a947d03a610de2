"""What patch tokens must beat: those of random weights, and the pixels of the patches themselves."""

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mae.errors import UsageError
from mae.evaluation.common.dense import grid_of
from mae.evaluation.extractors.extractor import PATCHES, Extractor, model_extractor, random_weights

_SIDE = 8  # a patch's pixels are averaged down to this


def dense_baselines(extractor: Extractor) -> list[Extractor]:
    """The same model with random weights (where it is ours), and the pixels, on the same images and patches."""

    def encode(images: Tensor) -> dict[str, Tensor]:
        tokens = extractor.named(images[:1]).get(PATCHES)
        if tokens is None:
            raise UsageError(f"{extractor.name} gives no patch tokens; this protocol needs them")
        rows, columns = grid_of(tokens.shape[1], (images.shape[2], images.shape[3]))
        inner = min(_SIDE, images.shape[2] // rows), min(_SIDE, images.shape[3] // columns)
        small = adaptive_avg_pool2d(images.float().nan_to_num(nan=0.0), (rows * inner[0], columns * inner[1]))
        patches = small.unflatten(2, (rows, inner[0])).unflatten(4, (columns, inner[1]))
        return {PATCHES: patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)}

    pixels = Extractor(
        name="raw pixels",
        encode=encode,
        preprocessing=extractor.preprocessing,
        identity=None if extractor.identity is None else f"pixels of the patches of {extractor.identity}",
    )
    if extractor.model is None:
        return [pixels]
    fresh = model_extractor(random_weights(extractor.model), name="random weights")
    return [replace(fresh, preprocessing=extractor.preprocessing), pixels]
