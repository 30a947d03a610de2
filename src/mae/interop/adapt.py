"""An encoder for images of another size, or of other channels than it was trained on."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from mae.models.config import ModelConfig
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.storage import build, classes_of, kind_of
from mae.randomness import drawing_from
from mae.types import Grid

Stem = Literal["mean", "repeat"]

_KERNEL = "encoder.patch_embed.proj.weight"


def resized(model: PretrainedEncoder, img_size: tuple[int, int]) -> tuple[PretrainedEncoder, str]:
    """The same weights for images of another size, and what became of the positions, in words.

    Sine-cosine positions are computed for the new grid. Learned ones are resampled in two dimensions, bicubic with
    antialiasing, as timm does.

    Raises:
        UsageError: a size that is no multiple of the patch.
    """
    old = _config_of(model)
    new = replace(old, img_size=img_size)
    weights = {
        name: resample(tensor, old.grid, new.grid) if name.endswith("pos_embed.table") else tensor
        for name, tensor in model.state_dict().items()
    }
    how = "computed for" if old.pos_embed == "sincos2d" else "resampled (bicubic) to"
    return _built(model, new, weights), f"positions {how} a grid of {new.grid[0]}x{new.grid[1]}"


def rechannelled(
    model: PretrainedEncoder,
    in_chans: int,
    stem: Stem,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> tuple[PretrainedEncoder, str]:
    """The encoder for images of other channels, and what became of the old ones' weights, in words.

    With `mean` each new channel has the mean of the old ones' weights, with `repeat` the old ones' in turn; both times
    old over new channels, so that with `mean` an image whose channels are equal makes the same tokens. The decoder
    predicts the old channels and is left behind, as are their names and statistics.

    Args:
        model: a model with its configuration.
        in_chans: the new number of channels.
        stem: the rule.
        mean: of the new channels; None: not known.
        std: likewise.

    Raises:
        UsageError: numbers that no model can have.
    """
    old = _config_of(model)
    new = replace(old, in_chans=in_chans, mean=mean, std=std, channels=None, pixel_dtype=None)
    kept = PretrainedEncoder(encoder=model.encoder, config=old) if isinstance(model, MaskedAutoencoder) else model
    weights = kept.state_dict()
    kernel = weights[_KERNEL].reshape(old.embed_dim, old.in_chans, -1)
    if stem == "mean":
        kernel = kernel.mean(dim=1, keepdim=True).expand(-1, in_chans, -1)
    else:
        kernel = kernel[:, torch.arange(in_chans) % old.in_chans]
    weights[_KERNEL] = (kernel * (old.in_chans / in_chans)).flatten(1)
    left = ", the decoder is left behind" if isinstance(model, MaskedAutoencoder) else ""
    return _built(kept, new, weights), f"stem by {stem}: {old.in_chans} channels became {in_chans}{left}"


def resample(table: Float[Tensor, "N D"], old: Grid, new: Grid) -> Float[Tensor, "M D"]:
    """A learned table on another grid."""
    if old == new:
        return table
    grid = table.T.reshape(1, -1, *old)
    return interpolate(grid, size=new, mode="bicubic", antialias=True)[0].flatten(1).T.contiguous()


def _config_of(model: PretrainedEncoder) -> ModelConfig:
    if model.config is None:
        raise ValueError("this model was put together by hand and has no configuration to change; use build_model")
    return model.config


def _built(like: PretrainedEncoder, config: ModelConfig, weights: Mapping[str, Tensor]) -> PretrainedEncoder:
    """A model of the same kind."""
    with drawing_from(0):  # all of it is written over; the caller's numbers stay
        model = build(kind_of(like), config, classes_of(like))
    model.load_state_dict(weights)
    return model.eval()
