"""What packing costs and what it gains, for real photographs.

    OMP_NUM_THREADS=1 python benchmarks/packing.py photos/
    OMP_NUM_THREADS=1 python benchmarks/packing.py photos/ --repeats 5 --out packing.json

Each form is packed in turn by one process. Then the files and the packs are loaded in turn, training crops of 224
pixels in this process, and each pack is compared with the files of the same turn. `sharpness` is
the mean absolute Laplacian of a grey training crop against that of the same crop of the original, the median over all.
Seconds are those of the processor, which other programs' work does not lengthen as much.
"""

import os
import sys
import tempfile
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch

from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.bench.timing import quartiles, time_interleaved
from mae.data.dataset.images import ImageSet, load_images
from mae.data.dataset.reading import ImageReader
from mae.data.loading.loader import TrainingLoader
from mae.data.packs.encodings import Kept, PackForm, Raw, ShortSide
from mae.data.packs.inputs import PackInput, open_input
from mae.data.packs.writer import pack
from mae.data.remote.storage import LocalStorage
from mae.data.sources.pack import PackSource, open_pack
from mae.data.sources.source import Source
from mae.errors import UsageError
from mae.modalities.images.crop import Augmentation, random_crop_boxes, resized_crop
from mae.randomness import sample_keys

FORMS: dict[str, PackForm] = {
    "--keep": Kept(),
    "--short-side 448": ShortSide(side=448),
    "--short-side 384": ShortSide(),
    "--quality 90": ShortSide(quality=90),
    "--short-side 320": ShortSide(side=320),
    "--short-side 256": ShortSide(side=256),
    "--raw 256": Raw(),
}
FILES = "the files"
BATCH = 50
"""Images a step."""
SIZE = (224, 224)
LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("source", type=Path, help="a folder of photographs as they came, or a list of them")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is timed, in turn")
    parser.add_argument("--epochs", type=int, default=2, help="epochs that are timed together")
    return parser.parse_args()


def packed(source: Path, root: Path, form: PackForm) -> float:
    """Images that are packed in a second of this process."""
    began = time.process_time()
    result = pack(source, root, form=form, workers=1, max_unreadable=0.01)
    return result.images / (time.process_time() - began)


def loaded(images: ImageSet, epochs: int) -> float:
    """Images that are loaded and cropped in a second of this process."""
    batch = min(BATCH, len(images))
    steps = epochs * (len(images) // batch)
    loader = TrainingLoader(images=images, batch_size=batch, accumulate=1, img_size=SIZE, seed=0, workers=0)
    batches = loader.iterate(0)
    began = time.process_time()
    for _ in range(steps):
        next(batches)
    rate = steps * batch / (time.process_time() - began)
    batches.close()
    return rate


def sharpness(image: np.ndarray, box: torch.Tensor) -> float:
    pixels = torch.from_numpy(image.copy()).permute(2, 0, 1)
    crop = resized_crop(pixels, tuple(box.tolist()), False, SIZE).float().mean(dim=0)
    return torch.nn.functional.conv2d(crop[None, None], LAPLACIAN).abs().mean().item()


def kept_sharpness(originals: PackInput, source: PackSource) -> float:
    """The median over images of the sharpness of a crop, against that of the same crop of the original."""
    places = {name.rsplit(".", 1)[0]: index for index, name in enumerate(source.names)}
    ratios = []
    for index, key in enumerate(originals.keys):
        if key not in places:
            continue
        before, after = originals.original(index, None).image, ImageReader(source=source).load(places[key])
        sides = [torch.tensor([side]) for side in before.shape[:2]]
        box = random_crop_boxes(sample_keys(0, 0, torch.tensor([index])), *sides, Augmentation())[0]
        scale = torch.tensor([after.shape[0] / before.shape[0], after.shape[1] / before.shape[1]] * 2)
        there = (box[0] * scale).round().long()
        ratios.append(sharpness(after, there) / max(sharpness(before, box[0]), 1e-9))
    return median(ratios)


def opened(source: Source) -> ImageSet:
    return load_images(source, in_chans=3, memory_limit=0, max_unreadable=0.01)


def measure(args: Namespace, root: Path) -> dict[str, dict[str, list[float]]]:
    """The figures of the files and each form."""
    originals = open_input(str(args.source), data_root=Path())
    sources: dict[str, Source] = {FILES: originals.sources[0]}
    files = (originals.original(index, None).data for index in range(len(originals)))
    num_bytes = sum(len(data) for data in files if data is not None)
    found: dict[str, dict[str, list[float]]] = {FILES: {}}
    for repeat in range(args.repeats):
        for name, form in FORMS.items():
            place = root / f"{name}-{repeat}"
            each = found.setdefault(name, {"pack": []})
            each["pack"].append(packed(args.source, place, form))
            if repeat == 0:
                pack_source = open_pack(LocalStorage(root=place), name)
                sources[name] = pack_source
                size = sum(tar.num_bytes for tar in pack_source.tars)
                each.update(size=[size / num_bytes], sharpness=[kept_sharpness(originals, pack_source)])
    ways = {name: partial(loaded, opened(source), args.epochs) for name, source in sources.items()}
    rates = time_interleaved(ways, turns=args.repeats, warm_ups=1)
    for name, each in found.items():
        each["load"] = rates[name]
        each["gain"] = [one / other for one, other in zip(rates[name], rates[FILES], strict=True)]
    return found


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    if os.environ.get("OMP_NUM_THREADS") != "1":
        print("set OMP_NUM_THREADS=1: rates are told for one core")
        return 2
    try:
        originals = open_input(str(args.source), data_root=Path())
    except UsageError as error:
        print(f"skipped: {error}")
        return 0
    reader = ImageReader(source=originals.sources[0])
    sides = [min(reader.load(index).shape[:2]) for index in range(min(len(originals), 200))]
    print(f"{len(originals):,} images, median short side {median(sides):.0f} pixels\n")
    with tempfile.TemporaryDirectory() as root:
        found = measure(args, Path(root))
    print("| form | size / files | packing, images/s | loading, images/s | loading / files | sharpness |")
    print("|---|---|---|---|---|---|")
    for name, each in found.items():
        size, crisp = (f"{each[key][0]:.2f}" if key in each else "1" for key in ("size", "sharpness"))
        packing = quartiles(each["pack"]).text(0) if "pack" in each else "–"
        load, gain = quartiles(each["load"]).text(0), quartiles(each["gain"]).text(2)
        print(markdown_row([name, size, packing, load, gain, crisp]))
    write_figures(args.out, {"machine": machine(torch.device("cpu")), "forms": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
