"""What `--reduced-decoding` gains and changes, for JPEGs of several sizes made from real photographs.

    OMP_NUM_THREADS=1 python benchmarks/reduced_decoding.py photos/
    OMP_NUM_THREADS=1 python benchmarks/reduced_decoding.py photos/ --turns 9 --out reduced.json

Training crops of 224 pixels from files in memory, by the ways of `mae bench data` in turn; seconds are those of the
processor. There being no photographs of 12 megapixels in the usual sets, two stand for them: small ones enlarged, which
have little fine detail and few bits, and 64 small ones beside each other, which have much of both. `sharpness` is the
crops' mean absolute Laplacian relative to that of whole decoding.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn.functional import conv2d

from mae.bench.data import Crops, jpegs_in
from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.bench.timing import Quartiles, quartiles, ratios, time_interleaved
from mae.data.packs.encodings import Original, ShortSide

SIDE = 224
LARGE, PARTS = (4032, 3024), 8
LAPLACIAN = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]]).expand(3, 1, 3, 3)


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("photos", type=Path, help="a folder of 64 photographs or more, JPEGs")
    parser.add_argument("--images", type=int, default=10, help="large ones; six times as many small ones")
    parser.add_argument("--turns", type=int, default=5, help="how often each way is timed")
    return parser.parse_args()


def saved(image: Image.Image, quality: int) -> bytes:
    stream = BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def enlarged(file: Path) -> bytes:
    return saved(ImageOps.fit(Image.open(file).convert("RGB"), LARGE, Image.Resampling.BICUBIC), 92)


def mosaic(files: Sequence[Path], number: int) -> bytes:
    whole, size = Image.new("RGB", LARGE), (LARGE[0] // PARTS, LARGE[1] // PARTS)
    for part in range(PARTS**2):
        image = Image.open(files[(number + 7 * part) % len(files)]).convert("RGB")
        whole.paste(ImageOps.fit(image, size), (part % PARTS * size[0], part // PARTS * size[1]))
    return saved(whole, 85)


def short_side(file: Path) -> bytes:
    """As `mae pack` would store it."""
    pixels = np.asarray(Image.open(file).convert("RGB"))
    return ShortSide().pack(Original(name=str(file), image=pixels, data=file.read_bytes(), nodata=None)).data


def timed(crop: Callable[[int], Tensor], count: int) -> float:
    """Seconds a crop."""
    began = time.process_time()
    for number in range(count):
        crop(number)
    return (time.process_time() - began) / count


def sharpness(crops: Tensor) -> float:
    return float(conv2d(crops.float(), LAPLACIAN, groups=3).abs().mean())


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one set of files; rates are crops/s, differences grey levels of 256."""

    kilobytes: float
    rates: dict[str, Quartiles]
    beside_official: dict[str, Quartiles]
    beside_plain: Quartiles
    levels_apart: float
    levels_apart_99: float
    sharpness: float


def compared(contents: Sequence[bytes], turns: int) -> Figures:
    plain, reduced = Crops(contents, SIDE), Crops(contents, SIDE, reduced_decoding=True)
    ways = {"official": plain.as_floats, "Pillow": plain.by_pillow, "plain": plain.ours, "reduced": reduced.ours}
    seconds = time_interleaved(
        {name: partial(timed, crop, len(contents)) for name, crop in ways.items()}, turns=turns, warm_ups=1
    )
    made = [torch.stack([crop(number) for number in range(len(contents))]) for crop in (plain.ours, reduced.ours)]
    apart = (made[0].float() - made[1].float()).abs().flatten()
    return Figures(
        kilobytes=sum(map(len, contents)) / len(contents) / 1000,
        rates={name: quartiles([1 / value for value in values]) for name, values in seconds.items()},
        beside_official={name: ratios(seconds["official"], values) for name, values in seconds.items()},
        beside_plain=ratios(seconds["plain"], seconds["reduced"]),
        levels_apart=float(apart.mean()),
        levels_apart_99=float(apart.kthvalue(int(0.99 * len(apart))).values),
        sharpness=sharpness(made[1]) / sharpness(made[0]),
    )


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    files = jpegs_in(args.photos)
    small, large = files[: 6 * args.images], files[: args.images]
    made = {
        "the photographs": [file.read_bytes() for file in small],
        "a pack's, --short-side 384": [short_side(file) for file in small],
        "12 megapixels, enlarged": [enlarged(file) for file in large],
        "12 megapixels, 64 photographs": [mosaic(files, number) for number in range(args.images)],
    }
    found = {name: compared(contents, args.turns) for name, contents in made.items()}
    titles = ["files", "kB", "official", "plain", "reduced", "reduced / plain", "reduced / official", "levels", "99 %"]
    print(markdown_row([*titles, "sharpness"]))
    for name, its in found.items():
        rates = [its.rates[way].text(0) for way in ("official", "plain", "reduced")]
        cells = [
            name,
            f"{its.kilobytes:,.0f}",
            *rates,
            its.beside_plain.text(2),
            its.beside_official["reduced"].text(2),
        ]
        print(markdown_row([*cells, f"{its.levels_apart:.2f}", f"{its.levels_apart_99:.0f}", f"{its.sharpness:.2f}"]))
    sets = {name: asdict(its) for name, its in found.items()}
    write_figures(args.out, {"machine": machine(torch.device("cpu")), "sets": sets})


if __name__ == "__main__":
    main()
