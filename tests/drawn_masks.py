"""A small set for segmentation: fields of lying, standing and no stripes on noise, and their masks."""

from pathlib import Path

import numpy as np
from PIL import Image


def drawn_masks(folder: Path, *, train: int = 12, test: int = 6, size: tuple[int, int] = (24, 40)) -> Path:
    """Images of another shape than any model's, with masks of numbers, and a border that does not count."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[: size[0], : size[1]]
    for part, count in (("train", train), ("val", test)):
        for number in range(count):
            labels = np.zeros(size, dtype=np.uint8)
            labels[:, rng.integers(8, size[1] - 8) :] = 1
            labels[rng.integers(8, size[0] - 4) :, :] = 2
            # Light, contrast and phase differ from image to image, so that pixels alone tell little.
            light, contrast, phase = (
                rng.uniform(60, 190),
                rng.choice([-1, 1]) * rng.uniform(30, 50),
                rng.uniform(0, 6.3),
            )
            waves = np.stack([np.sin(1.5 * rows + phase), np.sin(1.5 * columns + phase), np.zeros(size)])
            pixels = light + contrast * np.take_along_axis(waves, labels[None].astype(int), axis=0)[0]
            pixels += rng.normal(0, 10, size)
            labels[0] = 255
            for kind, values in (("images", pixels.clip(0, 255)), ("masks", labels)):
                path = folder / part / kind / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(np.uint8(values)).save(path)
    (folder / "classes.txt").write_text("lying\nstanding\nplain\n")
    return folder
