"""What training on 1,000,000,000 images with 512 GPUs asks of a store, of the nodes and of checkpoints; a calculation.

    python benchmarks/goodput.py                   # some seconds
    python benchmarks/goodput.py --gpus 64 --images 1e8

Nothing here is measured on a GPU. The rates follow from our models' arithmetic and an assumed share of an H200's peak;
what else is assumed is a constant below. The share of time that training goes on in (goodput) is Daly's formula for
failures at random (J. T. Daly 2006, A higher order estimate of the optimum checkpoint interval), beside a simulation of
such failures, one after another.
"""

import argparse
import math
import random
from dataclasses import dataclass
from statistics import fmean, stdev

from mae.models.presets import model_config
from mae.models.summary import summarise

MODELS = ("mae_vit_base_patch16", "mae_vit_large_patch16", "mae_vit_huge_patch14")
PEAK, SHARE = 989e12, 0.4  # bf16 products a second of an H100 or H200, and the share that training reaches
IMAGE_KB, PER_SHARD = 54, 2048  # short side 384, JPEG quality 90
INDEX_BYTES, NAME_BYTES, TABLES = 31 + 4, 40, 8  # a row and a shard number; a name, and where it ends
GPUS_A_NODE, IN_PLAY, STREAMS = 8, 2**18, 128
FAILURE_HOURS = 50_000  # of one GPU with its share of the node
COPY_GB_S, WRITE_GB_S, READ_GB_S = 20, 1, 1  # from the GPU to pinned memory; to the store and back, one process
START_S, COMPILE_S = 120, 60  # a job that starts again until its processes meet; compiling, first batches
SAVES = (60, 300, 900, 1800, 3600, 10800)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=float, default=1e9)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--failures", type=int, default=4000, help="how many to simulate for each row")
    return parser.parse_args()


@dataclass(frozen=True, kw_only=True)
class Load:
    """What one model asks for; rates of the whole job."""

    model: str
    gflops: float
    images_per_s: float
    gb_per_s: float
    shards_per_s: float
    epoch_hours: float
    checkpoint_gb: float

    @property
    def stall_s(self) -> float:
        """Training waits for the copy to memory; writing goes on beside it."""
        return self.checkpoint_gb / COPY_GB_S

    @property
    def written_s(self) -> float:
        """Training would wait so long if it also waited for the store."""
        return self.checkpoint_gb / WRITE_GB_S

    @property
    def restart_s(self) -> float:
        """From a failure until steps are computed again."""
        return START_S + self.checkpoint_gb / READ_GB_S + COMPILE_S


def load_of(model: str, *, gpus: int, images: float) -> Load:
    found = summarise(model_config(model))
    flops = found.step_flops
    rate = gpus * SHARE * PEAK / flops
    return Load(
        model=model,
        gflops=flops / 1e9,
        images_per_s=rate,
        gb_per_s=rate * IMAGE_KB / 1e6,
        shards_per_s=rate / PER_SHARD,
        epoch_hours=images / rate / 3600,
        checkpoint_gb=3 * 4 * found.params / 1e9,  # weights and two averages, float32
    )


def goodput(checkpoint_every: float, stall: float, restart: float, failures_every: float) -> float:
    """The share of time that is kept as progress, where failures come at random, restarts and saves included.

    A stretch of work with its save is done again from its start after each failure, so it takes
    M e^(R/M) (e^((t + d)/M) - 1) on average.
    """
    expected = (
        failures_every * math.exp(restart / failures_every) * math.expm1((checkpoint_every + stall) / failures_every)
    )
    return checkpoint_every / expected


def best_interval(stall: float, failures_every: float) -> float:
    """Young's first estimate of the best time between saves."""
    return math.sqrt(2 * stall * failures_every)


