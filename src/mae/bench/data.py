"""From files to training crops: Pillow as commonly used against ours, on one core and on all of them."""

import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image
from rich.console import Console
from torch import Tensor

from mae.bench.report import check_figures, machine, write_figures
from mae.bench.timing import Quartiles, quartiles, ratios, time_interleaved
from mae.data.dataset.images import load_images
from mae.data.decode.image import decode, reducible
from mae.data.decode.jpeg import has_fast_decoder
from mae.data.decode.limits import check_workers
from mae.data.loading.loader import IMAGENET_MEAN, IMAGENET_STD, TrainingLoader
from mae.data.sources.open import open_source
from mae.errors import UsageError
from mae.evaluation.common.record import hardware
from mae.modalities.images.crop import Augmentation, random_crop_boxes, reduction, resized_crop
from mae.options import shown
from mae.randomness import sample_keys
from mae.report.terminal.tables import show_grid

_MEAN, _STD = (torch.tensor(values).reshape(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
_JPEG = (".jpg", ".jpeg")
_BATCH = 50
_VIEWS = 5
_BATCHES_A_WORKER = 4
"""Timed in a turn of all cores: with fewer, one worker's time for its batch would decide."""
_PILLOW, _OURS, _LOADER = "Pillow, uint8", "ours", "ours, the loader"

Box = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class DataBench:
    """What is timed.

    Raises:
        UsageError: a size, time or number of workers that makes no sense.
    """

    source: Annotated[str, tyro.conf.Positional]
    """A folder of JPEGs: the reference."""
    also: tuple[str, ...] = ()
    """The same images in other forms, such as packs; read by the loader alone."""
    side: int = 224
    """Pixels of a crop's side."""
    reduced_decoding: bool = False
    """Decode as mae pretrain --reduced-decoding does, but for the reference."""
    workers: Annotated[int | None, shown("as many as cores", "W")] = None
    """Number of threads, and of processes, that load at once."""
    seconds: float = 60.0
    """About how long to measure."""
    out: Annotated[Path | None, shown("nowhere", "FILE.json")] = None
    """Write all figures here."""

    def __post_init__(self) -> None:
        if self.side < 1 or not self.seconds > 0 or (self.workers is not None and self.workers < 1):
            raise UsageError(
                f"--side is {self.side}, --seconds {self.seconds:g}, --workers {self.workers}; expected more than 0"
            )
        check_workers(self.workers)


@dataclass(frozen=True, kw_only=True)
class Way:
    """The figures of one way to load.

    Attributes:
        name: of the way.
        clock: `processor`: images per second of processor time, on one core; `wall`: of wall time, on all cores.
        rate: images/s.
        beside: ratio to the first way of the same clock, turn by turn.
    """

    name: str
    clock: str
    rate: Quartiles
    beside: Quartiles


def run_data_bench(bench: DataBench, console: Console) -> dict[str, Any]:
    """Time every way, show the tables, and give all of it as JSON values.

    Raises:
        UsageError: no such source, too few JPEGs in it, or a file of figures that is there already.
        MAEError: images that cannot be read.
    """
    check_figures(bench.out)
    files = jpegs_in(Path(bench.source))
    if len(files) < _BATCH:
        raise UsageError(f"{bench.source} holds {len(files)} JPEGs; give a folder of {_BATCH} or more")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a process that loads
    try:
        contents = [path.read_bytes() for path in files]
        crops = Crops(contents, bench.side, reduced_decoding=bench.reduced_decoding)
        found = [*_alone(bench, crops), *_together(bench, crops)]
    finally:
        torch.set_num_threads(threads)
    overhead = _rate(found, _OURS) / _rate(found, _LOADER) - 1
    record = {
        "machine": machine(torch.device("cpu")),
        "images": len(files),
        "torchcodec": has_fast_decoder(),
        "reduced_decoding": bench.reduced_decoding,
        "grey_levels_apart": crops.levels_apart(),
        "loader_overhead": overhead,
        "ways": [asdict(way) for way in found],
    }
    _show(console, found, record)
    write_figures(bench.out, record)
    return record


def jpegs_in(folder: Path) -> list[Path]:
    """The JPEGs below a folder, by name; none where it is no folder."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in _JPEG) if folder.is_dir() else []


class Crops:
    """The same crops of the same bytes, for every way to make them."""

    def __init__(self, contents: Sequence[bytes], side: int, *, reduced_decoding: bool = False) -> None:
        self.contents, self.side, self.how = contents, side, Augmentation(reduced_decoding=reduced_decoding)
        sizes = torch.tensor([decode(data, name="an image").shape[:2] for data in contents])
        self.keys = sample_keys(0, 0, torch.arange(len(contents)))
        boxes, flips = random_crop_boxes(self.keys, sizes[:, 0], sizes[:, 1], self.how)
        self.boxes: list[Box] = list(map(tuple, boxes.tolist()))
        self.flips: list[bool] = flips.tolist()

    def by_pillow(self, number: int) -> Tensor:
        """As torchvision's RandomResizedCrop on a Pillow image."""
        top, left, height, width = self.boxes[number]
        image: Image.Image = Image.open(io.BytesIO(self.contents[number])).convert("RGB")
        image = image.crop((left, top, left + width, top + height))
        image = image.resize((self.side, self.side), Image.Resampling.BICUBIC)
        if self.flips[number]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    def as_floats(self, number: int) -> Tensor:
        """With ToTensor and Normalize in the loading process, as the official code has it."""
        return (self.by_pillow(number).contiguous().float().div(255) - _MEAN) / _STD

    def ours(self, number: int) -> Tensor:
        """Decoded and cropped as a run does it."""
        data, size, times = self.contents[number], (self.side, self.side), 1
        if self.how.reduced_decoding and (known := reducible(data, name="an image")) is not None:
            times = reduction(self.keys[number : number + 1], known.height, known.width, self.how, size)
            times = min(times, known.most)
        image = torch.from_numpy(decode(data, name="an image", reduction=times)).permute(2, 0, 1)
        image = image.expand(3, -1, -1)
        return resized_crop(image, self.boxes[number], self.flips[number], size, reduction=times)

    def levels_apart(self) -> float:
        """Of our crops and Pillow's, the mean over all values, in grey levels of 256."""
        numbers = range(len(self.contents))
        return float(
            torch.stack([(self.ours(n).float() - self.by_pillow(n).float()).abs().mean() for n in numbers]).mean()
        )


def _alone(bench: DataBench, crops: Crops) -> list[Way]:
    """On one core, by processor time, which other programs lengthen less."""

    def made(way: Callable[[int], Tensor]) -> Callable[[], float]:
        def run() -> float:
            began = time.process_time()
            for number in range(len(crops.contents)):
                way(number)
            return (time.process_time() - began) / len(crops.contents)

        return run

    loaded = partial(_loaded, bench=bench, workers=0, clock=time.process_time)
    ways = {
        _PILLOW: made(crops.by_pillow),
        "Pillow, float32 (official)": made(crops.as_floats),
        _OURS: made(crops.ours),
        _LOADER: loaded(bench.source),
        f"{_LOADER}, --repeated-aug {_VIEWS}": loaded(bench.source, views=_VIEWS),
        **{f"the loader, {other}": loaded(other) for other in bench.also},
    }
    return _compared(time_interleaved(ways, seconds=bench.seconds / 2), clock="processor")


def _together(bench: DataBench, crops: Crops) -> list[Way]:
    """On all cores, by the wall clock: threads of one process beside processes."""
    workers = bench.workers or hardware(torch.device("cpu"))["cores"]

    def threads() -> float:
        began = time.perf_counter()
        numbers = list(islice(cycle(range(len(crops.contents))), _BATCHES_A_WORKER * workers * _BATCH))
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(crops.ours, numbers):
                pass
        return (time.perf_counter() - began) / len(numbers)

    ways = {
        f"{workers} thread(s)": threads,
        f"{workers} process(es), the loader": _loaded(
            bench.source, bench=bench, workers=workers, clock=time.perf_counter
        ),
    }
    return _compared(time_interleaved(ways, seconds=bench.seconds / 2), clock="wall")


def _loaded(
    source: str, *, bench: DataBench, workers: int, clock: Callable[[], float], views: int = 1
) -> Callable[[], float]:
    """Seconds per crop of the run's own loader, over an epoch or more; starting is not counted."""
    images = load_images(open_source(source, data_root=Path("data")), in_chans=3, memory_limit=0)
    if len(images) < _BATCH:
        raise UsageError(f"{source} holds {len(images)} images; give {_BATCH} or more")
    loader = TrainingLoader(
        images=images,
        batch_size=_BATCH,
        accumulate=1,
        img_size=(bench.side, bench.side),
        seed=0,
        workers=workers,
        views=views,
        augmentation=Augmentation(reduced_decoding=bench.reduced_decoding),
    )

    def run() -> float:
        steps = max(1, len(images) // _BATCH, _BATCHES_A_WORKER * workers)
        with closing(loader.iterate(0)) as batches:
            for _ in range(max(1, 2 * workers)):  # the start, and what workers load ahead
                next(batches)
            began = clock()
            for _ in range(steps):
                next(batches)
            return (clock() - began) / (steps * _BATCH)

    return run


def _compared(seconds: dict[str, list[float]], *, clock: str) -> list[Way]:
    first = next(iter(seconds.values()))
    return [
        Way(name=name, clock=clock, rate=quartiles([1 / each for each in values]), beside=ratios(first, values))
        for name, values in seconds.items()
    ]


def _rate(found: Sequence[Way], name: str) -> float:
    return next(way.rate.median for way in found if way.name == name)


def _show(console: Console, found: Sequence[Way], record: dict[str, Any]) -> None:
    for clock, title in (("processor", "one core, by processor time"), ("wall", "all cores, by the clock")):
        rows = [(way.name, way.rate.text(0), way.beside.text(2)) for way in found if way.clock == clock]
        show_grid(console, title, ["way", "images/s", "ratio to the first"], rows)
    console.print(
        f"{record['images']} images; ours are {record['grey_levels_apart']:.3f} grey levels from Pillow's; the loader "
        f"takes {record['loader_overhead']:.0%} on top of decoding and cropping",
        highlight=False,
    )
