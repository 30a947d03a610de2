"""Small models and images for the tests of this folder."""

from typing import Any

import torch
from torch import Tensor, nn

from mae.core.method import MethodConfig
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder


def tiny_config(**changes: Any) -> MethodConfig:
    options: dict[str, Any] = {
        "img_size": (16, 24), "patch_size": (4, 4), "embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0,
        "decoder_embed_dim": 16, "decoder_depth": 2, "decoder_num_heads": 2,
    }  # fmt: skip
    return MethodConfig().override(options).override(changes)


def tiny_model(**changes: Any) -> MaskedAutoencoder:
    """A model whose every weight is random, biases and norms too: none can hide behind a zero or a one."""
    torch.manual_seed(0)
    model = build_model(tiny_config(**changes))
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def images_for(model: MaskedAutoencoder, *, batch: int = 3, seed: int = 1) -> Tensor:
    assert model.config is not None
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, model.config.layout.channels, *model.config.layout.size, generator=generator)
