"""Small models and images, the same for every test of the room."""

from collections.abc import Callable

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.zoo import create_model


@pytest.fixture
def small_model() -> Callable[..., MaskedAutoencoder]:
    """A factory of models on patches of 4 pixels, weights from a fixed seed."""

    def build(*, norm_pix: bool, in_chans: int = 3, img_size: int = 32) -> MaskedAutoencoder:
        torch.manual_seed(0)
        return create_model(
            "mae_vit_lesson_patch4",
            img_size=img_size,
            in_chans=in_chans,
            embed_dim=32,
            depth=1,
            decoder_embed_dim=16,
            decoder_depth=1,
            norm_pix_loss=norm_pix,
        )

    return build


@pytest.fixture
def blocky_images() -> Callable[..., Float[Tensor, "B C H W"]]:
    """A factory of normalised images (mean 0.5, deviation 0.25): a level per 4x4 block plus texture, in [0, 1]."""

    def build(*, batch: int = 2, channels: int = 3, side: int = 32) -> Float[Tensor, "B C H W"]:
        generator = torch.Generator().manual_seed(1)
        level = torch.rand(batch, 1, side // 4, side // 4, generator=generator) * 0.8 + 0.1
        level = level.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
        texture = (torch.rand(batch, channels, side, side, generator=generator) - 0.5) * 0.2
        return (level + texture - 0.5) / 0.25

    return build
