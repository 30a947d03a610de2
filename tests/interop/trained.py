"""A small masked autoencoder that was trained on photographs for some seconds: enough to predict them."""

import torch
from torch.nn.functional import interpolate

from mae.data.sources.builtin import photo_tiles
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model

STATISTICS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def trained(*, norm_pix_loss: bool, steps: int, rows_first: bool = False) -> MaskedAutoencoder:
    torch.manual_seed(0)
    model = create_model(
        "mae_vit_lesson_patch4",
        embed_dim=64,
        depth=2,
        decoder_embed_dim=48,
        norm_pix_loss=norm_pix_loss,
        **STATISTICS,
    )
    for part in (model.encoder, model.decoder) if rows_first else ():
        part.pos_embed.table.copy_(part.pos_embed.table.roll(part.pos_embed.table.shape[1] // 2, dims=1))
    photos = photo_tiles()
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in STATISTICS.values())
    squares = torch.stack([torch.from_numpy(photos.read(number)) for number in range(0, len(photos), 4)])
    images = interpolate(squares.permute(0, 3, 1, 2).float() / 255, size=32, mode="bilinear", antialias=True)
    images = (images.clamp(0, 1) - mean) / std
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = images[torch.randint(len(images), (64,), generator=generator)]
        model(batch, plan=model.plan(batch, generator=generator)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()
