"""What turns images into features: a model of this package, its baselines, or anybody's function.

Every protocol works on an `Extractor`, so that a masked autoencoder can be set beside any other model on the same
images by the same code. `open.py` makes one of what a user names, `external_models.py` those of timm and Hugging Face.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isqrt

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from mae.errors import UsageError
from mae.models.build import build_pretrained_encoder
from mae.models.classifier import Classifier
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.preprocess import Preprocessing, preprocessing_of
from mae.models.pretrained import PretrainedEncoder
from mae.text import visible

PATCHES = "patches"
"""The name under which an extractor gives its patch tokens `[B, N, D]`; every other name stands for `[B, D]`."""
LEARNED = "learned"
"""The name of what a model learned to make of its patch tokens, `[B, D]`."""

Encode = Callable[[Tensor], Tensor | Mapping[str, Tensor]]
"""Normalised images `[B, C, H, W]` to features `[B, D]`, or to several by name, `patches` among them if there are."""

Maps = Callable[[Tensor, Sequence[int]], Sequence[Tensor]]
"""Normalised images and numbers of blocks, ascending from 0, to their patch tokens as maps `[B, D, rows, columns]`."""

_MAX_RAW_SIDE = 32
_MAX_RAW_VALUES = 4 * _MAX_RAW_SIDE**2
"""Of an image; a probe's covariance of the pixels of 200 channels would take 300 GB at the full side."""
_RANDOM_SEED = 0
_FEATURE_NAME = re.compile(r"[A-Za-z0-9_+-]+")


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """What a model's blocks give, on the grid of its patches.

    Attributes:
        depth: how many blocks there are.
        maps: what leaves some of them; the last one after the final norm, as under `PATCHES`.
    """

    depth: int
    maps: Maps


@dataclass(frozen=True, kw_only=True, eq=False)
class Extractor:
    """A frozen model as the protocols see it.

    Attributes:
        name: what the user calls it.
        encode: normalised images on any device to named features; must not depend on the other images of a batch.
        preprocessing: how its images are made.
        identity: text that changes with the weights, so that stored features are never those of another model;
            None where it is not known, and then nothing is stored.
        model: the model itself, for what needs more than features; None where it is none of this package.
        loaded: what was loaded of its file, in one line; None where it comes from no file of this package.
        licence: the terms its weights come under; None: not known.
        blocks: what its blocks give; None where it has no patch tokens, or nobody says which they are.
    """

    name: str
    encode: Encode
    preprocessing: Preprocessing
    identity: str | None = None
    model: PretrainedEncoder | None = None
    loaded: str | None = None
    licence: str | None = None
    blocks: Blocks | None = None

    @property
    def autoencoder(self) -> MaskedAutoencoder | None:
        """The model itself where it has a decoder."""
        return self.model if isinstance(self.model, MaskedAutoencoder) else None

    @torch.no_grad()
    def named(self, images: Tensor) -> Mapping[str, Tensor]:
        """The features of normalised images by name; those of a function that gives one tensor are `features`.

        Raises:
            UsageError: `encode` gave neither a tensor nor tensors by name.
        """
        features = self.encode(images)
        if isinstance(features, Tensor):
            return {"features": features}
        if not isinstance(features, Mapping):
            raise UsageError(
                f"{self.name} gives {type(features).__name__}; expected a tensor, or a dict of tensors by name"
            )
        for name in features:
            if not isinstance(name, str) or not _FEATURE_NAME.fullmatch(name):  # it becomes a file's
                raise UsageError(f"{self.name} calls a feature {name!r}; expected letters, digits, _, + and - alone")
        return features


def show_loaded(console: Console, loaded: str | None) -> None:
    """What was loaded of a model's file, if it was one, as one line."""
    if loaded is not None:
        console.print(visible(loaded), highlight=False, soft_wrap=True, markup=False)


def model_extractor(model: PretrainedEncoder, *, name: str) -> Extractor:
    """What a model of this package says of whole images: `cls` (where there is one), `mean`, `patches`.

    A classifier that pools patch tokens by what it learned gives that vector too, as `learned`.

    The model is put into evaluation mode.

    Raises:
        UsageError: the model does not say how its images are normalised.
    """
    preprocessing = preprocessing_of(model.config)
    assert model.config is not None  # else it would have none
    weights = next(model.parameters())
    pooling = model.pooling if isinstance(model, Classifier) else None

    def encode(images: Tensor) -> Mapping[str, Tensor]:
        features = model.encode(images.to(weights))
        named = {"mean": features.mean, PATCHES: features.patches}
        if pooling is not None:
            named = {LEARNED: pooling(features.patches), **named}
        return named if features.cls is None else {"cls": features.cls, **named}

    depth = len(model.encoder.blocks)

    def maps(images: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        inner = [number for number in numbers if number < depth - 1]
        features = model.encode(images.to(weights), layers=inner, as_map=True)
        last = [features.patches.mT.unflatten(2, features.grid)] if depth - 1 in numbers else []
        return [*features.layers, *last]

    return Extractor(
        name=name,
        encode=encode,
        preprocessing=preprocessing,
        identity=f"{weights_digest(model)} {json.dumps(model.config.to_json(), sort_keys=True)}",
        model=model.eval(),
        blocks=Blocks(depth=depth, maps=maps),
    )


def random_weights(model: PretrainedEncoder, seed: int = _RANDOM_SEED) -> PretrainedEncoder:
    """The same encoder, never trained: fresh weights from a seed, on the model's device, in its type.

    PyTorch's global generators are left as they were.

    Raises:
        UsageError: the model was put together by hand and holds no configuration to build it from.
    """
    if model.config is None:
        raise UsageError("the model holds no configuration, so none can be built like it; give it a 'config'")
    # Built on the CPU whatever the default device: its generator alone is then drawn from, and put back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        fresh = build_pretrained_encoder(model.config)
    return fresh.to(next(model.parameters())).eval()


def baseline_extractors(extractor: Extractor) -> list[Extractor]:
    """What features must beat: those of the same model with random weights (where it is ours), and the pixels."""
    pixels = Extractor(
        name="raw pixels",
        encode=lambda images: {"pixels": raw_pixels(images)},
        preprocessing=extractor.preprocessing,
        identity=f"pixels, sides up to {_raw_side(extractor.preprocessing.in_chans)}",
    )
    if extractor.model is None:
        return [pixels]
    return [model_extractor(random_weights(extractor.model), name="random weights"), pixels]


def raw_pixels(images: Tensor) -> Tensor:
    """The pixels `[B, D]`; a side above 32 pixels is averaged down to 32, as in "tiny images"; no data counts as 0.

    Of more than four channels sides are shorter, so that there are no more values than four have.
    """
    height, width = (min(side, _raw_side(images.shape[1])) for side in images.shape[2:])
    return adaptive_avg_pool2d(images.float().nan_to_num(nan=0.0), (height, width)).flatten(1)


def _raw_side(channels: int) -> int:
    return max(1, min(_MAX_RAW_SIDE, isqrt(_MAX_RAW_VALUES // channels)))


def weights_digest(module: nn.Module) -> str:
    """16 hexadecimal digits of a module's weights and buffers, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def preprocessing_text(preprocessing: Preprocessing) -> str:
    """The preprocessing as text, for the key of stored features."""
    return repr(sorted(asdict(preprocessing).items()))
