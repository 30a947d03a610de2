"""A folder of images with an odd one and copies planted among two kinds, and a model that has seen none."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mae.models.file import save
from mae.models.presets import create_model

SIDE, EACH = 16, 14
WARM, COLD = (200, 120, 60), (60, 110, 190)


def planted_images(folder: Path) -> Path:
    """`warm/` and `cold/` of noise about a colour each, two copies of one of them, and one image unlike all."""
    rng = np.random.default_rng(0)
    for kind, colour in (("warm", WARM), ("cold", COLD)):
        (folder / kind).mkdir(parents=True)
        for number in range(EACH):
            low = rng.normal(colour, 22, (4, 4, 3)).repeat(SIDE // 4, axis=0).repeat(SIDE // 4, axis=1)
            _write(folder / kind / f"{number:02}.png", low + rng.normal(0, 8, (SIDE, SIDE, 3)))
    first = Image.open(folder / "warm" / "03.png")
    first.save(folder / "warm" / "same.png", compress_level=0)
    first.save(folder / "warm" / "anew.jpg", quality=95, subsampling=0)
    board = np.indices((SIDE, SIDE)).sum(axis=0) // 4 % 2 * 255
    _write(folder / "cold" / "odd.png", np.stack([0 * board, board, 0 * board], axis=2))
    return folder


def planted_model(path: Path, **changes: Any) -> Path:
    """The file of a small model with weights from a seed; an option replaces its own."""
    torch.manual_seed(0)
    statistics = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
    model = create_model(
        "mae_vit_lesson_patch4",
        img_size=SIDE,
        embed_dim=32,
        depth=2,
        decoder_embed_dim=16,
        decoder_depth=1,
        **{**statistics, **changes},
    )
    save(model, path)
    return path


def _write(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path)
