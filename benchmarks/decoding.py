"""From a JPEG's bytes to a training crop, on one core: Pillow as its users use it beside ours.

    python benchmarks/decoding.py photos/
    python benchmarks/decoding.py photos/ --turns 9 --out decoding.json

All ways make the same crops (boxes drawn by our keys, bicubic, 224 pixels) of the same bytes, and take turns, a pass
over all images each. `the loader` reads the files too and makes batches. Seconds are those of the processor, which
other programs lengthen less; ratios are taken turn by turn. How far our crops are from Pillow's is told
in grey levels, the mean over all values.
"""

import argparse
import io
import json
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from statistics import median, quantiles
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mae.data.augmentation import Augmentation, random_crop_boxes, resized_crop
from mae.data.decoding import decode
from mae.data.images import load_images
from mae.data.jpeg import has_fast_decoder
from mae.data.loaders import IMAGENET_MEAN, IMAGENET_STD, TrainingLoader
from mae.data.sources import open_source
from mae.randomness import sample_keys

SIDE, BATCH = 224, 50
MEAN, STD = (torch.tensor(values).reshape(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))

Box = tuple[int, int, int, int]
Way = Callable[[bytes, Box, bool], Tensor]


def by_pillow(data: bytes, box: Box, flip: bool) -> Tensor:
    top, left, height, width = box
    image = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + width, top + height))
    image = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def as_floats(data: bytes, box: Box, flip: bool) -> Tensor:
    """What torchvision's ToTensor and Normalize make of it in the loading process, as the official code has it."""
    return (by_pillow(data, box, flip).contiguous().float().div(255) - MEAN) / STD


def ours(data: bytes, box: Box, flip: bool) -> Tensor:
    image = torch.from_numpy(decode(data, name="an image")).permute(2, 0, 1)
    return resized_crop(image.expand(3, -1, -1), box, flip, (SIDE, SIDE))


WITHOUT = "ours without torchcodec"
WAYS: dict[str, Way] = {
    "Pillow, float32 (official)": as_floats,
    "Pillow, uint8": by_pillow,
    WITHOUT: ours,
    "ours": ours,
}
LOADER = "ours, the loader"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a folder of JPEGs")
    parser.add_argument("--turns", type=int, default=7, help="how often each way passes over all images")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    if args.turns < 2:
        raise SystemExit("--turns must be 2 or more, for there is a spread to tell")
    if not has_fast_decoder():
        raise SystemExit("torchcodec is not installed: pip install 'openmae[fast]'")
    torch.set_num_threads(1)
    files = sorted(path for path in args.source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    bytes_of = [path.read_bytes() for path in files]
    sizes = torch.tensor([decode(data, name="an image").shape[:2] for data in bytes_of])
    drawn = random_crop_boxes(sample_keys(0, 0, torch.arange(len(files))), sizes[:, 0], sizes[:, 1], Augmentation())
    crops = list(zip(bytes_of, map(tuple, drawn[0].tolist()), drawn[1].tolist(), strict=True))
    if len(crops) < BATCH:
        raise SystemExit(f"{args.source} holds {len(crops)} JPEGs; give {BATCH} or more")
    images = load_images(open_source(str(args.source), data_root=args.source), in_chans=3, memory_limit=0)
    loader = TrainingLoader(
        images=images, batch_size=BATCH, accumulate=1, img_size=(SIDE, SIDE), seed=0, workers=0
    )  # fmt: skip
    apart = [(ours(*crop).float() - by_pillow(*crop).float()).abs().mean() for crop in crops]
    rates: dict[str, list[float]] = {name: [] for name in (*WAYS, LOADER)}
    for _ in range(args.turns):
        for name, way in WAYS.items():
            with (
                patch("mae.data.decoding.plain_size", lambda *args, **options: None)
                if name == WITHOUT
                else nullcontext()
            ):
                began = time.process_time()
                for crop in crops:
                    way(*crop)
                rates[name].append(len(crops) / (time.process_time() - began))
        with closing(loader.iterate(0)) as batches:
            began = time.process_time()
            for _ in range(steps := len(images) // BATCH):
                next(batches)
            rates[LOADER].append(steps * BATCH / (time.process_time() - began))
    found = {}
    base = rates["Pillow, uint8"]
    for name, values in rates.items():
        low, middle, high = quantiles([value / one for value, one in zip(values, base, strict=True)], n=4)
        found[name] = {"images_per_second": median(values), "ratio": middle, "lower": low, "upper": high}
        print(f"| {name} | {median(values):.0f} | {middle:.2f} ({low:.2f}–{high:.2f}) |")
    overhead = median([bare / whole for bare, whole in zip(rates["ours"], rates[LOADER], strict=True)]) - 1
    told = {"images": len(crops), "levels_apart": float(torch.stack(apart).mean()), "loader_overhead": overhead}
    print(json.dumps(told))
    if args.out is not None:
        args.out.write_text(json.dumps({**told, "torch": torch.__version__, "ways": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
