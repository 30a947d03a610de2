"""Whether a masked autoencoder predicts photographs at all, and as what: trained weights that came in whole do."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from mae.data.builtin import photo_tiles
from mae.evaluation.yardsticks import measure_yardsticks
from mae.layers.attention import Attention
from mae.losses.reconstruction import MeanSquaredError
from mae.masking.random import RandomMasking
from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.targets.pixels import PixelTarget
from mae.types import MaskPlan

_EVERY = 96
"""Of the squares of builtin:photos, which are 256 of each of eight photographs."""

_SEED = 0
_MOST_TOKENS = 1024

_CLEARLY = 0.995
"""Of the error. Over 41 checkpoints of models that were trained for 3 minutes to 2 hours and predict photographs, the
least that another arrangement cost was 1.1 %."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Photographs:
    """Normalised photographs with what is hidden, and what their mean visible colour reaches, by kind of target."""

    images: Tensor
    plan: MaskPlan
    targets: Mapping[bool, PixelTarget]
    yardsticks: Mapping[bool, float]

    def share(self, model: MaskedAutoencoder, kind: bool) -> float:
        """The squared error of a model's prediction over that of the mean visible colour."""
        with torch.no_grad():
            prediction = model(self.images, plan=self.plan).prediction
        error = MeanSquaredError()(prediction, self.targets[kind](self.images, self.plan.predicted), None)
        return float(error) / self.yardsticks[kind]


def _photographs(config: ModelConfig) -> _Photographs:
    assert config.mean is not None and config.std is not None
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (config.mean, config.std))
    photos = photo_tiles()
    numbers = range(0, len(photos), _EVERY)
    images = (torch.cat([_cropped(photos.load(number), config.img_size) for number in numbers]) - mean) / std
    plan = RandomMasking(ratio=config.mask_ratio).plan(
        config.grid, sample_keys(_SEED, FIXED_EPOCH, torch.tensor(numbers))
    )
    targets = {kind: PixelTarget(patch_size=config.patch_size, norm_pix=kind) for kind in (True, False)}
    yardsticks = {
        kind: measure_yardsticks(target, [(images, plan)], config.patch_size, loss=MeanSquaredError()).mean_of_visible
        for kind, target in targets.items()
    }
    return _Photographs(images=images, plan=plan, targets=targets, yardsticks=yardsticks)


def shows_photographs(config: ModelConfig) -> bool:
    """Whether a model's images can be photographs, of a size that takes no more than seconds."""
    in_unit = config.mean is not None and config.pixel_dtype != "float32"
    return config.in_chans == 3 and in_unit and config.num_tokens <= _MOST_TOKENS


def photograph_shares(model: MaskedAutoencoder) -> dict[bool, float]:
    """The squared error of what is predicted for hidden patches over that of the mean visible colour.

    Below 1 the prediction is worth something. It is judged as both targets that a model may have been trained to.

    Args:
        model: of three channels, with their statistics, in evaluation mode.

    Returns:
        For a target that standardises each patch (True), and for plain pixels (False).
    """
    assert model.config is not None
    photographs = _photographs(model.config)
    return {kind: photographs.share(model, kind) for kind in (True, False)}


def better_arrangement(model: MaskedAutoencoder, *, norm_pix: bool) -> str | None:
    """A way to read the weights by which the model predicts photographs clearly better than as they are.

    Weights that came in right are at their best as they are. Tried are every order of queries, keys and values, and
    positions with rows and columns exchanged, in encoder and decoder by themselves. Another number of heads is not
    told so: of some good models half as many do as well.

    Args:
        model: see `photograph_shares`; the same after the call.
        norm_pix: the target it was trained to.

    Returns:
        What is better, in words; None where nothing is.
    """
    assert model.config is not None
    photographs = _photographs(model.config)
    best, least = None, _CLEARLY * photographs.share(model, norm_pix)
    for words, changed in _arrangements(model):
        with changed:
            error = photographs.share(model, norm_pix)
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
        yield f"rows and columns of its {name}'s positions exchanged", _exchanged(table)


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
    """A square at this size, values in [0, 1]; of an oblong the middle is taken."""
    pixels = torch.from_numpy(square).permute(2, 0, 1).unsqueeze(0).float() / 255
    scaled = interpolate(pixels, size=(max(size), max(size)), mode="bilinear", antialias=True)
    top, left = ((max(size) - side) // 2 for side in size)
    return scaled[..., top : top + size[0], left : left + size[1]].clamp(0, 1)
