"""Jobs over processes and GPUs."""

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
from mae.experiments.core import runner
from mae.experiments.core.job import STOPPED, EvalSpec, Job, JobFiles, job_name
from mae.experiments.core.runner import run_jobs, study_folder, write_specs
from mae.experiments.core.worker import main
from mae.records import write_json


def jobs(count: int, labelled: Path, root: Path) -> list[Job]:
    """Jobs whose first evaluation fails: there is no such model."""
    return [
        Job(
            variant=f"model{number}", seed=0, folder=root / f"{number}", data=str(labelled), data_root=Path("data"),
            device="auto", evaluations=(EvalSpec(protocol="knn", options={}),), model=f"nowhere/{number}",
        )
        for number in range(count)
    ]  # fmt: skip


def begun_study(labelled: Path, tmp_path: Path) -> Job:
    """The one job of a study in `study`, with its files written."""
    (job,) = jobs(1, labelled, tmp_path)
    with study_folder(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])
    return job


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int]]:
    """For each process its GPU, and how many were running already."""
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
def test_one_job_per_gpu(
    gpus: int, given: list[str | None], begun: Any, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if gpus:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    wanted = jobs(2, labelled, tmp_path)
    with study_folder(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", wanted)
    text = io.StringIO()
    finished, failed = run_jobs(tmp_path / "study", wanted, console=Console(file=text, width=300))
    assert re.search(r"0 of 2 runs done; .*model0-seed0: evaluating \(knn\)", text.getvalue())
    assert "0 of 2 runs done, 2 failed" in text.getvalue()
    assert finished and sorted(failed) == ["model0-seed0", "model1-seed0"]
    assert all("nowhere" in words for words in failed.values())
    assert begun == [(given[0], 0), (given[1], 1 if gpus else 0)]


def test_time_left_counts_from_the_resumption(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (job,), clock, share, text = jobs(1, labelled, tmp_path), [1000.0], [0.8], io.StringIO()
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])

    class Running(runner._Running):
        def __init__(self) -> None:
            self.job, self.files = job, JobFiles(root=tmp_path, name=job.name)

        def progress(self) -> tuple[float, str]:
            return share[0], "step 1/2"

    running = Running()
    with runner._display(Console(file=text, width=300), tmp_path, [job]) as display:
        display.show([running], {})
        clock[0], share[0] = 1100.0, 0.9
        display.show([running], {})
    first, second = text.getvalue().splitlines()
    assert "left" not in first and second.endswith("; 1 min 40 s left")


def test_finished_jobs_are_skipped(begun: Any, labelled: Path, tmp_path: Path):
    job = begun_study(labelled, tmp_path)
    results = {name: {} for name in ("numbers", "baselines", "checkpoints", "hardware", "versions")}
    results |= {"finished": True, "evaluated": 1, "near_copies": None}
    write_json(JobFiles(root=tmp_path / "study", name=job.name).result, results)
    assert run_jobs(tmp_path / "study", [job], console=Console(quiet=True)) == (True, {}) and not begun


@pytest.mark.parametrize(
    ("text", "told"), [('{"finis', "cannot be read as JSON"), ('{"finished": true}', "has no evaluated, numbers")]
)
def test_damaged_results_are_told_with_what_to_do(begun: Any, labelled: Path, tmp_path: Path, text: str, told: str):
    job = begun_study(labelled, tmp_path)
    files = JobFiles(root=tmp_path / "study", name=job.name)
    files.result.write_text(text)
    with pytest.raises(UsageError, match=f"{files.result} {told}.*; delete the file to evaluate that run again"):
        run_jobs(tmp_path / "study", [job], console=Console(quiet=True))
    files.spec.write_text("{}")
    with pytest.raises(UsageError, match=f"{files.spec}: entry of a job variant is missing"):
        write_specs(tmp_path / "study", [job])
    assert not begun


@pytest.mark.parametrize("changed", ["data_fingerprint", "images_fingerprint"])
def test_changed_images_are_refused(labelled: Path, tmp_path: Path, changed: str):
    """Runs on other images could not be compared."""
    (job,) = jobs(1, labelled, tmp_path)
    job = replace(job, config={"source": str(labelled)}, **{changed: "a" * 16})
    with study_folder(tmp_path / "study", "features"):
        write_specs(tmp_path / "study", [job])
        write_specs(tmp_path / "study", [job])
        with pytest.raises(UsageError, match=f"{labelled} holds other images than when the study in .* began"):
            write_specs(tmp_path / "study", [replace(job, **{changed: "b" * 16})])


def test_study_folder_is_locked(tmp_path: Path):
    with study_folder(tmp_path / "study", "compare"):
        code = f"""
from pathlib import Path
from mae.errors import UsageError
from mae.experiments.core.runner import study_folder
try:
    with study_folder(Path({str(tmp_path / "study")!r}), "compare"):
        raise SystemExit("two at a time")
except UsageError as error:
    assert "another process is running the study" in str(error)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    with study_folder(tmp_path / "study", "compare"):
        pass


def test_study_folder_refuses_other_contents(tmp_path: Path):
    with study_folder(tmp_path / "study", "compare"):
        pass
    with (
        pytest.raises(UsageError, match="holds the study compare, this is mask_ratio"),
        study_folder(tmp_path / "study", "mask_ratio"),
    ):
        pass
    (tmp_path / "other" / "jobs").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no study"), study_folder(tmp_path / "other", "compare"):
        pass


@pytest.mark.slow
def test_job_lock_times_out(labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = begun_study(labelled, tmp_path)
    monkeypatch.setattr("mae.experiments.core.worker._LOCK_TIMEOUT", 0.1)
    monkeypatch.setattr("mae.experiments.core.worker._stop_with_parent", lambda: None)
    files = JobFiles(root=tmp_path / "study", name=job.name)
    with FileLock(files.result.with_suffix(".lock")):
        assert main(files.spec, files.result) == 1
    assert not files.result.exists()


@pytest.mark.parametrize(("code", "failed"), [(0, False), (STOPPED, False), (-15, False), (1, True)])
def test_exit_codes_of_stopped_jobs(
    code: int, failed: bool, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = begun_study(labelled, tmp_path)

    class Process:
        stdin = io.BytesIO()

        returncode = code

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)

        def poll(self) -> None:
            return None

        def wait(self) -> int:
            return code

    monkeypatch.setattr(runner.subprocess, "Popen", Process)
    finished, found = run_jobs(tmp_path / "study", [job], console=Console(quiet=True))
    assert not finished and list(found) == ([job.name] if failed else [])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (-9, "killed by signal 9, Killed, as when memory ran out; its last line: step 7"),
        (-11, "killed by signal 11, Segmentation fault; its last line: step 7"),
        (1, "step 7"),
    ],
)
def test_a_killed_job_is_told_by_its_signal(
    code: int, told: str, labelled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    job = begun_study(labelled, tmp_path)

    class Process:
        returncode = code

        def __init__(self, *args: Any, stdout: Any, **kwargs: Any) -> None:
            stdout.write(b"step 6\nstep 7\n")

        def poll(self) -> int:
            return code

    monkeypatch.setattr(runner.subprocess, "Popen", Process)
    finished, failed = run_jobs(tmp_path / "study", [job], console=Console(quiet=True))
    assert finished and failed == {job.name: told}


def test_job_name_of_a_path_stays_in_the_folder():
    assert job_name("../../etc/recipe.json", 3) == "-..-etc-recipe.json-seed3"
    assert Path(job_name("a/b.json", 0)).name == job_name("a/b.json", 0)


@pytest.mark.parametrize("folder", ["x" * 90, "日" * 60])
def test_job_name_of_a_long_path_fits_and_tells_its_end(folder: str, tmp_path: Path):
    name = job_name("/".join([*[folder] * 3, "run"]), 12)
    assert name.endswith("-run-seed12") and len(name.encode()) > 200
    for path in (JobFiles(root=tmp_path, name=name).spec, JobFiles(root=tmp_path, name=name).result):
        path.parent.mkdir(exist_ok=True)
        write_json(path, {})
