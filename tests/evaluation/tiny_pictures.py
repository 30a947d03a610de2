"""A model, images and masks for the tests of pictures."""

from pathlib import Path

import numpy as np
import torch
from data.pictures import noise
from PIL import Image
from torch import nn

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model

CPU = {"device": "cpu"}
SIDE, PATCH = 16, 4


def build(
    *, channels: int = 3, norm_pix: bool = True, statistics: bool = True, mean: float = 0.5, std: float = 0.3
) -> MaskedAutoencoder:
    """A model on 4 x 4 patches of 4 pixels whose every weight is random."""
    torch.manual_seed(3)
    sizes = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": 32, "depth": 1, "decoder_embed_dim": 16}
    told = {"mean": (mean,) * channels, "std": (std,) * channels} if statistics else {}
    model = create_model(
        "mae_vit_lesson_patch4", **sizes, decoder_depth=1, in_chans=channels, norm_pix_loss=norm_pix, **told
    )
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def uint8_images(count: int = 1, side: int = SIDE, channels: int = 3, seed: int = 0) -> torch.Tensor:
    pixels = np.stack([noise(side, side, channels, seed + number) for number in range(count)])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()


def patches_of(hidden: torch.Tensor) -> torch.Tensor:
    """[B, H, W] to [B, N]; a patch is hidden whole or not at all."""
    cells = hidden.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))
    assert torch.equal(cells.all(dim=4).all(dim=2), cells.any(dim=4).any(dim=2))
    return cells.any(dim=4).any(dim=2).flatten(1)


def write_mask(path: Path, mask: np.ndarray) -> Path:
    Image.fromarray((mask * 255).astype(np.uint8)).save(path)
    return path
