"""Steps of a run on a GPU, asked for kernel by kernel and replayed as CUDA graphs (`--cuda-graphs`).

    python benchmarks/cuda_graphs.py                  # the lesson model, a minute; leave the machine alone meanwhile
    python benchmarks/cuda_graphs.py --model mae_vit_tiny_patch16 --img-size 224 --batch-size 256
    python benchmarks/cuda_graphs.py --recipe mae --device cpu      # to try the script: there are no graphs on a CPU

The trainer's own steps, with masks, clipping, optimizer and schedule, on some batches that lie on the device: nothing
is loaded. Plain and compiled blocks, each with and without graphs.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from latency import show_ways

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import time_interleaved, timed
from mae.layers.compiled import compile_blocks, compiling, suppressed_errors
from mae.pretraining.build import fresh_model, make_trainer
from mae.pretraining.resolve import prepare_run
from mae.recipes import recipe_config
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.engine import Trainer

BATCHES, WARM_UP = 8, 20
"""In memory, one after the other; steps before any is timed, of which the last are replayed."""
STEPS = 10
"""In a turn."""


def parser() -> ArgumentParser:
    parser = script_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--model", default="mae_vit_lesson_patch4")
    parser.add_argument("--img-size", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seconds", type=float, default=20)
    return parser


def stepping(trainer: Trainer) -> Callable[[], None]:
    """Some of its steps, behind others that are not timed."""
    with closing(trainer.batches(0)) as batches:
        there: Iterator[Mapping[str, Any]] = cycle(list(islice(batches, BATCHES)))

    def some(count: int = STEPS) -> None:
        for _ in range(count):
            trainer._train_step(there)

    some(WARM_UP)
    if trainer._graphed is not None and not trainer._graphed.is_recorded:
        raise SystemExit("steps are not replayed: memory is short, or nothing is gained; nothing was timed")
    return some


def main() -> None:
    args = parser().parse_args()
    device = choose_device(args.device)
    with TemporaryDirectory(prefix="mae-graphs-") as aside, compiling(None), suppressed_errors() as errors:
        config = recipe_config(args.recipe).override(
            {
                "source": "builtin:photos", "model": args.model, "img_size": args.img_size, "workers": 0,
                "batch_size": args.batch_size, "steps": 10**6, "epochs": None, "device": args.device,
                "precision": args.precision, "out": str(Path(aside) / "run"),
            }
        )  # fmt: skip
        prepared = prepare_run(config, None, device, World(), resume=False)
        ways: dict[str, Callable[[], float]] = {}
        for compiled in (False, True):
            for graphs in (False, True) if device.type == "cuda" else (False,):
                run = replace(prepared, config=prepared.config.override({"cuda_graphs": graphs}))
                model = fresh_model(run)
                compile_blocks(model, on=compiled)
                some = stepping(make_trainer(run, model))
                way = " ".join(["compiled" if compiled else "plain", *(["as CUDA graphs"] if graphs else [])])
                ways[way] = lambda some=some: timed(some, device) / STEPS
        seconds = time_interleaved(ways, seconds=args.seconds)
    if errors:
        raise SystemExit(f"the blocks cannot be compiled here ({errors[0]}); what was timed says nothing")
    show_ways(f"A step of {args.model}, batches of {args.batch_size}, {args.recipe}", seconds, beside="plain")
    write_figures(args.out, {"machine": machine(device), "model": args.model, "seconds": seconds})


if __name__ == "__main__":
    main()
