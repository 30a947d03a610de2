"""Running a script that lies beside a test file: it imports libraries once, and forks a process for each run."""

import os
import subprocess
import sys
from pathlib import Path

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run_script(script: Path, folder: Path, *, seconds: float) -> None:
    """Run it with a folder to fill, the tests' own paths and those of the benchmarks; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), *sys.path])}
    command = [sys.executable, str(script), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr
