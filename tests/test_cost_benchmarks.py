"""The benchmarks of what objectives, guards and Muon cost still run; how long anything takes is no test."""

import json
import sys
from pathlib import Path

import guards
import muon
import objective
import pytest

TINY = ["--model", "mae_vit_lesson_patch4", "--batch-size", "2", "--turns", "2"]


@pytest.mark.slow
def test_the_costs_of_guards_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["guards.py", *TINY, "--steps", "1", "--out", str(tmp_path / "found.json")])
    guards.main()
    assert json.loads((tmp_path / "found.json").read_text())["seconds"].keys() == {"without", "with"}


@pytest.mark.slow
def test_the_costs_of_objectives_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["objective.py", *TINY, "--out", str(tmp_path / "found.json")])
    objective.main()
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows["plain"]["median"] == 1 and {"laplacian", "uniformity", "whole run of 800 epochs"} < rows.keys()


def test_steps_of_muon_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--seconds", "0.1", "--out", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", ["muon.py", *options])
    muon.main()
    assert json.loads((tmp_path / "found.json").read_text())["seconds"].keys() == {"ours", "torch"}
    monkeypatch.setattr(muon, "BOUND", 0.0)
    with pytest.raises(SystemExit, match="nothing was timed"):
        muon.main()
