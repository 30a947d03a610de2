"""An encoder made ready to be trained on with labels: its positions train too, and paths drop."""

from typing import Any

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.layers.pos_embed import sincos_2d
from mae.models.build import build_encoder
from mae.models.pretrained import PretrainedEncoder

_SAME = (
    "patch_size",
    "in_chans",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "norm_eps",
    "cls_token",
    "cls_tokens",
)


def build_trainable_encoder(
    config: MethodConfig, *, pretrained: PretrainedEncoder | None, drop_path: float, rank: int = 0, world: int = 1
) -> tuple[MethodConfig, Any]:
    """An encoder whose positions train too, from a pre-trained one or from scratch, and its configuration.

    The positions start as the pre-trained model's, or from the sine-cosine table. Unlike the official code the
    class token has no position of its own: it would only be added to a token that trains already.

    Args:
        config: the encoder and the size of the images.
        pretrained: whose encoder's weights to copy; None: fresh ones from PyTorch's global generator.
        drop_path: see `make_blocks`; 0 for none.
        rank: see `DropPath`.
        world: see `DropPath`.

    Raises:
        UsageError: values that do not fit each other, or a pre-trained encoder of other sizes.
    """
    config = trainable(config)
    encoder = build_encoder(config, drop_path=drop_path, rank=rank, world=world)
    weights = encoder.state_dict()
    if pretrained is None:
        weights["pos_embed.table"] = sincos_2d(encoder.grid, encoder.embed_dim)
    else:
        _check_same(config, pretrained.config)
        source = pretrained.encoder
        weights |= {name: weight for name, weight in source.state_dict().items() if name in weights}
        weights["pos_embed.table"] = source.pos_embed(encoder.grid)
    encoder.load_state_dict(weights)
    return config, encoder


def trainable(config: MethodConfig) -> MethodConfig:
    """The configuration of an encoder whose positions train too.

    Mask tokens are of pre-training alone, and so is a decoder that wants them.
    """
    return config.override({"pos_embed": "learned", "decoder": "self", "encoder_mask_tokens": False})


def _check_same(config: MethodConfig, pretrained: MethodConfig | None) -> None:
    """Heads and patches of another shape would load without a word."""
    if pretrained is None:
        raise UsageError("the pre-trained model carries no configuration to compare with; build it with build_model")
    there, here = pretrained.flat(), config.flat()
    for name in _SAME:
        found, expected = there[name], here[name]
        if found != expected:
            raise UsageError(f"the pre-trained encoder has {name} {found}, the classifier {expected}; make them equal")
