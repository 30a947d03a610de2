"""The order of a thousand million images on 512 processes: time and memory, and whether the slices fit together.

    python benchmarks/billion.py                   # about two minutes on one core
    python benchmarks/billion.py --images 1e8 --ranks 64 --batch-size 4096

Only the order is computed: there are no images. Times are of the processor, so that other work does not count. The
shards are of 2,048 images less some that could not be read. Each shuffle is measured in a process of its own, whose
memory before it begins is told too. One process stands for a rank; the others' slices are computed in it as well, to
see that together they are the batch.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from time import process_time

import torch

from mae.data.loading.sampler import AllBut, BlockShuffle, FullShuffle, RankOrder

PER_SHARD, LEFT_OUT = 2048, 2000
TIMED_STEPS, TILED_STEPS, WINDOW_STEPS = 200, 5, 64
GPUS_A_NODE = 8


@dataclass(frozen=True, kw_only=True)
class Result:
    """What was measured of one shuffle: processor time, MB and counts."""

    shuffle: str
    images: int
    shards: int
    ranks: int
    batch_size: int
    before_mb: float
    peak_mb: float
    start_s: float
    resume_s: float
    step_us: float
    whole_step_ms: float
    tiled_steps: int
    distinct_ids: int
    node_shards: float
    node_shards_most: int
    told_ms: float


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16384, help="images a step, over all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shuffle", choices=["blocks", "full"], help="this one, in this process, as JSON")
    parser.add_argument("--out", type=Path, help="write the results as JSON here")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.shuffle is not None:
        print(json.dumps(asdict(measured(args))))
        return
    rows = [in_its_own_process(shuffle) for shuffle in ("blocks", "full")]
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, one thread")
    for name in rows[0]:
        print(f"{name:18}", *(f"{row[name]:>16,.6g}" if row[name] != row["shuffle"] else row[name].rjust(16)
                              for row in rows))  # fmt: skip
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))


def in_its_own_process(shuffle: str) -> dict[str, float]:
    """The same command for one shuffle."""
    done = subprocess.run([sys.executable, *sys.argv, "--shuffle", shuffle], stdout=subprocess.PIPE, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measured(args: argparse.Namespace) -> Result:
    torch.set_num_threads(1)
    before, draw = peak_mb(), random.Random(args.seed)
    began = process_time()
    shuffle, total, shards = made(args)
    order = RankOrder(shuffle=shuffle, accumulate=1, rank=args.ranks // 3, world=args.ranks)
    next(order.from_step(0))
    start = process_time() - began

    step = draw.randrange(3 * shuffle.steps_per_epoch)  # in one of the first epochs
    began = process_time()
    steps = order.from_step(step)
    first = next(steps)
    resume = process_time() - began
    began = process_time()
    for _ in islice(steps, TIMED_STEPS):
        pass
    each = (process_time() - began) / TIMED_STEPS
    assert next(order.from_step(step)) == first

    whole = check_tiling(args, shuffle, [draw.randrange(shuffle.steps_per_epoch) for _ in range(TILED_STEPS)], total)
    distinct = check_distinct(shuffle, draw.randrange(shuffle.steps_per_epoch - WINDOW_STEPS))
    used, most, told = node_shards(args, shuffle, step)
    return Result(
        shuffle=args.shuffle, images=total, shards=shards, ranks=args.ranks, batch_size=args.batch_size,
        before_mb=before, peak_mb=peak_mb(), start_s=start, resume_s=resume, step_us=1e6 * each,
        whole_step_ms=1e3 * whole, tiled_steps=TILED_STEPS, distinct_ids=distinct, node_shards=used,
        node_shards_most=most, told_ms=1e3 * told,
    )  # fmt: skip


def made(args: argparse.Namespace) -> tuple[BlockShuffle | FullShuffle, int, int]:
    """The shuffle, over all images but those that are held out, how many images there are, and in how many shards."""
    generator = torch.Generator().manual_seed(args.seed)
    shards = round(args.images / PER_SHARD)
    # A thousandth of the files are bad, as a pack's writer finds them: some in nine of ten shards.
    bad = torch.poisson(torch.full((shards,), PER_SHARD / 1000), generator=generator).long()
    sizes = PER_SHARD - bad
    total = int(sizes.sum())
    numbers = AllBut(total, torch.randperm(4 * LEFT_OUT, generator=generator)[:LEFT_OUT])  # of some first shards
    if args.shuffle == "full":
        return FullShuffle(numbers=numbers, batch_size=args.batch_size, seed=args.seed), total, 0
    return BlockShuffle(numbers, sizes, batch_size=args.batch_size, seed=args.seed), total, shards


def check_tiling(args: argparse.Namespace, shuffle: BlockShuffle | FullShuffle, steps: list[int], total: int) -> float:
    """That the ranks' slices, in order, are the batch; the seconds that a whole batch takes one process."""
    orders = [RankOrder(shuffle=shuffle, accumulate=1, rank=rank, world=args.ranks) for rank in range(args.ranks)]
    times = []
    for step in steps:
        epoch = shuffle.epoch(2)
        batch, began = epoch.ids(step, 0, args.batch_size), process_time()
        epoch.ids(step, 0, args.batch_size)
        times.append(process_time() - began)
        slices = [epoch.ids(step, begin, end) for order in orders for begin, end in order.slots]
        assert torch.equal(torch.cat(slices), batch)
        assert 0 <= int(batch.min()) and int(batch.max()) < total and len(batch.unique()) == args.batch_size
    return median(times)


def check_distinct(shuffle: BlockShuffle | FullShuffle, step: int) -> int:
    """That no image comes twice in many steps in a row; how many images these are."""
    epoch = shuffle.epoch(1)
    ids = torch.cat([epoch.ids(number, 0, shuffle.batch_size) for number in range(step, step + WINDOW_STEPS)])
    assert len(ids.unique()) == len(ids)
    return len(ids)


def node_shards(args: argparse.Namespace, shuffle: BlockShuffle | FullShuffle, step: int) -> tuple[float, int, float]:
    """Shards that a node of eight ranks needs at a time, the most there can be, and the seconds to tell some."""
    nodes = max(1, args.ranks // GPUS_A_NODE)
    node = RankOrder(shuffle=shuffle, accumulate=1, rank=nodes // 3, world=nodes)
    began = process_time()
    stretches = list(islice(node.stretches(step), 50))
    told = process_time() - began
    used = sum(len(stretch.blocks) for stretch in stretches) / max(1, len(stretches))
    assert all(len(stretch.blocks) <= node.most_blocks for stretch in stretches)
    return used, node.most_blocks, told


def peak_mb() -> float:
    """The most memory this process has held."""
    scale = 1 if sys.platform == "darwin" else 1024  # bytes there, kilobytes on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


if __name__ == "__main__":
    main()
