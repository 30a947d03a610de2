"""What a model answers to one fixed image, in a few numbers: weights and code that give them back are the right ones.

Names, shapes and types of tensors tell nothing of zeroed biases, swapped queries and keys or another number of heads;
the answer does. It is computed in float64 on the CPU, from weights that were stored exactly: what machines and threads
then differ by is far below the least fault worth finding, which float32 would hide (the tests hold both numbers).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf, isfinite, prod
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.func import functional_call

from mae.core.method import MethodConfig
from mae.core.types import Grid, MaskRequest
from mae.errors import UsageError
from mae.masks.random import RandomMasking
from mae.models.classifier import Classifier
from mae.models.detector import Detector
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.segmenter import Segmenter
from mae.randomness import FIXED_EPOCH, Stream, sample_keys, uniform

NUM_ANSWERS = 16
TOLERANCE = 3e-8
"""How far answers may lie apart, relative to the largest. Other vector instructions, threads or kernels make 1e-14, one
number of a position table that another system's sine rounds the other way up to 1e-8; one weight of a fresh ViT-Base
moved by 0.01 makes 4e-7 or more."""

_MAX_SIDE = 8  # of the grid, where positions can be computed for any: what a probe costs stays small
_MAX_TOKENS, _MAX_VALUES = 1024, 1 << 24  # of an image: no file's header can make loading it hang


@dataclass(frozen=True, kw_only=True)
class OutputFingerprint:
    """A model's answer to the image that its configuration makes.

    Attributes:
        image_sha256: of the image's float32 bytes, in hexadecimal.
        features: 16 numbers made of the encoder's mean feature of the whole image.
        prediction: 16 numbers made of what the decoder predicts for the hidden half of its patches, or of a
            classifier's, segmenter's or detector's scores; None of an encoder alone.

    Raises:
        UsageError: another count of numbers, or some that are not finite.
    """

    image_sha256: str
    features: tuple[float, ...]
    prediction: tuple[float, ...] | None

    def __post_init__(self) -> None:
        for name in ("features", "prediction"):
            if (values := getattr(self, name)) is None:
                continue
            if len(values) != NUM_ANSWERS or not all(isfinite(value) for value in values):
                raise UsageError(f"{name} of the probe are {values}; expected {NUM_ANSWERS} finite numbers")

    def difference(self, other: "OutputFingerprint") -> float:
        """The largest difference of two answers to the same image, relative to the largest number of this one."""
        if self.prediction is None or other.prediction is None:
            same_kind = self.prediction is None and other.prediction is None
            return _relative_difference(self.features, other.features) if same_kind else inf
        pairs = ((self.features, other.features), (self.prediction, other.prediction))
        return max(_relative_difference(expected, found) for expected, found in pairs)


def _relative_difference(expected: tuple[float, ...], found: tuple[float, ...]) -> float:
    largest = max(abs(value) for value in expected) or 1.0
    return max(abs(a - b) for a, b in zip(expected, found, strict=True)) / largest


def config_of_file(config: MethodConfig) -> MethodConfig:
    """A configuration as a model's file has it: of a path its last part alone, for files are published."""
    teacher = config.teacher
    if teacher is not None and teacher.opens and Path(teacher.source).is_absolute():
        return replace(config, teacher=replace(teacher, source=Path(teacher.source).name))
    return config


