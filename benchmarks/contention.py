"""How long a thread should spin while it waits for the others: images a second alone, and beside a busy process.

    python benchmarks/contention.py
    python benchmarks/contention.py --model mae_vit_compact_patch16 --batch-size 32 --turns 10

Each way of waiting trains in a process of its own, since PyTorch reads it once. They take turns, alone and beside a
process that keeps one core busy; medians and quartiles. `one thread` is what a run would do that leaves the other cores
alone. Leave the machine alone meanwhile.
"""

import os
import subprocess
import sys
from argparse import SUPPRESS, Namespace
from statistics import median
from time import perf_counter, sleep

import torch

from mae.bench.report import machine, script_parser, write_figures
from mae.bench.timing import quartiles

WAYS = {
    "PyTorch's default": {},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
    "GOMP_SPINCOUNT=5000": {"GOMP_SPINCOUNT": "5000"},
    "GOMP_SPINCOUNT=3000": {"GOMP_SPINCOUNT": "3000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "GOMP_SPINCOUNT=300": {"GOMP_SPINCOUNT": "300"},
    "GOMP_SPINCOUNT=0": {"GOMP_SPINCOUNT": "0"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="mae_vit_lesson_patch4", help="a name of 'mae list models'")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step")
    parser.add_argument("--turns", type=int, default=10, help="how often each is timed, alone and beside")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--serve", action="store_true", help=SUPPRESS)
    return parser.parse_args()


def serve(args: Namespace) -> None:
    """Train for as many seconds as each line of the input says, and answer with images a second."""
    from mae.models.presets import create_model
    from mae.training.device import autocast, choose_precision, keep_freed_memory
    from mae.training.optimizer import make_optimizer

    keep_freed_memory()
    model, device = create_model(args.model), torch.device("cpu")
    assert model.config is not None
    optimizer = make_optimizer(model, weight_decay=0.05, betas=(0.9, 0.95))
    images = torch.randn(args.batch_size, model.config.layout.channels, *model.config.layout.size)
    precision = choose_precision("auto", device)
    for line in sys.stdin:
        steps, began = 0, perf_counter()
        while perf_counter() - began < float(line):
            with autocast(precision, device):
                loss = model(images).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        print(steps * args.batch_size / (perf_counter() - began), flush=True)


def ask(server: subprocess.Popen[str], seconds: float) -> float:
    assert server.stdin is not None and server.stdout is not None
    print(seconds, file=server.stdin, flush=True)
    return float(server.stdout.readline())


def main() -> None:
    args = parse_args()
    if args.serve:
        return serve(args)
    command = [sys.executable, __file__, "--serve", "--model", args.model, "--batch-size", str(args.batch_size)]
    servers = {
        name: subprocess.Popen(
            command, env={**os.environ, **way}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, way in WAYS.items()
    }
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in WAYS}
    try:
        for server in servers.values():
            ask(server, args.seconds)  # warms up
        for turn in range(args.turns):
            for beside in (0, 1):
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if beside else None
                sleep(0.2)
                for name in list(WAYS) if turn % 2 else reversed(list(WAYS)):
                    found[name][beside].append(ask(servers[name], args.seconds))
                if busy is not None:
                    busy.kill()
                    busy.wait()
    finally:
        for server in servers.values():
            server.kill()
    usual = [median(rates) for rates in found["PyTorch's default"]]
    print(f"{args.model}, batch {args.batch_size}, {os.cpu_count()} cores; images/s, and over the default's")
    for name, both in found.items():
        cells = (f"{quartiles(rates).text(0)} {median(rates) / of:.2f}" for rates, of in zip(both, usual, strict=True))
        print(f"{name:24} alone {'  beside a busy core '.join(cells)}")
    write_figures(args.out, {"machine": machine(torch.device("cpu")), "images_per_second": found})


if __name__ == "__main__":
    main()
