"""A model of this package as others would have written it: their names, their shapes, their files."""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder

TIMM_VIT: dict[str, Any] = {"img_size": (32, 48), "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
HEADS = {"num_heads": 3, "decoder_num_heads": 2}
"""Of the tiny model, whose shapes do not tell them."""


def official(model: PretrainedEncoder) -> dict[str, Tensor]:
    """As the official repository names them; of an encoder alone as timm does."""
    config = model.config
    assert config is not None
    tensors = {}
    for name, tensor in model.state_dict().items():
        part, _, rest = name.partition(".")
        if rest == "patch_embed.proj.weight":
            tensor = tensor.reshape(-1, config.layout.channels, *config.layout.patch)
        tensors[rest if part == "encoder" or rest == "mask_token" else f"decoder_{rest}"] = tensor.clone()
    lead = int(config.encoder.cls_token)
    tensors.pop("pos_embed.table", None), tensors.pop("decoder_pos_embed.table", None)
    tensors["pos_embed"] = pad(model.encoder.pos_embed(config.layout.grid).detach(), (0, 0, lead, 0)).unsqueeze(0)
    if isinstance(model, MaskedAutoencoder):
        tensors["decoder_pos_embed"] = pad(
            model.decoder.pos_embed(config.layout.grid).detach(), (0, 0, lead, 0)
        ).unsqueeze(0)
    return tensors


def lightly(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """As lightly's example module has them, with a mask token in the encoder that its MAE does not use."""
    of_decoder = {"mask_token"}
    found = {
        f"decoder.{name}" if name in of_decoder or name.startswith("decoder_") else f"backbone.vit.{name}": tensor
        for name, tensor in official(model).items()
    }
    return {**found, "backbone.mask_token": torch.zeros(1, 1, 24)}


def lightly_1_6(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """As lightly's example module has them since 1.6: what projects and predicts stands beside the decoder."""
    found = {}
    for name, tensor in lightly(model).items():
        inner = name.replace("decoder.decoder_embed.", "decoder_embed.")
        inner = inner.replace("decoder.decoder_pred.", "prediction_head.")
        found[inner.replace("decoder.decoder_", "decoder.")] = tensor
    return found


def mmpretrain(model: MaskedAutoencoder) -> dict[str, Tensor]:
    """As mmpretrain's MAE has them."""
    found = {}
    for name, tensor in official(model).items():
        inner = name.replace(".norm1.", ".ln1.").replace(".norm2.", ".ln2.")
        inner = inner.replace(".mlp.fc1.", ".ffn.layers.0.0.").replace(".mlp.fc2.", ".ffn.layers.1.")
        if name == "mask_token" or name.startswith("decoder_"):
            found["neck." + inner.replace("decoder_norm.", "ln1.")] = tensor
        else:
            inner = inner.replace("patch_embed.proj.", "patch_embed.projection.")
            inner = f"ln1.{inner.removeprefix('norm.')}" if inner.startswith("norm.") else inner
            found["backbone." + inner.replace("blocks.", "layers.")] = tensor
    return found


def as_checkpoint(tensors: dict[str, Tensor], **options: Any) -> dict[str, Any]:
    """As the official code saves it while it trains: the options are an argparse.Namespace."""
    return {
        "model": tensors,
        "optimizer": {"state": {}, "param_groups": []},
        "epoch": 3,
        "scaler": {},
        "args": argparse.Namespace(**options),
    }


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path
