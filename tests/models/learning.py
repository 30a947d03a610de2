"""A small model trained on images that have structure, or on noise."""

from collections.abc import Callable
from typing import Any

import torch
from tiny import tiny_config
from torch import Tensor

from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder

SIDE, BATCH, STEPS = 24, 32, 200


def structured(generator: torch.Generator) -> Tensor:
    """A tilted plane with a round blob on it, per image and channel, `[B, 3, SIDE, SIDE]`."""
    axis = torch.linspace(-1, 1, SIDE)
    y, x = axis.reshape(1, 1, -1, 1), axis.reshape(1, 1, 1, -1)
    tilt = torch.randn(2, BATCH, 3, 1, 1, generator=generator)
    place = torch.rand(2, BATCH, 1, 1, 1, generator=generator) * 1.4 - 0.7
    colour = torch.randn(BATCH, 3, 1, 1, generator=generator)
    blob = torch.exp(-((y - place[0]) ** 2 + (x - place[1]) ** 2) / 0.3)
    return tilt[0] * y + tilt[1] * x + colour * blob


def noise(generator: torch.Generator) -> Tensor:
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)


def trained(draw: Callable[[torch.Generator], Tensor], **options: Any) -> tuple[MaskedAutoencoder, torch.Generator]:
    """The model after its training on such images, and the generator to draw fresh ones from.

    Args:
        draw: a batch of images.
        options: of the model's objective.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = build_model(
        tiny_config(
            img_size=SIDE,
            patch_size=4,
            mask_ratio=0.5,
            norm_pix_loss=False,
            embed_dim=48,
            num_heads=4,
            decoder_embed_dim=48,
            decoder_num_heads=4,
            decoder_depth=1,
            **options,
        )  # fmt: skip
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    for _ in range(STEPS):
        images = draw(generator)
        loss = model(images, plan=model.plan(images)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model, generator
