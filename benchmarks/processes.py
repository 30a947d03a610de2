"""What processes cost beside threads, and what saving costs, in steps of the same batch.

    python benchmarks/processes.py

Every way trains the same model on the same images, turn by turn; images a second are of whole steps, saves included, by
the clock of the run. On two cores two processes of one thread could at best be twice as fast as one.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import kills
import torch
from kills import Case

import mae

WAYS: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "1 process, 1 thread": (Case(1), 1, {}),
    "1 process, 2 threads": (Case(1), 2, {}),
    "2 processes, DDP": (Case(2), 1, {}),
    "2 processes, FSDP2": (Case(2, sharded=True), 1, {}),
    "1 process, 1 thread, a checkpoint each 10 steps": (Case(1), 1, {"save_every": 10}),
}
_SKIPPED = 5
"""First steps, in which memory is asked for."""


def train(folder: Path, case: Case, threads: int, options: dict[str, Any]) -> float:
    """Images a second of a run."""
    light, kills.OPTIONS = kills.light, options

    def with_threads() -> None:
        light()
        torch.set_num_threads(threads)

    kills.light = with_threads
    try:
        codes = kills.launch(folder, case)
    finally:
        kills.light = light
    if any(codes):
        raise RuntimeError(f"exit codes {codes}; see {folder}-0.log")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first, *_, last = [row for row in rows if "loss" in row and row["step"] >= _SKIPPED]
    return float((last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kills._PATIENCE = 600.0
    options = {
        "source": "builtin:photos", "model": "mae_vit_lesson_patch4", "batch_size": args.batch_size,
        "steps": args.steps, "save_every": 10**6, "device": "cpu", "workers": 0, "skip_doctor": True,
    }  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            for number, (name, (case, threads, changes)) in enumerate(WAYS.items()):
                rates[name].append(train(Path(folder) / f"{turn}-{number}", case, threads, {**options, **changes}))
            sys.stderr.write(f"turn {turn + 1} of {args.turns}\n")
    base = rates[next(iter(WAYS))]
    found = {}
    for name, values in rates.items():
        ratios = [value / one for value, one in zip(values, base, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        found[name] = {"images_per_second": statistics.median(values), "ratio": middle, "lowest": low, "highest": high}
        print(f"| {name} | {statistics.median(values):.0f} | {middle:.2f} ({low:.2f}–{high:.2f}) |")
    if args.out is not None:
        args.out.write_text(json.dumps({**found, "torch": torch.__version__, "mae": mae.__version__}, indent=2) + "\n")


if __name__ == "__main__":
    main()
