"""A loop of one's own beside the engine's: steps of each, in turns, in a process each.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/own_loop.py

`plain` is the loop that anybody writes: `model(images)` under autocast, PyTorch's AdamW. `as documented` is that of
docs/guides/using-the-encoder.md: it keeps freed memory, fuses AdamW and gives a plan, so that masked patches alone are
predicted. The engine's steps also clip the gradient and check that the step is finite. Seconds are those of the
processor, so that neighbours do not count; with several threads waiting for each other counts too, so give it one.
"""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from rich.console import Console

import mae
from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import ratios, time_interleaved
from mae.report.terminal.tables import show_grid
from mae.training.device import autocast, choose_precision, keep_freed_memory
from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.optimizer import make_optimizer
from mae.training.schedule import WarmupCosine
from mae.training.settings import CheckpointSpec, TrainingSettings

WAYS = ("engine", "plain", "as documented")
_CPU = torch.device("cpu")


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="mae_vit_compact_patch16", help="a name of 'mae list models'")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    parser.add_argument("--precision", choices=["auto", "fp32", "bf16"], default="auto")
    parser.add_argument("--turns", type=int, default=20, help="how many steps of each are timed")
    parser.add_argument("--worker", choices=WAYS, help="only take a step of this kind for each line of the input")
    return parser.parse_args()


def make_step(way: str, *, model: str, batch_size: int, precision: str) -> Callable[[], torch.Tensor | None]:
    """A training step of new masks; gives its loss, where it is no step of the engine."""
    torch.manual_seed(0)
    network = mae.create_model(model).train()
    assert network.config is not None
    layout = network.config.layout
    images = torch.randn(batch_size, layout.channels, *layout.size)
    if way != "plain":
        keep_freed_memory()
    if way == "engine":
        return _engine_step(network, images, precision)
    fused = {"fused": True} if way == "as documented" else {}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, **fused)

    def step() -> torch.Tensor:
        with autocast(precision, _CPU):
            output = network(images, plan=network.plan(images) if way == "as documented" else None)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return output.loss.detach()

    return step


def _engine_step(network: mae.MaskedAutoencoder, images: torch.Tensor, precision: str) -> Callable[[], None]:
    def batches(step: int) -> Generator[Mapping[str, Any], None, None]:
        while True:
            yield {"images": images, "plan": network.plan(images)}

    trainer = Trainer(
        module=network,
        optimizer=make_optimizer(network, weight_decay=0.05, betas=(0.9, 0.95)),
        batches=batches,
        settings=TrainingSettings(
            total_steps=10**6, batch_size=len(images), accumulate=1, clip_grad=1.0, log_every=50,
            schedule=WarmupCosine(peak=1e-4, floor=0.0, warmup_samples=0, total_samples=10**9),
            precision=precision, checkpoint_every=None,
        ),
        checkpoints=CheckpointSpec(folder=Path(), identity={}, metadata=lambda module: {}),
        device=_CPU, world=World(),
    )  # fmt: skip
    return partial(trainer._train_step, batches(0))


def work(args: Namespace) -> None:
    """Take a step for each line of the input and answer with its seconds."""
    step = make_step(args.worker, model=args.model, batch_size=args.batch_size, precision=args.precision)
    for _ in sys.stdin:
        began = process_time()
        step()
        print(process_time() - began, flush=True)


def main() -> None:
    args = parse_args()
    args.precision = choose_precision(args.precision, _CPU)
    if args.worker:
        work(args)
        return
    options = ("--model", args.model, "--batch-size", str(args.batch_size), "--precision", args.precision)
    with ExitStack() as stack:

        def ask(worker: "subprocess.Popen[str]") -> float:
            assert worker.stdin is not None and worker.stdout is not None
            print(file=worker.stdin, flush=True)
            return float(worker.stdout.readline())

        ways: dict[str, Callable[[], float]] = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--worker", way, *options]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            ways[way] = partial(ask, stack.enter_context(subprocess.Popen(command, text=True, **pipes)))
        seconds = time_interleaved(ways, turns=args.turns)
    title = f"{args.model}, batches of {args.batch_size}, {args.precision}, {torch.get_num_threads()} thread(s)"
    rows = [
        (way, f"{1e3 * median(each):.1f}", ratios(seconds["engine"], each).text(2)) for way, each in seconds.items()
    ]
    show_grid(Console(), title, ["loop", "ms a step", "speed beside the engine"], rows)
    about = {"machine": machine(_CPU), "model": args.model, "batch_size": args.batch_size, "precision": args.precision}
    write_figures(args.out, {**about, "seconds": seconds})


if __name__ == "__main__":
    main()
