"""What every test runs under."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before any module of ours: its shape checks make Python compile anew what our modules are the first to import.
import scipy.stats  # noqa: F401
import torch
import torch._dynamo
import torchvision.transforms.v2  # noqa: F401
from light import few_digits, in_float32, without_doctor

# Tiny models lose more to threads that wait for each other than they gain; the processes that tests start as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _without_doctor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin without the doctor's checks but in tests marked `doctor`."""
    if request.node.get_closest_marker("doctor") is None:
        without_doctor(monkeypatch)


@pytest.fixture(autouse=True)
def _few_digits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All the embedded digits are there only in tests marked `digits`."""
    if request.node.get_closest_marker("digits") is None:
        few_digits(monkeypatch)


@pytest.fixture(autouse=True)
def _in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    in_float32(monkeypatch)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)
