"""Transformers' ViTMAE with our weights: the peer of `mae bench step`, and an oracle of the tests.

Its constructor leaves the position tables at zero (transformers 5.23) and fits square grids only, so both
tables are always copied in, and the one check that refuses rectangles is switched off. All arithmetic stays
the peer's own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

from mae.core.method import MethodConfig
from mae.core.types import MaskPlan
from mae.models.masked_autoencoder import MaskedAutoencoder

_NAMES = (
    ("encoder.cls_token", "vit.embeddings.cls_token"),
    ("encoder.patch_embed.proj.", "vit.embeddings.patch_embeddings.projection."),
    ("encoder.blocks.", "vit.layers."),
    ("encoder.norm.", "vit.layernorm."),
    ("decoder.embed.", "decoder.decoder_embed."),
    ("decoder.blocks.", "decoder.decoder_layers."),
    ("decoder.norm.", "decoder.decoder_norm."),
    ("decoder.pred.", "decoder.decoder_pred."),
    (".norm1.", ".layernorm_before."),
    (".norm2.", ".layernorm_after."),
    (".attn.proj.", ".attention.o_proj."),
)


class Peer(ViTMAEForPreTraining):
    """The peer, for rectangular images too."""

    def patchify(self, pixel_values: Tensor, interpolate_pos_encoding: bool = False) -> Tensor:
        """Patches `[B, N, P]`; the flag only switches off the check that images are square."""
        return super().patchify(pixel_values, interpolate_pos_encoding=True)


def peer_tensors(ours: Mapping[str, Tensor], config: MethodConfig) -> dict[str, Tensor]:
    """Our parameters (or their gradients) under the peer's names and in its shapes."""
    theirs: dict[str, Tensor] = {}
    for name, value in ours.items():
        for mine, other in _NAMES:
            name = name.replace(mine, other)
        if name.endswith("projection.weight"):
            value = value.reshape(-1, config.layout.channels, *config.layout.patch)
        if ".attn.qkv." in name:
            for letter, part in zip("qkv", value.chunk(3), strict=True):
                theirs[name.replace(".attn.qkv.", f".attention.{letter}_proj.")] = part
        else:
            theirs[name] = value
    return theirs


def make_peer(model: MaskedAutoencoder) -> Peer:
    """The peer with a copy of the model's weights and position tables.

    Raises:
        ValueError: a model the peer cannot be: not one class token, or a patch that is not square.
    """
    config = model.config
    if config is None or config.encoder.num_prefix != 1 or config.layout.patch[0] != config.layout.patch[1]:
        raise ValueError("the peer needs a configuration with one class token and square patches")
    side = config.layout.patch[0]
    peer = Peer(
        ViTMAEConfig(
            image_size=side,  # one patch, which its constructor can build; the tables below are the real size
            patch_size=side,
            num_channels=config.layout.channels,
            hidden_size=config.encoder.embed_dim,
            num_hidden_layers=config.encoder.depth,
            num_attention_heads=config.encoder.num_heads,
            intermediate_size=int(config.encoder.embed_dim * config.encoder.mlp_ratio),
            decoder_hidden_size=config.decoder.embed_dim,
            decoder_num_hidden_layers=config.decoder.depth,
            decoder_num_attention_heads=config.decoder.num_heads,
            decoder_intermediate_size=int(config.decoder.embed_dim * config.encoder.mlp_ratio),
            layer_norm_eps=config.encoder.norm_eps,
            mask_ratio=config.mask.ratio,
            norm_pix_loss=config.target.norm,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            attn_implementation="sdpa",  # type: ignore[call-arg]
        )
    )
    embeddings = peer.vit.embeddings
    embeddings.image_size = embeddings.patch_embeddings.image_size = config.tokenizer.img_size
    embeddings.position_embeddings = _with_prefix(model.encoder.pos_embed(config.layout.grid))
    peer.decoder.decoder_pos_embed = _with_prefix(model.decoder.pos_embed(config.layout.grid))
    weights = peer_tensors(dict(model.named_parameters()), config)
    tables = {"vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"}
    missing = set(peer.load_state_dict(weights, strict=False).missing_keys)
    if missing != tables:
        raise ValueError(f"weights that were not copied: {sorted(missing ^ tables)}")
    return peer.to(next(model.parameters()).device)  # type: ignore[arg-type]


def _with_prefix(table: Tensor) -> nn.Parameter:
    """A position table with the class token's zero row in front, `[1, 1 + N, D]`."""
    return nn.Parameter(nn.functional.pad(table.detach(), (0, 0, 1, 0)).unsqueeze(0), requires_grad=False)


def peer_noise(plan: MaskPlan) -> Tensor:
    """The noise `[B, N]` whose sorting gives the peer this very mask."""
    order = torch.cat([plan.visible, plan.predicted], dim=1)
    ranks = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, ranks).float()
