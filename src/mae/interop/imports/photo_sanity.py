"""Check that a masked autoencoder predicts photos, and with which target: correctly imported weights do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from mae.core.contracts import Batch
from mae.core.method import MethodConfig
from mae.core.types import MaskPlan, MaskRequest
from mae.data.sources.builtin import photo_tiles
from mae.evaluation.common.baselines import measure_baselines
from mae.layers.attention import Attention
from mae.losses.reconstruction import MeanSquaredError
from mae.masks.random import RandomMasking
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.targets.pixels import PixelTarget

_EVERY = 96
"""Every so many tiles of builtin:photos are used; it has 256 of each of eight photos."""

_SEED = 0
_MAX_TOKENS = 1024

_CLEARLY = 0.995
"""Relative error below which a rearrangement counts as better. For 41 checkpoints trained for 3 minutes to 2 hours on
photos, every rearrangement raised the error by 1.1 % or more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Photos:
    """Normalised photos with a mask, and the error of their mean visible colour for each kind of target."""

    batch: Batch
    plan: MaskPlan
    targets: Mapping[bool, PixelTarget]
    baselines: Mapping[bool, float]

    def relative_error(self, model: MaskedAutoencoder, kind: bool) -> float:
        """The squared error of a model's prediction relative to that of the mean visible colour."""
        with torch.no_grad():
            prediction = model(self.batch.x, plan=self.plan).prediction
        error = MeanSquaredError()(prediction, self.targets[kind](self.batch, self.plan.predicted), None)
        return float(error) / self.baselines[kind]


def _photos(config: MethodConfig) -> _Photos:
    assert config.tokenizer.mean is not None and config.tokenizer.std is not None
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (config.tokenizer.mean, config.tokenizer.std))
    photos = photo_tiles()
    numbers = range(0, len(photos), _EVERY)
    images = (torch.cat([_cropped(photos.read(number), config.tokenizer.img_size) for number in numbers]) - mean) / std
    keys = sample_keys(_SEED, FIXED_EPOCH, torch.tensor(numbers))
    plan = RandomMasking(ratio=config.mask.ratio).plan(MaskRequest(layout=config.layout, keys=keys))
    targets, tokenizer = {kind: PixelTarget(norm=kind) for kind in (True, False)}, config.tokenizer
    baselines = {
        kind: measure_baselines(target, tokenizer, [(images, plan)], loss=MeanSquaredError()).mean_of_visible
        for kind, target in targets.items()
    }
    batch = Batch(x=images, tokenizer=tokenizer)
    return _Photos(batch=batch, plan=plan, targets=targets, baselines=baselines)


def accepts_photos(config: MethodConfig) -> bool:
    """Whether a model's images can be photos, of a size that takes seconds at most."""
    in_unit = config.tokenizer.mean is not None and config.tokenizer.pixel_dtype != "float32"
    return config.layout.channels == 3 and in_unit and config.layout.num_tokens <= _MAX_TOKENS


def photo_errors(model: MaskedAutoencoder) -> dict[bool, float]:
    """The squared error on masked patches relative to that of the mean visible colour, for both kinds of target.

    Below 1 the model beats the mean colour.

    Args:
        model: of three channels, with their statistics, in evaluation mode.

    Returns:
        By whether the target is per-patch normalised.
    """
    assert model.config is not None
    photos = _photos(model.config)
    return {kind: photos.relative_error(model, kind) for kind in (True, False)}


def better_arrangement(model: MaskedAutoencoder, *, norm_pix: bool) -> str | None:
    """A rearrangement of the weights with which the model predicts photos clearly better.

    Correctly imported weights have none. Tries every order of queries, keys and values, and positions with rows and
    columns exchanged, in encoder and decoder separately. A wrong number of heads is not found this way: some good
    models do as well with half as many.

    Args:
        model: see `photo_errors`; the same after the call.
        norm_pix: whether its target is per-patch normalised.

    Returns:
        A description of the best rearrangement; None if none is better.
    """
    assert model.config is not None
    photos = _photos(model.config)
    best, least = None, _CLEARLY * photos.relative_error(model, norm_pix)
    for words, changed in _arrangements(model):
        with changed:
            error = photos.relative_error(model, norm_pix)
        if error < least:
            best, least = f"{words} ({error:.2f})", error
    return best


def _arrangements(model: MaskedAutoencoder) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    for name, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        layers = [layer for layer in part.modules() if isinstance(layer, Attention)]
        for order in list(permutations(range(3)))[1:]:
            letters = ", ".join("qkv"[number] for number in order)
            yield f"queries, keys and values of its {name} in the order {letters}", _reordered(layers, order)
        table = part.pos_embed.table
        assert isinstance(table, Tensor)
        yield f"rows and columns of its {name}'s position embedding exchanged", _exchanged(table)


@contextmanager
def _reordered(layers: Sequence[Attention], order: Sequence[int]) -> Iterator[None]:
    def put(order: Sequence[int]) -> None:
        for layer in layers:
            for tensor in (layer.qkv.weight, layer.qkv.bias):
                parts = tensor.data.chunk(3)
                tensor.data = torch.cat([parts[number] for number in order])

    put(order)
    try:
        yield
    finally:
        put([list(order).index(number) for number in range(3)])


@contextmanager
def _exchanged(table: Tensor) -> Iterator[None]:
    before = table.data.clone()
    table.data.copy_(before.roll(table.shape[1] // 2, dims=1))
    try:
        yield
    finally:
        table.data.copy_(before)


def _cropped(square: np.ndarray, size: tuple[int, int]) -> Float[Tensor, "1 3 H W"]:
    """A square image at this size, values in [0, 1]; cropped centrally where the size is not square."""
    pixels = torch.from_numpy(square).permute(2, 0, 1).unsqueeze(0).float() / 255
    scaled = interpolate(pixels, size=(max(size), max(size)), mode="bilinear", antialias=True)
    top, left = ((max(size) - side) // 2 for side in size)
    return scaled[..., top : top + size[0], left : left + size[1]].clamp(0, 1)
