"""What turns images into features: a model of this package, its baselines, or anybody's function.

Every protocol works on an `Extractor`, so that a masked autoencoder can be set beside any other model on the same
images by the same code. `open.py` makes one of what a user names, `external_models.py` those of timm and Hugging Face.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from mae.errors import UsageError
from mae.models.build import build_pretrained_encoder
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.records import PixelDtype
from mae.text import visible

PATCHES = "patches"
"""The name under which an extractor gives its patch tokens `[B, N, D]`; every other name stands for `[B, D]`."""

Encode = Callable[[Tensor], Tensor | Mapping[str, Tensor]]
"""Normalised images `[B, C, H, W]` to features `[B, D]`, or to several by name, `patches` among them if there are."""

Reading = tuple[int, tuple[str, ...] | None, str | None, PixelDtype | None]
"""What must be the same for decoded images to serve two extractors: channels, their names, no data, unit."""

_MAX_RAW_SIDE = 32
_RANDOM_SEED = 0
_FEATURE_NAME = re.compile(r"[A-Za-z0-9_+-]+")


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What is done to an image before an extractor sees it.

    Attributes:
        img_size: height and width it is cropped to.
        in_chans: channels it must have.
        channels: which ones by name, in order; None, or images whose channels have no names: those it has, as they lie.
        nodata: the value in the files that stands for no measurement, a number or `nan`, and is NaN in the images;
            None: every value is one.
        pixel_dtype: type of the pixels in the files the model was trained on, to whose unit others are brought; see
            `MethodConfig.pixel_dtype`.
        mean: subtracted from each channel, in that unit; with `std` 0 and 1 it says nothing of the images.
        std: what each channel is then divided by.
        crop_share: side of the central crop over the side of the resized image; an image that already has the
            size is not touched.
        interpolation: `bicubic` or `bilinear`.
    """

    img_size: tuple[int, int]
    in_chans: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    crop_share: float = 0.875
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    channels: tuple[str, ...] | None = None
    nodata: str | None = None
    pixel_dtype: PixelDtype | None = None

    @property
    def reading(self) -> Reading:
        """Channels, their names, what stands for no data, and the unit."""
        return self.in_chans, self.channels, self.nodata, self.pixel_dtype


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
    """

    name: str
    encode: Encode
    preprocessing: Preprocessing
    identity: str | None = None
    model: PretrainedEncoder | None = None
    loaded: str | None = None
    licence: str | None = None

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
    """`cls` (where there is one), `mean` and `patches` of a model of this package, nothing masked.

    The model is put into evaluation mode.

    Raises:
        UsageError: the model does not say how its images are normalised.
    """
    config = model.config
    if config is None or config.tokenizer.mean is None or config.tokenizer.std is None:
        raise UsageError(
            "the model holds no channel statistics; use one that a run has trained, or set its mean and std"
        )
    weights = next(model.parameters())

    def encode(images: Tensor) -> Mapping[str, Tensor]:
        features = model.encode(images.to(weights))
        named = {"mean": features.mean, PATCHES: features.patches}
        return named if features.cls is None else {"cls": features.cls, **named}

    return Extractor(
        name=name,
        encode=encode,
        preprocessing=Preprocessing(
            img_size=config.tokenizer.img_size,
            in_chans=config.layout.channels,
            mean=config.tokenizer.mean,
            std=config.tokenizer.std,
            crop_share=0.875 if max(config.layout.size) <= 224 else 1.0,  # the official rule
            channels=config.tokenizer.channels,
            nodata=config.tokenizer.nodata,
            pixel_dtype=config.tokenizer.pixel_dtype,
        ),
        identity=f"{weights_digest(model)} {json.dumps(config.to_json(), sort_keys=True)}",
        model=model.eval(),
    )


def random_weights(model: PretrainedEncoder) -> PretrainedEncoder:
    """The same encoder, never trained: fresh weights from a fixed seed, on the model's device, in its type.

    PyTorch's global generators are left as they were.

    Raises:
        UsageError: the model was put together by hand and holds no configuration to build it from.
    """
    if model.config is None:
        raise UsageError("the model holds no configuration, so none can be built like it; give it a 'config'")
    # Built on the CPU whatever the default device: its generator alone is then drawn from, and put back.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(_RANDOM_SEED)
        fresh = build_pretrained_encoder(model.config)
    return fresh.to(next(model.parameters())).eval()


def baseline_extractors(extractor: Extractor) -> list[Extractor]:
    """What features must beat: those of the same model with random weights (where it is ours), and the pixels."""
    pixels = Extractor(
        name="raw pixels",
        encode=lambda images: {"pixels": raw_pixels(images)},
        preprocessing=extractor.preprocessing,
        identity=f"pixels, sides up to {_MAX_RAW_SIDE}",
    )
    if extractor.model is None:
        return [pixels]
    return [model_extractor(random_weights(extractor.model), name="random weights"), pixels]


def raw_pixels(images: Tensor) -> Tensor:
    """The pixels `[B, D]`; a side above 32 pixels is averaged down to 32, as in "tiny images"; no data counts as 0."""
    height, width = (min(side, _MAX_RAW_SIDE) for side in images.shape[2:])
    return adaptive_avg_pool2d(images.float().nan_to_num(nan=0.0), (height, width)).flatten(1)


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
