"""How jobs are spread over processes and GPUs."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from mae.errors import UsageError
from mae.experiments import runner
from mae.experiments.job import Job, Judgement, job_name
from mae.experiments.runner import Place, run_jobs, write_specs


def jobs(count: int, labelled: Path, root: Path) -> list[Job]:
    """Jobs that fail as soon as they begin to judge: there is no such model."""
    return [
        Job(
            arm=f"model{number}", seed=0, folder=root / f"{number}", data=str(labelled), data_root=Path("data"),
            device="auto", judgements=(Judgement(protocol="knn", options={}),), model=f"nowhere/{number}",
        )
        for number in range(count)
    ]  # fmt: skip


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int]]:
    """For each process the GPU it was given, and how many were running already."""
    found: list[tuple[str | None, int]] = []
    processes: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*args: Any, env: dict[str, str], **kwargs: Any) -> subprocess.Popen[bytes]:
        found.append((env.get("CUDA_VISIBLE_DEVICES"), sum(process.poll() is None for process in processes)))
        processes.append(real(*args, env=env, **kwargs))
        return processes[-1]

    monkeypatch.setattr(runner.subprocess, "Popen", popen)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "given"), [(0, [None, None]), (2, ["4", "7"])])
def test_there_is_a_job_on_each_gpu(
    gpus: int, given: list[str | None], begun: Any, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    wanted = jobs(2, labelled, tmp_path)
    write_specs(tmp_path / "study", wanted)
    finished, failed = run_jobs(tmp_path / "study", wanted, console=Console(quiet=True))
    assert finished and list(failed) == ["model0-seed0", "model1-seed0"]
    assert all("nowhere" in words for words in failed.values())
    assert begun == [(given[0], 0), (given[1], 1 if gpus else 0)]


def test_a_finished_job_is_not_begun(begun: Any, labelled: Path, tmp_path: Path):
    (job,) = jobs(1, labelled, tmp_path)
    write_specs(tmp_path / "study", [job])
    Place(root=tmp_path / "study", name=job.name).result.write_text('{"finished": true}')
    assert run_jobs(tmp_path / "study", [job], console=Console(quiet=True)) == (True, {}) and not begun


def test_a_study_is_carried_out_by_one_process_at_a_time(labelled: Path, tmp_path: Path):
    write_specs(tmp_path / "study", jobs(1, labelled, tmp_path))
    mark = tmp_path / "study" / "jobs" / "process.json"
    parent = psutil.Process(os.getppid())
    alive = {"host": platform.node(), "pid": parent.pid, "began": parent.create_time()}
    for other in (alive, {**alive, "host": "elsewhere", "began": 0.0}):
        mark.write_text(json.dumps(other))
        with pytest.raises(UsageError, match=rf"process {parent.pid} on \S+ is carrying this study out"):
            run_jobs(tmp_path / "study", [], console=Console(quiet=True))
        assert mark.exists()
    mark.write_text(json.dumps({**alive, "began": 0.0}))  # the number was given to another process meanwhile
    assert run_jobs(tmp_path / "study", [], console=Console(quiet=True)) == (True, {})
    assert not mark.exists()


def test_an_arm_named_by_a_path_stays_in_its_folder():
    assert job_name("../../etc/recipe.json", 3) == "-..-etc-recipe.json-seed3"
    assert Path(job_name("a/b.json", 0)).name == job_name("a/b.json", 0)
