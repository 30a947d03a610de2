"""A model must learn what can be learned, and nothing where there is nothing."""

from collections.abc import Callable

import torch
from tiny import tiny_config
from torch import Tensor

from mae.models.zoo import build_model

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


def error_over_baseline(draw: Callable[[torch.Generator], Tensor]) -> float:
    """Trained error on fresh images over that of predicting each channel's mean over the visible pixels."""
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
    images = draw(generator)
    plan = model.plan(images)
    with torch.no_grad():
        error = model(images, plan=plan).loss
    patches = torch.nn.functional.unfold(images, 4, stride=4).transpose(1, 2)  # [B, N, 3 * 16], channel first
    visible = patches.reshape(BATCH, -1, 3, 16).gather(1, plan.visible[..., None, None].expand(-1, -1, 3, 16))
    mean = visible.mean(dim=(1, 3))  # [B, 3]
    hidden = plan.hidden.reshape(BATCH, 1, 6, 6).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    squares = (images - mean[..., None, None]).square()
    return float(error / squares[hidden.expand_as(squares)].mean())


def test_structured_images_are_predicted_far_better_than_by_their_mean() -> None:
    assert error_over_baseline(structured) < 0.25


def test_noise_is_not_predicted_at_all() -> None:
    assert 0.95 < error_over_baseline(noise) < 1.2
