"""Damaged inputs to every reader of something from outside: each must end in a value or in one of our errors.

    python benchmarks/fuzz.py --inputs 100000                 # so many in all, in turn over the readers
    python benchmarks/fuzz.py --seconds 60 --reader image     # one reader, so long
    python benchmarks/fuzz.py --seed 7 --keep faults          # other inputs; those that are faults are kept

The inputs are valid ones with some bits turned, bytes changed, pieces cut, doubled or taken from another; the same
seed gives the same inputs. The process may take 1 GiB beyond what it has at the start. An input that takes over two
seconds of processor time, or ends in an error that is not ours, is a fault; the exit code says whether there was one.
"""

import argparse
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from hostile.judge import MEMORY_BYTES, judge, stop
from hostile.mutations import Desk, damages, mutated, seeds

COLUMNS = ("ok", "refused", "crashed", "hung")
SHOWN = 3
"""Faults of one kind that are told one by one."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many inputs, over all readers")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--reader", choices=sorted(seeds()), help="this one alone")
    parser.add_argument("--seed", type=int, default=0, help="decides the inputs")
    parser.add_argument("--keep", type=Path, help="a folder that inputs which are faults are written to")
    return parser.parse_args()


def limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)


def main() -> int:
    args = parse_args()
    logging.disable()  # tifffile's words on each damaged tag
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # and libtiff's
    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    valid = {kind: inputs for kind, inputs in seeds().items() if args.reader in (None, kind)}
    kinds, counts, slowest = list(valid), Counter[tuple[str, str]](), defaultdict(float)
    began, faults, told = time.monotonic(), 0, Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        desk = Desk(Path(folder))
        for kind, inputs in valid.items():
            judge(*desk.lay(kind, inputs[0]))  # what is imported late counts for no limit
        limit_memory()
        for number in range(args.inputs):
            if time.monotonic() - began > args.seconds:
                break
            rng = np.random.default_rng((args.seed, number))
            kind = kinds[number % len(kinds)]
            first, second = (valid[kind][rng.integers(len(valid[kind]))] for _ in range(2))
            data = mutated(first, second, damages(rng))
            started = time.process_time()
            verdict, said = judge(*desk.lay(kind, data))
            slowest[kind] = max(slowest[kind], time.process_time() - started)
            counts[kind, verdict] += 1
            if verdict in ("crashed", "hung"):
                faults += 1
                told[kind, said[:20]] += 1
                if told[kind, said[:20]] <= SHOWN:
                    print(f"{kind}, seed {args.seed}, input {number}: {verdict}: {said[:200]}", flush=True)
                if args.keep:
                    args.keep.mkdir(parents=True, exist_ok=True)
                    (args.keep / f"{kind}-{args.seed}-{number}".replace(" ", "-")).write_bytes(data)
    print(f"{'reader':<14}{'inputs':>9}" + "".join(f"{name:>9}" for name in COLUMNS) + f"{'slowest':>10}")
    for kind in kinds:
        row = [counts[kind, name] for name in COLUMNS]
        print(f"{kind:<14}{sum(row):9,}" + "".join(f"{count:9,}" for count in row) + f"{slowest[kind]:8.2f} s")
    print(f"{sum(counts.values()):,} inputs in {time.monotonic() - began:.0f} s, {faults} faults, seed {args.seed}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
