"""How long commands take from the Enter key on: whole processes, one after another.

    python benchmarks/start.py photos/
    python benchmarks/start.py photos/ --labelled builtin:digits --beside ../other-checkout --turns 3

`pretrain` counts until the first step stands in the log, everything else until the process ends. With `--beside` each
command is also run by the code of another checkout, in turns. Medians; leave the machine alone meanwhile.
"""

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import torch

from mae.bench.report import machine, script_parser, write_figures

_PATIENCE = 600  # seconds, after which a command that writes no step counts as broken
_HERE = Path(__file__).resolve().parents[1]


def parse_args() -> Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("images", type=Path, help="a folder of photographs")
    parser.add_argument("--labelled", default="builtin:digits", help="labelled images for 'evaluate all'")
    parser.add_argument("--img-size", default="96", help="of the model")
    parser.add_argument("--beside", type=Path, help="another checkout of this project")
    parser.add_argument("--turns", type=int, default=3, help="how often each is timed")
    return parser.parse_args()


def start(code: Path, *words: str) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "PYTHONPATH": str(code / "src")}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "mae", *words], env=environment, **quiet)


def whole(code: Path, *words: str) -> float:
    """Seconds until it ends, which must be well."""
    began = perf_counter()
    process = start(code, *words)
    if process.wait() != 0:
        sys.exit(f"{code}: mae {' '.join(words)} ended with {process.returncode}; run it to see why")
    return perf_counter() - began


def first_step(code: Path, out: Path, *words: str) -> float:
    """Seconds until one more step stands in the log; the run is then stopped as by Ctrl-C."""
    log, began = out / "metrics.jsonl", perf_counter()
    steps = rows(log)
    process = start(code, "pretrain", *words, "--out", str(out))
    while rows(log) == steps:
        if process.poll() is not None or perf_counter() - began > _PATIENCE:
            process.kill()
            sys.exit(f"{code}: mae pretrain {' '.join(words)} took no step; run it to see why")
        sleep(0.01)
    seconds = perf_counter() - began
    process.send_signal(signal.SIGINT)
    process.wait()
    return seconds


def rows(log: Path) -> int:
    """Steps in a log."""
    return log.read_text().count('"lr"') if log.exists() else 0


def one_turn(code: Path, args: Namespace, place: Path) -> dict[str, float]:
    """Each command once, in the order of a user's first hour."""
    photos, size = str(args.images), ["--img-size", args.img_size]
    run, pictures = place / "run", sorted(args.images.rglob("*.jp*g"))[:2]
    times = {
        "evaluate knn --help": whole(code, "evaluate", "knn", "--help"),
        "show NAME": whole(code, "show", "mae_vit_base_patch16"),
        "list models": whole(code, "list", "models"),
        "plan": whole(code, "plan", photos, *size),
        # So few epochs that any version writes a row for every step.
        "pretrain": first_step(code, run, photos, *size, "--epochs", "20"),
        "pretrain --no-doctor": first_step(code, place / "other", photos, *size, "--epochs", "20", "--no-doctor"),
        "pretrain --resume": first_step(code, run, "--resume"),
        "neighbours": whole(code, "neighbours", str(run), photos, "--out", str(place / "neighbours.png")),
        "embed, after it": whole(code, "embed", str(run), photos, "--out", str(place / "features.npz")),
    }
    if pictures:
        times["reconstruct, 2 images"] = whole(
            code, "reconstruct", str(run), *map(str, pictures), "--out", str(place / "reconstruction.png")
        )
    times["evaluate all"] = whole(
        code, "evaluate", "all", str(run), "--data", args.labelled, "--out", str(place / "evaluation")
    )
    return times


def main() -> None:
    args = parse_args()
    codes = {"here": _HERE} | ({"beside": args.beside.resolve()} if args.beside else {})
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(args.turns):
        for name, code in codes.items():
            with TemporaryDirectory() as place:
                for what, seconds in one_turn(code, args, Path(place)).items():
                    times.setdefault(what, {}).setdefault(name, []).append(seconds)
    figures = {"machine": machine(torch.device("cpu")), "seconds": times}
    print(figures["machine"])
    print("| command | " + " | ".join(f"{name}, s" for name in codes) + " |")
    print("|---|" + "---|" * len(codes))
    for what, found in times.items():
        print(f"| `{what}` | " + " | ".join(f"{median(found[name]):.1f}" for name in codes) + " |")
    write_figures(args.out, figures)


if __name__ == "__main__":
    main()