def simulated(
    checkpoint_every: float, stall: float, restart: float, failures_every: float, *, failures: int, seed: int = 0
) -> tuple[float, float]:
    """The same by failures drawn one after another; the mean of twenty parts and its standard error."""
    draw, shares = random.Random(seed), []
    for _ in range(20):
        elapsed = kept = 0.0
        for _ in range(max(1, failures // 20)):
            left = draw.expovariate(1 / failures_every)
            elapsed += left
            # A failure can come while the job is still starting again.
            left -= restart
            if left > 0:
                kept += checkpoint_every * (left // (checkpoint_every + stall))
        shares.append(kept / elapsed)
    return fmean(shares), stdev(shares) / math.sqrt(len(shares))


def show_loads(loads: list[Load], args: argparse.Namespace) -> None:
    nodes = args.gpus / GPUS_A_NODE
    print(f"{args.images:,.0f} images of {IMAGE_KB} KB, {args.gpus} GPUs, {nodes:g} nodes; {SHARE:.0%} of peak assumed")
    print(f"{'':24}{'GFLOP/image':>12}{'images/s':>12}{'GB/s':>8}{'shards/s':>10}{'GB/s a node':>12}{'epoch, h':>10}")
    for load in loads:
        print(
            f"{load.model:24}{load.gflops:12.0f}{load.images_per_s:12,.0f}{load.gb_per_s:8.1f}{load.shards_per_s:10.0f}"
            f"{load.gb_per_s / nodes:12.2f}{load.epoch_hours:10.2f}"
        )
    print("\nrequests a second to the store: an image each, or shards as wholes")
    for load in loads:
        print(f"{load.model:24}{load.images_per_s:12,.0f}{load.shards_per_s:12,.0f}")
    shard_gb = PER_SHARD * IMAGE_KB / 1e6
    streams, shards = max(1.0, STREAMS / nodes), IN_PLAY / STREAMS / PER_SHARD + 1
    print(f"\npack: {args.images * IMAGE_KB / 1e9:,.0f} TB, {args.images / PER_SHARD:,.0f} shards of {shard_gb:.2f} GB")
    rows, names = args.images * INDEX_BYTES / 1e9, args.images * (NAME_BYTES + TABLES) / 1e9
    print(f"index: rows {rows:.0f} GB, names {names:.0f} GB")
    print(f"cache of a node: {streams:g} streams x {shards:g} shards, {streams * shards * shard_gb:.2f} GB, twice that")
    print("with what comes next")


def show_goodput(load: Load, args: argparse.Namespace) -> None:
    every = FAILURE_HOURS / args.gpus * 3600
    restart = load.restart_s
    print(f"\n{load.model}: checkpoint {load.checkpoint_gb:.2f} GB, restart {restart:.0f} s")
    print(f"stall {load.stall_s:.2f} s, or {load.written_s:.1f} s where training waits for the store; ", end="")
    print(f"a failure each {every / 3600:.1f} h")
    print(f"{'save every':>12}{'formula':>10}{'simulated':>20}{'waiting':>10}")
    best, best_waiting = best_interval(load.stall_s, every), best_interval(load.written_s, every)
    for checkpoint_every in sorted((*SAVES, best, best_waiting)):
        formula = goodput(checkpoint_every, load.stall_s, restart, every)
        mean, error = simulated(checkpoint_every, load.stall_s, restart, every, failures=args.failures)
        assert abs(mean - formula) < 5 * error + 1e-4, (checkpoint_every, mean, formula, error)
        waiting = goodput(checkpoint_every, load.written_s, restart, every)
        told = {best: " best", best_waiting: " best if it waits"}.get(checkpoint_every, "")
        print(f"{checkpoint_every:10.0f} s{formula:10.3%}{mean:12.3%} +- {error:.3%}{waiting:10.3%}{told}")


def main() -> None:
    args = parse_args()
    loads = [load_of(model, gpus=args.gpus, images=args.images) for model in MODELS]
    show_loads(loads, args)
    for load in loads[1:]:
        show_goodput(load, args)


if __name__ == "__main__":
    main()
