"""Running what torch.compile is asked to compile, away from the tests' own instruments."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def run_compiled(code: str, *arguments: str | Path, folder: Path) -> None:
    """Run Python in a process of its own, from a folder, with arguments; it must succeed.

    Here the compiler would trace the tests' shape checks, which draw random numbers.
    """
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        pytest.skip("torch.compile needs a C compiler on a CPU, and there is none")
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
