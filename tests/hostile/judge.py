"""Runs readers over a corpus under limits: `python judge.py CASES.json`, a JSON line a case.

The process may take 1 GiB of address space beyond what it has once everything is imported (PyTorch alone maps three),
and a case 2 seconds of processor time; waiting counts by the clock, more generously, since machines are shared.
"""

import json
import logging
import resource
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tifffile  # noqa: F401  (imported when first needed otherwise, and under the limit)
import torch
from hostile.readers import CANARIES, READERS, outcome

MEMORY_BYTES = 1 << 30
CPU_SECONDS = 2.0
CLOCK_SECONDS = 10.0


class Hung(BaseException):
    """Not an `Exception`, so that no reader takes it for a broken file."""


def stop(*_: object) -> None:
    raise Hung


def judge(reader: str, path: Path) -> tuple[str, str]:
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_SECONDS)
    try:
        return outcome((READERS | CANARIES)[reader], path)
    except Hung:
        return "hung", f"after {CPU_SECONDS:g} s of computing or {CLOCK_SECONDS:g} s of waiting"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def tell(*words: str) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    logging.disable()  # tifffile's words on each damaged tag
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_text())
    for reader, path in cases["warm_up"]:
        outcome(READERS[reader], Path(path))
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES,) * 2)
    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    for name, reader, path in cases["cases"]:
        tell(name, "started", "")
        tell(name, *judge(reader, Path(path)))


if __name__ == "__main__":
    main()
