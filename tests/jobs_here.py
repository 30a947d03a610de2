"""Studies whose runs are computed in this process: starting one for each takes longer than a tiny run."""

import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from light import in_float32, without_pictures

from mae.experiments.core import runner, worker


class _Here:
    """Stands in for a process: the run is over when it starts."""

    def __init__(self, command: list[str], **given: Any) -> None:
        self.stdin = io.BytesIO()
        self._code = worker.main(Path(command[-2]), Path(command[-1]))

    def poll(self) -> int:
        return self._code


def run_jobs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without the pictures that a run draws as it goes, and in float32, as every test computes."""
    here = SimpleNamespace(Popen=_Here, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(runner, "subprocess", here)
    monkeypatch.setattr(worker, "_stop_with_parent", lambda: None)  # which reads this process's input
    without_pictures(monkeypatch)
    in_float32(monkeypatch)
