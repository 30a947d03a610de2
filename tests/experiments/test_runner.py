"""How jobs are spread over processes and GPUs."""

import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from rich.console import Console

from mae.errors import UsageError
from mae.experiments import runner
from mae.experiments.job import STOPPED, Job, Judgement, job_name, main
from mae.experiments.runner import Place, alone, run_jobs, write_specs


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
    with alone(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", wanted)
    text = io.StringIO()
    finished, failed = run_jobs(tmp_path / "study", wanted, console=Console(file=text, width=300))
    assert re.search(r"0 of 2 runs done; .*model0-seed0: judging \(knn\)", text.getvalue())
    assert "0 of 2 runs done, 2 failed" in text.getvalue()
    assert finished and sorted(failed) == ["model0-seed0", "model1-seed0"]
    assert all("nowhere" in words for words in failed.values())
    assert begun == [(given[0], 0), (given[1], 1 if gpus else 0)]


def test_the_time_left_is_told_by_what_was_done_since_the_study_was_gone_on_with(
    labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (job,), clock, share, text = jobs(1, labelled, tmp_path), [1000.0], [0.8], io.StringIO()
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])

    class Running(runner._Running):
        def __init__(self) -> None:
            self.job, self.place = job, Place(root=tmp_path, name=job.name)

        def share_done(self) -> tuple[float, str]:
            return share[0], "step 1/2"

    running = Running()
    with runner._display(Console(file=text, width=300), tmp_path, [job]) as display:
        display.show([running], {})
        clock[0], share[0] = 1100.0, 0.9
        display.show([running], {})
    first, second = text.getvalue().splitlines()
    assert "left" not in first and second.endswith("; 1 min 40 s left")


def test_a_finished_job_is_not_begun(begun: Any, labelled: Path, tmp_path: Path):
    (job,) = jobs(1, labelled, tmp_path)
    with alone(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])
    Place(root=tmp_path / "study", name=job.name).result.write_text('{"finished": true}')
    assert run_jobs(tmp_path / "study", [job], console=Console(quiet=True)) == (True, {}) and not begun


@pytest.mark.parametrize("changed", ["data_fingerprint", "images_fingerprint"])
def test_a_study_does_not_go_on_with_images_that_were_changed(labelled: Path, tmp_path: Path, changed: str):
    """Runs begun before and after could not be compared."""
    (job,) = jobs(1, labelled, tmp_path)
    job = replace(job, config={"source": str(labelled)}, **{changed: "a" * 16})
    with alone(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])
        write_specs(tmp_path / "study", [job])
        with pytest.raises(UsageError, match=f"{labelled} holds other images than when the study in .* was begun"):
            write_specs(tmp_path / "study", [replace(job, **{changed: "b" * 16})])


def test_a_study_is_carried_out_by_one_process_at_a_time(tmp_path: Path):
    with alone(tmp_path / "study", "compare"):
        code = f"""
from pathlib import Path
from mae.errors import UsageError
from mae.experiments.runner import alone
try:
    with alone(Path({str(tmp_path / "study")!r}), "compare"):
        raise SystemExit("two at a time")
except UsageError as error:
    assert "another process is carrying out the study" in str(error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with alone(tmp_path / "study", "compare"):
        pass


def test_a_folder_holds_one_study(tmp_path: Path):
    with alone(tmp_path / "study", "compare"):
        pass
    with (
        pytest.raises(UsageError, match="holds the study compare, this is mask_ratio"),
        alone(tmp_path / "study", "mask_ratio"),
    ):
        pass
    (tmp_path / "other" / "jobs").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no study"), alone(tmp_path / "other", "compare"):
        pass


@pytest.mark.slow
def test_a_job_waits_for_nobody_for_ever(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (job,) = jobs(1, labelled, tmp_path)
    monkeypatch.setattr("mae.experiments.job._PATIENCE", 0.1)
    monkeypatch.setattr("mae.experiments.job._stop_with_parent", lambda: None)
    with alone(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])
    place = Place(root=tmp_path / "study", name=job.name)
    with FileLock(place.result.with_suffix(".lock")):
        assert main(place.spec, place.result) == 1
    assert not place.result.exists()


@pytest.mark.parametrize(("code", "failed"), [(0, False), (STOPPED, False), (-15, False), (1, True)])
def test_a_run_that_could_not_save_when_it_was_stopped_has_failed(
    code: int, failed: bool, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (job,) = jobs(1, labelled, tmp_path)
    with alone(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])

    class Process:
        stdin = io.BytesIO()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def poll(self) -> None:
            return None

        def wait(self) -> int:
            return code

    monkeypatch.setattr(runner.subprocess, "Popen", Process)
    finished, found = run_jobs(tmp_path / "study", [job], console=Console(quiet=True))
    assert not finished and list(found) == ([job.name] if failed else [])


def test_an_arm_named_by_a_path_stays_in_its_folder():
    assert job_name("../../etc/recipe.json", 3) == "-..-etc-recipe.json-seed3"
    assert Path(job_name("a/b.json", 0)).name == job_name("a/b.json", 0)
