"""What every test runs under."""

import os
from importlib import import_module

import pytest
import torch

# Tiny models lose more to threads that wait for each other than they gain; the processes that tests start as well.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def _without_doctor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs begin without the doctor's checks, seconds each, but in tests marked `doctor`."""
    if request.node.get_closest_marker("doctor") is None:
        doctor = import_module("mae.pretraining.doctor")
        found = doctor.Diagnosis(findings=(), seconds=0.0)
        monkeypatch.setattr("mae.pretraining.run.examine", lambda prepared, model: found)
