"""Adapt an encoder to images of another size, or with other channels."""

from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import interpolate

from mae.core.compatibility import least_visible
from mae.core.method import MethodConfig
from mae.core.types import Grid, Layout
from mae.errors import UsageError
from mae.models.kinds import rebuilt
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

Stem = Literal["mean", "repeat"]

_KERNEL = "encoder.patch_embed.proj.weight"


def resized(model: PretrainedEncoder, img_size: tuple[int, int]) -> tuple[PretrainedEncoder, str]:
    """The same weights for images of another size, and a note on the position embedding.

    A sine-cosine embedding is computed for the new grid. A learned one is resampled in two dimensions, bicubic with
    antialiasing, as in timm. A mask that the new grid is too small for is random in what the model is trained as, at a
    ratio that leaves visible patches.

    Raises:
        UsageError: a size that is not a multiple of the patch, or that is one patch.
    """
    old = _config_of(model)
    try:
        new = old.override({"img_size": img_size})
    except UsageError:
        least = least_visible(old.encoder, old.decoder)
        ratio = fitting_ratio(old.mask.ratio, replace(old.layout, size=img_size), least=least)
        new = old.override({"img_size": img_size, "mask": "random", "mask_ratio": ratio})
    weights = resampled(model, new.layout.grid)
    how = "computed for" if old.encoder.pos_embed == "sincos2d" else "resampled (bicubic) to"
    return rebuilt(model, new, weights), f"position embedding {how} a grid of {new.layout.grid[0]}x{new.layout.grid[1]}"


def fitting_ratio(ratio: float, layout: Layout, *, least: int) -> float:
    """The mask ratio nearest to a given one that leaves so many patches visible; that one itself where none does."""
    highest = 1 - least / layout.num_tokens
    return min(ratio, highest) if highest > 0 else ratio


def resampled(model: PretrainedEncoder, grid: Grid) -> dict[str, Tensor]:
    """A model's weights with its learned position embeddings, if any, resampled to another grid."""
    old = _config_of(model).layout.grid
    return {
        name: resample(tensor, old, grid) if name.endswith("pos_embed.table") else tensor
        for name, tensor in model.state_dict().items()
    }


def with_channels(
    model: PretrainedEncoder,
    in_chans: int,
    stem: Stem,
    *,
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
) -> tuple[PretrainedEncoder, str]:
    """The encoder for images with other channels, and a note on the patch embedding.

    With `mean` each new channel gets the mean of the old channels' weights, with `repeat` the old ones in turn; both
    scaled by old / new channels, so that with `mean` an image whose channels are equal gives the same tokens. The
    decoder predicts the old channels and is dropped, as are their names and statistics.

    Args:
        model: a model with its configuration.
        in_chans: the new number of channels.
        stem: the rule.
        mean: of the new channels; None: unknown.
        std: likewise.

    Raises:
        UsageError: values that no model can have.
    """
    old = _config_of(model)
    new = old.override({"in_chans": in_chans, "mean": mean, "std": std, "channels": None, "pixel_dtype": None})
    kept = PretrainedEncoder(encoder=model.encoder, config=old) if isinstance(model, MaskedAutoencoder) else model
    weights = kept.state_dict()
    kernel = weights[_KERNEL].reshape(old.encoder.embed_dim, old.layout.channels, -1)
    if stem == "mean":
        kernel = kernel.mean(dim=1, keepdim=True).expand(-1, in_chans, -1)
    else:
        kernel = kernel[:, torch.arange(in_chans) % old.layout.channels]
    weights[_KERNEL] = (kernel * (old.layout.channels / in_chans)).flatten(1)
    dropped = ", decoder dropped" if isinstance(model, MaskedAutoencoder) else ""
    return rebuilt(
        kept, new, weights
    ), f"patch embedding adapted from {old.layout.channels} to {in_chans} channels ({stem}){dropped}"


def resample(table: Float[Tensor, "N D"], old: Grid, new: Grid) -> Float[Tensor, "M D"]:
    """Resample a learned table to another grid."""
    if old == new:
        return table
    grid = table.T.reshape(1, -1, *old)
    return interpolate(grid, size=new, mode="bicubic", antialias=True)[0].flatten(1).T.contiguous()


def _config_of(model: PretrainedEncoder) -> MethodConfig:
    if model.config is None:
        raise ValueError("this model was built without a configuration to change; use build_model")
    return model.config
