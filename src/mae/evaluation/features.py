"""From images to one feature vector each: a model's, and the two that a model must beat."""

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from mae.errors import UsageError
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.zoo import build_model

Pooling = Literal["mean", "cls"]
"""Which of the encoder's outputs stands for the image.

`mean`, the mean of the patch tokens, is the default: the loss reaches every patch token, while it asks nothing of
the class token in particular (He et al. 2021, A.1, find both alike after training), and some models have none.
"""

Encode = Callable[[Tensor], Tensor]
"""Normalised images `[B, C, H, W]` to features `[B, D]`."""

_MAX_RAW_SIDE = 64
_RANDOM_SEED = 0


@torch.no_grad()
def extract(encode: Encode, batches: Iterable[Tensor]) -> Float[Tensor, "n D"]:
    """The features of all images in order, float32 on the CPU.

    Args:
        encode: normalised images to features.
        batches: normalised images `[B, C, H, W]`.

    Raises:
        UsageError: there is no batch.
    """
    features = [encode(images).float().cpu() for images in batches]
    if not features:
        raise UsageError("no images to make features of; give at least one batch")
    return torch.cat(features)


def model_features(model: MaskedAutoencoder, pooling: Pooling = "mean") -> Encode:
    """What a model's encoder says of whole images, computed in the model's device and type.

    Raises:
        UsageError: the class token is asked of a model without one.
    """
    if pooling == "cls" and model.encoder.num_prefix == 0:
        raise UsageError("pooling 'cls' needs a class token, and this model was built without one; use 'mean'")
    weights = next(model.parameters())

    def encode(images: Tensor) -> Tensor:
        features = model.encode(images.to(weights))
        return features.mean if features.cls is None or pooling == "mean" else features.cls

    return encode


def raw_pixels(images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B D"]:
    """The pixels themselves; a side above 64 pixels is averaged down to 64, or a data set would not fit in memory."""
    height, width = (min(side, _MAX_RAW_SIDE) for side in images.shape[2:])
    return adaptive_avg_pool2d(images.float(), (height, width)).flatten(1)


def random_weights(model: MaskedAutoencoder) -> MaskedAutoencoder:
    """The same architecture, never trained: fresh weights from a fixed seed, on the model's device, in its type.

    PyTorch's global generators are left as they were.

    Raises:
        UsageError: the model was put together by hand and holds no configuration to build it from.
    """
    if model.config is None:
        raise UsageError("the model holds no configuration, so none can be built like it; give it a 'config'")
    # Built on the CPU whatever the default device: its generator alone is then drawn from, and put back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(_RANDOM_SEED)
        fresh = build_model(model.config)
    return fresh.to(next(model.parameters())).eval()
