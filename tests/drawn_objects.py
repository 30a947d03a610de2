"""A small set for detection: light discs and squares of several sizes on noise, as COCO's labels with outlines."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("disc", "square")


def drawn_objects(
    folder: Path, *, train: int = 24, test: int = 12, size: tuple[int, int] = (48, 64), noise: bool = False
) -> Path:
    """Images of another shape than any model's; of `noise` alone, under the same labels."""
    rng = np.random.default_rng(0)
    height, width = size
    rows, columns = np.mgrid[:height, :width] + 0.5
    for part, count in (("train2017", train), ("val2017", test)):
        images, annotations = [], []
        for number in range(1, count + 1):
            pixels = np.repeat(rng.normal(60, 15, (height, width, 1)), 3, axis=2)
            taken = np.zeros(size, dtype=bool)
            for _ in range(rng.integers(1, 4)):
                side, label = int(rng.integers(12, 22)), int(rng.integers(0, 2))
                left, top = int(rng.integers(0, width - side)), int(rng.integers(0, height - side))
                if taken[top : top + side, left : left + side].any():
                    continue
                taken[top : top + side, left : left + side] = True
                corners = [[left, top], [left + side, top], [left + side, top + side], [left, top + side]]
                inside = taken & (rows > top) & (rows < top + side) & (columns > left) & (columns < left + side)
                if label == 0:
                    angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
                    middle, radius = np.array([left + side / 2, top + side / 2]), side / 2
                    corners = (middle + radius * np.stack([np.cos(angle), np.sin(angle)], axis=1)).tolist()
                    inside &= (columns - middle[0]) ** 2 + (rows - middle[1]) ** 2 < radius**2
                pixels[inside] += rng.uniform(90, 150)
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": label + 1,
                        "bbox": [left, top, side, side],
                        "area": int(inside.sum()),
                        "iscrowd": 0,
                        "segmentation": [[value for corner in corners for value in corner]],
                    }
                )
            if noise:
                pixels = rng.normal(60, 15, pixels.shape)
            path = folder / part / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.uint8(pixels.clip(0, 255))).save(path)
            images.append({"id": number, "file_name": path.name, "height": height, "width": width})
        labels = {
            "images": images,
            "annotations": annotations,
            "categories": [{"id": number, "name": name} for number, name in enumerate(NAMES, start=1)],
        }
        (folder / "annotations").mkdir(exist_ok=True)
        (folder / "annotations" / f"instances_{part}.json").write_text(json.dumps(labels))
    return folder
