"""How step time and memory grow with image size, model size, batch and the number of images, each with its exponent.

    python benchmarks/growth.py --out growth.json            # some minutes; leave the machine alone meanwhile
    python benchmarks/growth.py --device cuda --out growth.json

Steps are of synthetic images: forward, backward and AdamW, the median of some. Memory is what two steps took; on a CPU
by the process's growth over the weights, so that the smallest say little. The order of the images is timed by processor
time, until the first batch is known. Exponents are slopes of a straight line through the logarithms: 1 grows in step, 2
as the square. They are told over all points, and over the last three, where what every step costs anyhow weighs less.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch

from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.bench.step import OwnStep
from mae.data.loading.sampler import AllBut, FullShuffle, RankOrder
from mae.models.presets import create_model
from mae.models.summary import summarise
from mae.pretraining.estimate.profile import PeakMemory
from mae.training.device import choose_device, choose_precision, keep_freed_memory

SIDES = (64, 96, 128, 192, 256, 384)
MODELS = ("mae_vit_compact_patch16", "mae_vit_tiny_patch16", "mae_vit_small_patch16", "mae_vit_small12_patch16",
          "mae_vit_base_patch16_dec384d8b", "mae_vit_base_patch16")  # fmt: skip
BATCHES = (2, 4, 8, 16, 32, 64)
ENTRIES = (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)
LAST = 3
LEAST = 1e-3
"""Seconds or gigabytes: below it there is nothing but noise."""
Measured = tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One thing that grows.

    Attributes:
        what: it is.
        place: its values.
        seconds: of a step, or of making an order ready.
        gigabytes: of memory.
        time_exponent: over all points, and over the last three.
        memory_exponent: likewise.
    """

    what: str
    place: list[float]
    seconds: list[float]
    gigabytes: list[float]
    time_exponent: tuple[float, float]
    memory_exponent: tuple[float, float]


def exponents(place: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Slopes of the logarithms, over all points and over the last three; nan where too little is above the noise."""
    told = [(x, y) for x, y in zip(place, values, strict=True) if y > LEAST]

    def slope(points: Sequence[tuple[float, float]]) -> float:
        x, y = np.log(np.array(points)).T if len(points) > 1 else (np.zeros(0), np.zeros(0))
        return float(np.polyfit(x, y, 1)[0]) if len(points) > 1 else float("nan")

    return slope(told), slope(told[-LAST:])


def grown(what: str, points: Sequence[Measured]) -> Growth:
    place, seconds, gigabytes = (list(values) for values in zip(*points, strict=True))
    return Growth(
        what=what, place=place, seconds=seconds, gigabytes=gigabytes,
        time_exponent=exponents(place, seconds), memory_exponent=exponents(place, gigabytes),
    )  # fmt: skip


def a_step(
    name: str, batch_size: int, device: torch.device, turns: int, **options: Any
) -> tuple[float, float, OwnStep]:
    """Seconds and gigabytes of a step."""
    torch.manual_seed(0)
    precision = choose_precision("auto", device)
    step = OwnStep(create_model(name, **options), "adamw", batch_size, device, precision, False)
    peak = step.warm_up()
    return median(step.once() for _ in range(turns)), peak / 1e9, step


def order(entries: float) -> Measured:
    """Of so many images: processor time until the first batch of 256 is known, and gigabytes."""
    with PeakMemory(torch.device("cpu")) as memory:
        began = process_time()
        shuffle = FullShuffle(numbers=AllBut(int(entries)), batch_size=256, seed=0)
        next(RankOrder(shuffle=shuffle, accumulate=1, rank=0, world=1).from_step(0))
        seconds = process_time() - began
    return entries, seconds, memory.peak_bytes / 1e9


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--turns", type=int, default=5, help="steps timed at each place")
    args = parser.parse_args()
    device = choose_device(args.device)
    if device.type == "cpu":
        keep_freed_memory()
    scale = 8 if device.type == "cuda" else 1  # images a step, so that a GPU has something to do

    def at_side(side: int) -> Measured:
        return side, *a_step("mae_vit_tiny_patch16", 8 * scale, device, args.turns, img_size=side)[:2]

    def of_model(name: str) -> Measured:
        seconds, gigabytes, step = a_step(name, 4 * scale, device, args.turns, img_size=128)
        return summarise(step.model).params / 1e6, seconds, gigabytes

    def of_batch(batch: int) -> Measured:
        return batch * scale, *a_step("mae_vit_tiny_patch16", batch * scale, device, args.turns, img_size=128)[:2]

    axes: list[tuple[str, Callable[[Any], Measured], Sequence[Any]]] = [
        ("side of the image, pixels (tiny)", at_side, SIDES),
        ("parameters, millions (128 pixels)", of_model, MODELS),
        ("images a step (tiny, 128 pixels)", of_batch, BATCHES),
        ("images there are: their order", order, ENTRIES),
    ]
    found = []
    for what, measure, places in axes:
        growth = grown(what, [measure(place) for place in places])
        found.append(growth)
        (time, late_time), (memory, late_memory) = growth.time_exponent, growth.memory_exponent
        print(f"\n{what}: exponent of time {time:.2f}, of memory {memory:.2f}")
        print(f"over the last {LAST}: {late_time:.2f} and {late_memory:.2f}")
        for place, seconds, gigabytes in zip(growth.place, growth.seconds, growth.gigabytes, strict=True):
            print(markdown_row([f"{place:,.4g}", f"{seconds:.4g} s", f"{gigabytes:.3f} GB"]))
    write_figures(args.out, {"machine": machine(device), "growth": [asdict(growth) for growth in found]})


if __name__ == "__main__":
    main()
