"""The named sizes: one small function each, the only place where their numbers stand.

A name gives encoder, patch and decoder: `mae_vit_base_patch16_dec512d8b` is ViT-Base on patches of 16 pixels
with a decoder 512 wide and 8 blocks deep.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral
from typing import Any, Unpack

import torch

from mae.errors import UsageError
from mae.layers.transformer import set_norm_eps
from mae.losses.focal_frequency import FocalFrequencyError
from mae.losses.laplacian import LaplacianError
from mae.losses.reconstruction import KnownValues, MeanAbsoluteError, MeanSquaredError, SmoothL1
from mae.losses.uniformity import Uniformity
from mae.masking.random import RandomMasking
from mae.models.config import ModelConfig, ModelOptions, pair
from mae.models.decoder import CrossDecoder, MAEDecoder
from mae.models.encoder import MAEEncoder
from mae.models.masked_autoencoder import FeatureTerm, MaskedAutoencoder, PictureTerm, ReconstructionLoss
from mae.models.pretrained import PretrainedEncoder
from mae.targets.low_pass import LowPassTarget
from mae.targets.pixels import PixelTarget


def build_encoder(config: ModelConfig, *, drop_path: float = 0.0, pos_embed: str | None = None) -> MAEEncoder:
    """The encoder of a configuration, with fresh weights from PyTorch's global generator.

    Args:
        config: the model the encoder belongs to.
        drop_path: see `MAEEncoder`.
        pos_embed: other positions than the configuration's; None: those.

    Raises:
        UsageError: values that do not fit each other.
    """
    encoder = MAEEncoder(
        img_size=config.img_size,
        patch_size=config.patch_size,
        in_chans=config.in_chans,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_ratio,
        cls_token=config.cls_token,
        pos_embed=config.pos_embed if pos_embed is None else pos_embed,
        drop_path=drop_path,
    )
    encoder.patch_embed.may_miss = config.no_data is not None
    set_norm_eps(encoder, config.norm_eps)
    return encoder


def build_model(config: ModelConfig) -> MaskedAutoencoder:
    """The masked autoencoder of a configuration, with fresh weights from PyTorch's global generator.

    Raises:
        UsageError: values that do not fit each other.
    """
    masking = RandomMasking(ratio=config.mask_ratio, predicted=config.predict_share)
    encoder = build_encoder(config)
    visible = masking.num_visible(encoder.grid)  # a ratio that leaves nothing is refused before any training
    if config.decoder == "cross" and visible + encoder.num_prefix < 2:
        raise UsageError("decoder cross chooses among visible tokens, and these images have one; use smaller patches")
    decoder = _decoder(config, encoder)
    set_norm_eps(decoder, config.norm_eps)
    return MaskedAutoencoder(
        encoder=encoder,
        decoder=decoder,
        masking=masking,
        target=make_target(config),
        loss=_LOSSES[config.loss]() if config.no_data is None else KnownValues(loss=_LOSSES[config.loss]()),
        picture_terms=_picture_terms(config),
        feature_terms=_feature_terms(config),
        config=config,
    )


def build_pretrained_encoder(config: ModelConfig) -> PretrainedEncoder:
    """The encoder of a configuration alone, with fresh weights from PyTorch's global generator.

    Raises:
        UsageError: values that do not fit each other.
    """
    return PretrainedEncoder(encoder=build_encoder(config), config=config)


def _decoder(config: ModelConfig, encoder: MAEEncoder) -> MAEDecoder | CrossDecoder:
    sizes: dict[str, Any] = {
        "encoder_dim": encoder.embed_dim,
        "grid": encoder.grid,
        "embed_dim": config.decoder_embed_dim,
        "depth": config.decoder_depth,
        "num_heads": config.decoder_num_heads,
        "num_outputs": config.patch_values,
        "mlp_ratio": config.mlp_ratio,
        "pos_embed": config.pos_embed,
    }
    if config.decoder == "cross":
        return CrossDecoder(encoder_depth=config.depth, **sizes)
    return MAEDecoder(num_prefix=encoder.num_prefix, **sizes)


_LOSSES: Mapping[str, Callable[[], ReconstructionLoss]] = {
    "mse": MeanSquaredError,
    "l1": MeanAbsoluteError,
    "smooth_l1": SmoothL1,
}


def make_target(config: ModelConfig) -> PixelTarget:
    """What the decoder of a configuration must predict."""
    if config.low_pass is None:
        may_miss = config.no_data is not None
        return PixelTarget(patch_size=config.patch_size, norm_pix=config.norm_pix_loss, may_miss=may_miss)
    return LowPassTarget(patch_size=config.patch_size, norm_pix=config.norm_pix_loss, cutoff=config.low_pass)


def _picture_terms(config: ModelConfig) -> dict[str, PictureTerm]:
    """What is added to the loss for the picture; a term of weight 0 is not computed."""
    terms: dict[str, PictureTerm] = {
        "laplacian": LaplacianError(weight=config.laplacian, raw=config.laplacian_raw),
        "focal_frequency": FocalFrequencyError(weight=config.focal_frequency),
    }
    return {name: term for name, term in terms.items() if term.weight > 0}


def _feature_terms(config: ModelConfig) -> dict[str, FeatureTerm]:
    uniformity = Uniformity(weight=config.uniformity, form=config.uniformity_form)
    return {"uniformity": uniformity} if uniformity.weight > 0 else {}


def _build(size: ModelOptions, overrides: ModelOptions) -> MaskedAutoencoder:
    options: dict[str, Any] = {**size, **overrides}
    sides = {
        name: pair(options[name]) for name in ("img_size", "patch_size") if isinstance(options.get(name), Integral)
    }
    return build_model(ModelConfig.from_json({**options, **sides}))


def mae_vit_base_patch16_dec512d8b(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Base of the paper: 768 wide, 12 blocks, 12 heads."""
    size = ModelOptions(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _build(size | _OFFICIAL_DECODER, overrides)


def mae_vit_large_patch16_dec512d8b(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Large of the paper: 1024 wide, 24 blocks, 16 heads."""
    size = ModelOptions(patch_size=16, embed_dim=1024, depth=24, num_heads=16)
    return _build(size | _OFFICIAL_DECODER, overrides)


def mae_vit_huge_patch14_dec512d8b(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Huge of the paper: 1280 wide, 32 blocks, 16 heads, patches of 14 pixels."""
    size = ModelOptions(patch_size=14, embed_dim=1280, depth=32, num_heads=16)
    return _build(size | _OFFICIAL_DECODER, overrides)


_OFFICIAL_DECODER = ModelOptions(decoder_embed_dim=512, decoder_depth=8, decoder_num_heads=16)


def mae_vit_base_patch16_dec384d8b(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Base with a narrower decoder: 384 wide, 8 blocks, 6 heads."""
    size = ModelOptions(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _build(size | ModelOptions(decoder_embed_dim=384, decoder_depth=8, decoder_num_heads=6), overrides)


def mae_vit_small12_patch16(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Small in its usual depth: 384 wide, 12 blocks, 6 heads; decoder 256 wide, 8 blocks, 8 heads."""
    size = ModelOptions(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _build(size | ModelOptions(decoder_embed_dim=256, decoder_depth=8, decoder_num_heads=8), overrides)


def mae_vit_small_patch16(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """Half a ViT-Small: 384 wide, 6 blocks, 6 heads; decoder 192 wide, 8 blocks, 3 heads."""
    size = ModelOptions(patch_size=16, embed_dim=384, depth=6, num_heads=6)
    return _build(size | ModelOptions(decoder_embed_dim=192, decoder_depth=8, decoder_num_heads=3), overrides)


def mae_vit_tiny_patch16(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """ViT-Tiny: 192 wide, 12 blocks, 3 heads; decoder 128 wide, 4 blocks, 4 heads."""
    size = ModelOptions(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _build(size | _SMALL_DECODER, overrides)


def mae_vit_compact_patch16(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """For small data sets: 192 wide, 8 blocks, 6 heads; decoder 128 wide, 4 blocks, 4 heads."""
    size = ModelOptions(patch_size=16, embed_dim=192, depth=8, num_heads=6)
    return _build(size | _SMALL_DECODER, overrides)


_SMALL_DECODER = ModelOptions(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=4)


def mae_vit_ultrasmall_patch16(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """Shallow and quick: 256 wide, 3 blocks, 4 heads; decoder 128 wide, 4 blocks, 2 heads."""
    size = ModelOptions(patch_size=16, embed_dim=256, depth=3, num_heads=4)
    return _build(size | ModelOptions(decoder_embed_dim=128, decoder_depth=4, decoder_num_heads=2), overrides)


def mae_vit_lesson_patch4(**overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """For 32-pixel images such as CIFAR-10: 256 wide, 4 blocks, 4 heads; decoder 128 wide, 2 blocks, 4 heads."""
    size = ModelOptions(img_size=32, patch_size=4, embed_dim=256, depth=4, num_heads=4)
    return _build(size | ModelOptions(decoder_embed_dim=128, decoder_depth=2, decoder_num_heads=4), overrides)


Factory = Callable[..., MaskedAutoencoder]

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
        near = get_close_matches(str(name), known, n=3, cutoff=0.4) or list_models()[:3]
        raise UsageError(f"unknown model {name!r}; nearest: {', '.join(near)} ('mae list models' shows all)")
    return _MODELS[ALIASES.get(name, name)]


def create_model(name: str, **overrides: Unpack[ModelOptions]) -> MaskedAutoencoder:
    """A model by name with fresh weights, any option overridden.

    Args:
        name: a name of `list_models()` or an alias.
        overrides: fields of `ModelConfig`, such as `img_size=96` or `patch_size=(4, 8)`.

    Raises:
        UsageError: unknown name or option, or values that do not fit each other.
    """
    return find_model(name)(**overrides)


def model_config(name: str, **overrides: Unpack[ModelOptions]) -> ModelConfig:
    """What `create_model` would build, without making its weights.

    Raises:
        UsageError: see `create_model`.
    """
    options: dict[str, Any] = {**overrides}
    plain = {option: tuple(value) if isinstance(value, list) else value for option, value in options.items()}
    return _model_config(name, **plain)


@lru_cache(typed=True)  # by type too: True is no number of blocks, though it equals 1
def _model_config(name: str, **overrides: Any) -> ModelConfig:
    # Remembered, since a deep model takes a good part of a second to put together, and a plan asks dozens of times.
    with torch.device("meta"):
        config = create_model(name, **overrides).config
    assert config is not None  # every named size is built from one
    return config