def output_fingerprint(
    model: PretrainedEncoder, *, described: Mapping[str, Any] | None = None
) -> OutputFingerprint | None:
    """The answer of a model as its weights are now; the model, its device and its mode stay as they are.

    The image, its mask and the signs below are pure functions of the configuration as text, so another number of heads
    or another mask ratio is another image. It has the model's own grid if its positions are learned, else at most 8x8
    patches, and values in [-1, 1). Every number of the mean feature and of the prediction enters one of the 16
    answers, with a sign drawn for it: a pick of 16 would not see most weights of the last layers.

    Args:
        model: a model made by `create_model` or `build_model`, an encoder alone, or a classifier.
        described: its configuration as a file has it, which may be older than some of the options; None: as it is now.

    Returns:
        None where no probe can be made: its answer is not finite, or its image would have more than 2**24 values or,
        with learned positions, more than 1024 patches.
    """
    config = model.config
    if config is None:
        raise ValueError("this model was put together by hand and has no configuration to probe; use build_model")
    grid = _probed_grid(config)
    size = [side * patch for side, patch in zip(grid, config.layout.patch, strict=True)]
    if prod(grid) > _MAX_TOKENS or prod(size) * config.layout.channels > _MAX_VALUES:
        return None
    text = json.dumps(config_of_file(config).to_json() if described is None else described, sort_keys=True)
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1  # below 2**63
    keys = sample_keys(seed, FIXED_EPOCH, torch.arange(4))  # one for each use, so that one stream does
    image = (2 * uniform(keys[:1], config.layout.channels * prod(size), Stream.FORWARD) - 1).reshape(
        1, config.layout.channels, *size
    )
    features, prediction = _answer(model, image, keys[1:2])
    answers = _condense(features, keys[2:3]), None if prediction is None else _condense(prediction, keys[3:])
    if not all(isfinite(value) for part in answers if part is not None for value in part):
        return None
    digest = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return OutputFingerprint(image_sha256=digest, features=answers[0], prediction=answers[1])


def _probed_grid(config: MethodConfig) -> Grid:
    rows, columns = config.layout.grid
    return (rows, columns) if config.encoder.pos_embed == "learned" else (min(rows, _MAX_SIDE), min(columns, _MAX_SIDE))


def _answer(
    model: PretrainedEncoder, image: Float[Tensor, "1 C H W"], key: Int64[Tensor, " 1"]
) -> tuple[Float[Tensor, "1 D"], Float[Tensor, "1 ..."] | None]:
    """Mean feature of the whole image, and the prediction of its hidden half, or of its class, where there is one."""
    encoder = model.encoder
    assert model.config is not None
    layout = model.config.tokenizer.layout_of(image)
    # Leaves something of any grid, and owes nothing to the model's.
    plan = RandomMasking(ratio=0.5).plan(MaskRequest(layout=layout, keys=key))
    image = image.double()  # which autocast leaves alone
    with torch.no_grad(), _evaluating(model):
        if isinstance(model, Classifier | Segmenter | Detector):
            whole = _Whole(model)
            return functional_call(whole, _doubles(whole), (image,))
        weights = _doubles(encoder)
        whole = functional_call(encoder, weights, (image,))
        mean = whole.tokens[:, whole.num_prefix :].mean(dim=1)
        if not isinstance(model, MaskedAutoencoder):
            return mean, None
        encoded = functional_call(encoder, weights, (image, plan), {"levels": model.reads_levels})
        del weights  # before the decoder's are made
        return mean, functional_call(model.decoder, _doubles(model.decoder), (encoded, plan, layout))


class _Whole(nn.Module):
    """A model with a head, called for its answer."""

    def __init__(self, model: Classifier | Segmenter | Detector) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Float[Tensor, "1 C H W"]) -> tuple[Float[Tensor, "1 D"], Float[Tensor, "1 K *map"]]:
        return self.model.answer(image)


def _doubles(part: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
    # To the CPU first: Apple's GPUs know no float64.
    return {name: tensor.detach().cpu().double() for name, tensor in tensors.items()}


@contextmanager
def _evaluating(part: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in part.modules()]
    part.eval()
    try:
        yield
    finally:
        for module, training in modes:  # one by one: a frozen part may have its own mode
            module.training = training


def _condense(values: Float[Tensor, "..."], key: Int64[Tensor, " 1"]) -> tuple[float, ...]:
    """Sums over 16 stretches of the values, each value with its own sign; those without any are 0."""
    flat = values.flatten()
    signed = torch.where(uniform(key, len(flat), Stream.FORWARD)[0] < 0.5, -flat, flat)
    return tuple(float(stretch.sum()) for stretch in signed.tensor_split(NUM_ANSWERS))
