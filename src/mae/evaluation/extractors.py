"""What turns images into features: a model of this package, its comparators, or anybody's function.

Every protocol works on an `Extractor`, so that a masked autoencoder can be set beside any other model on the same
images by the same code. Those of timm and Hugging Face are in `foreign.py`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from mae.errors import UsageError
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.storage import load_with_report
from mae.models.zoo import build_pretrained_encoder
from mae.records import PixelDtype
from mae.report.canvas import visible
from mae.training.run_folder import find_weights

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
        no_data: the value in the files that stands for no measurement, a number or `nan`, and is NaN in the images;
            None: every value is one.
        pixel_dtype: type of the pixels in the files the model was trained on, to whose unit others are brought; see
            `ModelConfig.pixel_dtype`.
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
    no_data: str | None = None
    pixel_dtype: PixelDtype | None = None

    @property
    def reading(self) -> Reading:
        """Channels, their names, what stands for no data, and the unit."""
        return self.in_chans, self.channels, self.no_data, self.pixel_dtype


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
        found = self.encode(images)
        if isinstance(found, Tensor):
            return {"features": found}
        if not isinstance(found, Mapping):
            raise UsageError(
                f"{self.name} gives {type(found).__name__}; expected a tensor, or a dict of tensors by name"
            )
        for name in found:
            if not isinstance(name, str) or not _FEATURE_NAME.fullmatch(name):  # it becomes a file's
                raise UsageError(f"{self.name} calls a feature {name!r}; expected letters, digits, _, + and - alone")
        return found


def open_extractor(spec: Any, *, device: torch.device) -> Extractor:
    """The extractor that a user means.

    Args:
        spec: a run folder, a checkpoint or a `.safetensors` file; `timm:NAME`; `hf:NAME_OR_PATH`; a
            `MaskedAutoencoder` or `PretrainedEncoder`; an `Extractor`.
        device: where it computes.

    Raises:
        UsageError: nothing of that name, a package that is not installed, or a model that does not say how its
            images are normalised.
        MAEError: a damaged file.
    """
    if isinstance(spec, Extractor):
        if isinstance(spec.encode, nn.Module) and spec.encode.training:
            raise UsageError(f"{spec.name} is in training mode, so its features depend on chance; call .eval() on it")
        return spec
    if isinstance(spec, PretrainedEncoder):
        # A copy: the caller's model keeps its device and mode, and may be trained further meanwhile.
        return model_extractor(deepcopy(spec).to(device), name="model")
    if not isinstance(spec, (str, Path)):
        raise UsageError(
            f"the model is {type(spec).__name__}; expected a run folder, a .safetensors file, timm:NAME, hf:NAME, a "
            "MaskedAutoencoder, or a function put into mae.Extractor(name=…, encode=…, preprocessing=…)"
        )
    kind, _, name = str(spec).partition(":")
    if kind in ("timm", "hf") and name:
        from mae.evaluation import foreign  # imports nothing heavy itself, but is rarely needed

        return foreign.timm_extractor(name, device=device) if kind == "timm" else foreign.hf_extractor(name, device)
    model, report = load_with_report(find_weights(Path(spec)))
    extractor = model_extractor(model.to(device), name=str(spec))
    return replace(extractor, loaded=report.line(), licence=report.origin.get("licence"))


def show_loaded(console: Console, loaded: str | None) -> None:
    """What was loaded of a model's file, if it was one, as one line."""
    if loaded is not None:
        console.print(visible(loaded), highlight=False, soft_wrap=True, markup=False)


def model_extractor(model: PretrainedEncoder, *, name: str) -> Extractor:
    """`cls` (where there is one), `mean` and `patches` of a model of this package, nothing hidden.

    The model is put into evaluation mode.

    Raises:
        UsageError: the model does not say how its images are normalised.
    """
    config = model.config
    if config is None or config.mean is None or config.std is None:
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
            img_size=config.img_size,
            in_chans=config.in_chans,
            mean=config.mean,
            std=config.std,
            crop_share=0.875 if max(config.img_size) <= 224 else 1.0,  # the official rule
            channels=config.channels,
            no_data=config.no_data,
            pixel_dtype=config.pixel_dtype,
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


def comparators(extractor: Extractor) -> list[Extractor]:
    """What a model's features must beat: the same architecture never trained (where it is ours), and the pixels."""
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
