"""The named sizes: one small function each, the only place where their numbers stand.

A name gives encoder, patch and decoder: `mae_vit_base_patch16_dec512d8b` is ViT-Base on patches of 16 pixels
with a decoder 512 wide and 8 blocks deep. Names are listed without PyTorch: nothing at the top of this file imports it.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mae.core.method import MethodConfig
from mae.errors import UsageError

if TYPE_CHECKING:
    from mae.models.masked_autoencoder import MaskedAutoencoder


def _build(size: Mapping[str, Any], overrides: Mapping[str, Any]) -> "MaskedAutoencoder":
    from mae.models.build import build_model

    return build_model(MethodConfig().override(size).override(overrides))


def mae_vit_base_patch16_dec512d8b(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Base of the paper: 768 wide, 12 blocks, 12 heads."""
    size = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _build(size | _OFFICIAL_DECODER, overrides)


def mae_vit_large_patch16_dec512d8b(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Large of the paper: 1024 wide, 24 blocks, 16 heads."""
    size = dict(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _build(size | _OFFICIAL_DECODER, overrides)


def mae_vit_huge_patch14_dec512d8b(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Huge of the paper: 1280 wide, 32 blocks, 16 heads, patches of 14 pixels."""
    size = dict(patch_size=14, embed_dim=1280, depth=32, num_heads=16)
    return _build(size | _OFFICIAL_DECODER, overrides)


_OFFICIAL_DECODER = dict(decoder_embed_dim=512, decoder_depth=8, decoder_num_heads=16)


def mae_vit_base_patch16_dec384d8b(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Base with a narrower decoder: 384 wide, 8 blocks, 6 heads."""
    size = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _build(size | dict(decoder_embed_dim=384, decoder_depth=8, decoder_num_heads=6), overrides)


def mae_vit_small12_patch16(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Small in its usual depth: 384 wide, 12 blocks, 6 heads; decoder 256 wide, 8 blocks, 8 heads."""
    size = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _build(size | dict(decoder_embed_dim=256, decoder_depth=8, decoder_num_heads=8), overrides)


def mae_vit_small_patch16(**overrides: Any) -> "MaskedAutoencoder":
    """Half a ViT-Small: 384 wide, 6 blocks, 6 heads; decoder 192 wide, 8 blocks, 3 heads."""
    size = dict(patch_size=16, embed_dim=384, depth=6, num_heads=6)
    return _build(size | dict(decoder_embed_dim=192, decoder_depth=8, decoder_num_heads=3), overrides)


def mae_vit_tiny_patch16(**overrides: Any) -> "MaskedAutoencoder":
    """ViT-Tiny: 192 wide, 12 blocks, 3 heads; decoder 128 wide, 4 blocks, 4 heads."""
    size = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _build(size | _SMALL_DECODER, overrides)


def mae_vit_compact_patch16(**overrides: Any) -> "MaskedAutoencoder":
    """For small data sets: 192 wide, 8 blocks, 6 heads; decoder 128 wide, 4 blocks, 4 heads."""
    size = dict(patch_size=16, embed_dim=192, depth=8, num_heads=6)
    return _build(size | _SMALL_DECODER, overrides)


_SMALL_DECODER = dict(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)


def mae_vit_ultrasmall_patch16(**overrides: Any) -> "MaskedAutoencoder":
    """Shallow and quick: 256 wide, 3 blocks, 4 heads; decoder 128 wide, 4 blocks, 2 heads."""
    size = dict(patch_size=16, embed_dim=256, depth=3, num_heads=4)
    return _build(size | dict(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=2), overrides)


def mae_vit_lesson_patch4(**overrides: Any) -> "MaskedAutoencoder":
    """For 32-pixel images such as CIFAR-10: 256 wide, 4 blocks, 4 heads; decoder 128 wide, 2 blocks, 4 heads."""
    size = dict(img_size=32, patch_size=4, embed_dim=256, depth=4, num_heads=4)
    return _build(size | dict(decoder_embed_dim=128, decoder_depth=2, decoder_num_heads=4), overrides)


Factory = Callable[..., "MaskedAutoencoder"]

_MODELS: Mapping[str, Factory] = {
    factory.__name__: factory
    for factory in (
        mae_vit_ultrasmall_patch16,
        mae_vit_lesson_patch4,
        mae_vit_compact_patch16,
        mae_vit_tiny_patch16,
        mae_vit_small_patch16,
        mae_vit_small12_patch16,
        mae_vit_base_patch16_dec384d8b,
        mae_vit_base_patch16_dec512d8b,
        mae_vit_large_patch16_dec512d8b,
        mae_vit_huge_patch14_dec512d8b,
    )
}

ALIASES: Mapping[str, str] = {
    "mae_vit_small": "mae_vit_small_patch16",
    "mae_vit_base_patch16": "mae_vit_base_patch16_dec512d8b",
    "mae_vit_large_patch16": "mae_vit_large_patch16_dec512d8b",
    "mae_vit_huge_patch14": "mae_vit_huge_patch14_dec512d8b",
}
mae_vit_small = mae_vit_small_patch16
mae_vit_base_patch16 = mae_vit_base_patch16_dec512d8b
mae_vit_large_patch16 = mae_vit_large_patch16_dec512d8b
mae_vit_huge_patch14 = mae_vit_huge_patch14_dec512d8b


def list_models() -> list[str]:
    """The names of all models, smallest first; `ALIASES` holds the short official names."""
    return list(_MODELS)


def find_model(name: str) -> Factory:
    """The factory of a name or an alias.

    Raises:
        UsageError: no such model; the nearest names are given.
    """
    known = [*_MODELS, *ALIASES]
    if name not in known:
        begin = [each for each in known if each.startswith(str(name))][:3]
        near = begin or get_close_matches(str(name), known, n=3, cutoff=0.4) or list_models()[:3]
        raise UsageError(f"unknown model {name!r}; nearest: {', '.join(near)} ('mae list models' shows all)")
    return _MODELS[ALIASES.get(name, name)]


def create_model(name: str | None = None, **overrides: Any) -> "MaskedAutoencoder":
    """A model by name with fresh weights, any option overridden.

    Args:
        name: a name of `list_models()` or an alias.
        overrides: options by their names as flags, such as `img_size=96`, `mask_ratio=0.6` or `decoder="cross"`; a
            component of your own as `mask=MyMask()`.

    Raises:
        UsageError: unknown name or option, or values that do not fit each other.
    """
    if "pretrained" in overrides:
        raise UsageError(
            "create_model makes fresh weights and takes no pretrained; trained ones come by mae.load, of a run, a file "
            "or public weights such as mae.load('official/base') ('mae list weights' shows all)"
        )
    if name is None:
        raise UsageError(f"create_model takes the name of a model, such as {list_models()[0]!r} ('mae list models')")
    return find_model(name)(**overrides)


def model_config(name: str, **overrides: Any) -> MethodConfig:
    """What `create_model` would build, without making its weights.

    Raises:
        UsageError: see `create_model`.
    """
    return _model_config(name, **{option: _hashable(value) for option, value in overrides.items()})


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@lru_cache(typed=True)  # by type too: True is no number of blocks, though it equals 1
def _model_config(name: str, **overrides: Any) -> MethodConfig:
    # Remembered, since a deep model takes a good part of a second to put together, and a plan asks dozens of times.
    import torch

    with torch.device("meta"):
        config = create_model(name, **overrides).config
    assert config is not None  # every named size is built from one
    return config
