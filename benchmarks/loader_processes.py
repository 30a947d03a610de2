"""Images a second that loader processes bring, and the main process's time for each: small tensors sent or shared.

    python benchmarks/loader_processes.py cifar10.zip                    # half a minute
    python benchmarks/loader_processes.py photos/ --img-size 224 --batch-size 64 --workers 2

A tensor in shared memory takes a conversation of two processes, so that a worker sends the values of small ones. Both
ways take turns, each with processes of its own.
"""

from contextlib import closing
from time import perf_counter, process_time

import torch
from rich.console import Console

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles, ratios
from mae.data.loading import loader
from mae.pretraining.build import make_loader
from mae.pretraining.resolve import RunContext, prepare_run
from mae.recipes import recipe_config
from mae.report.terminal.tables import show_grid
from mae.training.distributed import World

TURNS, FIRST = 5, 10
"""Of each way; batches that are not counted, while processes start and then all deliver at once."""
WAYS = {"shared memory alone": -1, "small ones sent": loader._BY_VALUE}


def turn(prepared: RunContext, seconds: float) -> tuple[float, float]:
    """Images a second, and microseconds of the main process an image."""
    with closing(make_loader(prepared).iterate(0)) as batches:
        for _ in range(FIRST):
            next(batches)
        began, worked, count = perf_counter(), process_time(), 0
        while perf_counter() - began < seconds:
            count += len(next(batches).images)
        return count / (perf_counter() - began), 1e6 * (process_time() - worked) / count


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("source")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="of each turn")
    args = parser.parse_args()
    device = torch.device("cpu")
    config = recipe_config("mae").override(
        {
            "source": args.source, "model": "mae_vit_lesson_patch4", "img_size": args.img_size, "device": "cpu",
            "batch_size": args.batch_size, "workers": args.workers, "out": "none",
        }
    )  # fmt: skip
    prepared = prepare_run(config, None, device, World(), resume=False)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    costs: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(TURNS):
        for way, limit in WAYS.items():
            loader._BY_VALUE = limit  # read by the processes, which are forked behind this
            rate, cost = turn(prepared, args.seconds)
            rates[way].append(rate)
            costs[way].append(cost)
    first = next(iter(WAYS))
    rows = [
        (way, quartiles(found).text(0), ratios(found, rates[first]).text(2), quartiles(costs[way]).text(1))
        for way, found in rates.items()
    ]
    title = f"{args.source}, {args.img_size} pixels, batches of {args.batch_size}, {args.workers} processes"
    show_grid(Console(width=110), title, ["tensors", "images/s", "times as many", "main process, us an image"], rows)
    write_figures(args.out, {"machine": machine(device), "rates": rates, "main": costs})


if __name__ == "__main__":
    main()
