"""A small set for detection: light discs and rectangles on noise, and their boxes as COCO's JSON with polygons."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("rectangle", "disc")


def drawn_boxes(folder: Path, *, train: int = 12, test: int = 6, size: tuple[int, int] = (48, 64)) -> Path:
    """Images with one to three objects each, both kinds in both parts."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[: size[0], : size[1]] + 0.5
    for part, count in (("train", train), ("val", test)):
        images, annotations = [], []
        for number in range(count):
            pixels = rng.normal(60, 15, (*size, 3))
            for kind in (number + np.arange(rng.integers(1, 4))) % 2:
                high, wide = rng.integers(10, 20, 2)
                high, wide = (high, high) if kind else (high, wide)
                top, left = rng.integers(0, size[0] - high), rng.integers(0, size[1] - wide)
                angles = (
                    np.linspace(0, 2 * np.pi, 24, endpoint=False)
                    if kind
                    else np.pi * np.array([0.25, 0.75, 1.25, 1.75])
                )
                reach = 0.5 if kind else 0.5**0.5
                across = left + wide / 2 + reach * wide * np.cos(angles)
                down = top + high / 2 + reach * high * np.sin(angles)
                away = np.hypot((columns - left - wide / 2) / wide, (rows - top - high / 2) / high)
                inside = (
                    away < 0.5
                    if kind
                    else (abs(columns - left - wide / 2) < wide / 2) & (abs(rows - top - high / 2) < high / 2)
                )
                pixels[inside] = rng.normal([220, 160, 90] if kind else [90, 170, 220], 15, (inside.sum(), 3))
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": number,
                        "category_id": int(kind) + 1,
                        "bbox": [int(left), int(top), int(wide), int(high)],
                        "area": float(inside.sum()),
                        "iscrowd": 0,
                        "segmentation": [np.stack([across, down], axis=1).ravel().round(3).tolist()],
                    }
                )
            path = folder / part / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.uint8(pixels.clip(0, 255))).save(path)
            images.append({"id": number, "file_name": path.name, "height": size[0], "width": size[1]})
        categories = [{"id": number, "name": name} for number, name in enumerate(NAMES, start=1)]
        labels = {"images": images, "annotations": annotations, "categories": categories}
        path = folder / "annotations" / f"instances_{part}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(labels))
    return folder
