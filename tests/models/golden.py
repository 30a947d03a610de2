"""Ten training steps on a CPU whose losses must not change; writes them down when run as a script.

    python tests/models/golden.py      # rewrites tests/assets/golden_losses.json; say in the commit why

Weights, images and masks come from `mae.randomness` and formulas, not from PyTorch's generator, so the numbers
hold for other versions and processors.
"""

import json
from math import pi
from pathlib import Path

import torch
from torch import Tensor

from mae.core.method import MethodConfig
from mae.core.types import MaskRequest
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.randomness import Stream, sample_keys, uniform

FILE = Path(__file__).parents[1] / "assets" / "golden_losses.json"
CONFIG = MethodConfig().override(
    dict(img_size=(32, 48), patch_size=(8, 8), embed_dim=48, depth=3, num_heads=4, decoder_embed_dim=32,
    decoder_depth=2, decoder_num_heads=2)
)  # fmt: skip
STEPS, BATCH, SEED = 10, 8, 0


def golden_model() -> MaskedAutoencoder:
    model = build_model(CONFIG)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            key = sample_keys(SEED, 0, torch.tensor([number]))
            values = uniform(key, weight.numel(), Stream.ORDER).reshape(weight.shape) - 0.5
            weight.copy_(0.2 * values if weight.ndim > 1 else 0.2 * values + weight.round())
    return model


def golden_images(step: int) -> Tensor:
    """Waves of a direction, a length and a colour of their own, `[B, 3, H, W]`."""
    height, width = CONFIG.layout.size
    numbers = uniform(sample_keys(SEED, step, torch.arange(BATCH)), 9, Stream.CROP)
    rows, columns, phase = numbers[:, :3].unsqueeze(-1).unsqueeze(-1).unbind(1)
    y, x = torch.arange(height).unsqueeze(1) / height, torch.arange(width) / width
    wave = torch.sin(2 * pi * (2 * rows * y + 3 * columns * x + phase))  # [B, H, W]
    return wave.unsqueeze(1) * numbers[:, 3:6, None, None] + numbers[:, 6:9, None, None]


def golden_losses() -> list[float]:
    model = golden_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.05)
    losses = []
    for step in range(STEPS):
        keys = sample_keys(SEED, step, torch.arange(BATCH))
        plan = model.masking.plan(MaskRequest(layout=CONFIG.layout, keys=keys))
        loss = model(golden_images(step), plan=plan).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    record = {"command": "python tests/models/golden.py", "losses": golden_losses()}
    FILE.write_text(json.dumps(record, indent=2) + "\n")
