"""The cost of processes against threads, and of saving, in steps of the same batch.

    python benchmarks/processes.py

Every way trains the same model on the same images, turn by turn; images a second are of whole steps, saves included, by
the clock of the run. On two cores two processes of one thread could at best be twice as fast as one.
"""

import json
import os
import tempfile
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import kills
import torch
from kills import Case

from mae.bench.report import machine, markdown_row, script_parser, write_figures
from mae.bench.timing import ratios, time_interleaved

WAYS: dict[str, tuple[Case, int, dict[str, Any]]] = {
    "1 process, 1 thread": (Case(1), 1, {}),
    "1 process, 2 threads": (Case(1), 2, {}),
    "2 processes, DDP": (Case(2), 1, {}),
    "2 processes, FSDP2": (Case(2, sharded=True), 1, {}),
    "1 process, 1 thread, a checkpoint each 10 steps": (Case(1), 1, {"checkpoint_every": 10}),
}
_SKIPPED = 5
"""First steps, in which memory is allocated."""


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
    parser = script_parser(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    kills._PATIENCE = 600.0
    options = {
        "source": "builtin:photos", "model": "mae_vit_lesson_patch4", "batch_size": args.batch_size,
        "steps": args.steps, "checkpoint_every": 10**6, "device": "cpu", "workers": 0, "doctor": False,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        runs = (Path(folder) / str(number) for number in count())
        ways = {
            name: lambda case=case, threads=threads, changes=changes: train(
                next(runs), case, threads, {**options, **changes}
            )
            for name, (case, threads, changes) in WAYS.items()
        }
        rates = time_interleaved(ways, turns=args.turns, warm_ups=0)
    base = rates[next(iter(WAYS))]
    for name, values in rates.items():
        print(markdown_row([name, f"{median(values):.0f}", ratios(values, base).text(2)]))
    write_figures(args.out, {"machine": machine(torch.device("cpu")), "images_per_second": rates})


if __name__ == "__main__":
    main()
