"""Running jobs: one after another, or one per GPU, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mae import records
from mae.config import RunConfig, is_changeable
from mae.credentials import handed_on
from mae.errors import UsageError
from mae.experiments.core.job import STOPPED, Job, JobFiles, read_job, read_results
from mae.records import read_json, write_json
from mae.report.terminal.console import duration
from mae.training.log import loss_rows, read_rows
from mae.training.resilience.signals import StopSignals
from mae.training.run_folder import RunFolder

_POLL_SECONDS, _SECONDS_BETWEEN_LINES = 1.0, 60.0
_SHARE_OF_TRAINING = 0.8
"""Assumed share of a job's time; evaluations take the rest."""


@contextmanager
def study_folder(root: Path, name: str) -> Iterator[None]:
    """The folder of a study, new or resumed, locked against other processes.

    Raises:
        UsageError: it holds another study, or something else, or another process is running the study.
    """
    mark = root / "study.json"
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not mark.exists())):
        raise UsageError(f"{root} exists and holds no study; choose another --out")
    if mark.exists() and (there := read_json(mark).get("study")) != name:
        raise UsageError(f"{root} holds the study {there}, this is {name}; choose another --out")
    (root / "jobs").mkdir(parents=True, exist_ok=True)
    write_json(mark, {"study": name})
    lock = FileLock(root / "jobs" / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"another process is running the study in {root}; wait for it, or choose another --out"
        ) from error
    with lock:
        yield


def write_specs(root: Path, jobs: Sequence[Job]) -> None:
    """Write each job's file; jobs that are there already must be the same.

    Raises:
        UsageError: a job differs.
    """
    for job in jobs:
        spec = JobFiles(root=root, name=job.name).spec
        if not spec.exists():
            continue
        before = read_job(spec)
        _check_same_images(root, before, job)
        if differing := _differing(before, job):
            raise UsageError(
                f"{root} holds a study whose run {job.name} differs: {differing}. Give the same options to resume "
                "it, or choose another --out"
            )
    for job in jobs:
        write_json(JobFiles(root=root, name=job.name).spec, records.to_json(job))


def _check_same_images(root: Path, before: Job, now: Job) -> None:
    """Refuse images that changed since the study began: its runs could not be compared."""
    trained_on = "" if now.config is None else now.config["source"]
    sources = [
        (now.data, before.data_fingerprint, now.data_fingerprint, before.data),
        (trained_on, before.images_fingerprint, now.images_fingerprint, (before.config or {}).get("source")),
    ]
    for source, one, other, source_before in sources:
        if one != other and source == source_before:
            raise UsageError(
                f"{source} holds other images than when the study in {root} began, so that its runs could not "
                "be compared; restore them, or choose another --out"
            )


def check_finished(root: Path, jobs: Sequence[Job]) -> None:
    """Refuse finished jobs whose run is gone, before others are trained: the report reads it.

    Raises:
        UsageError: a run is gone.
    """
    for job in jobs:
        files, run = JobFiles(root=root, name=job.name), RunFolder(job.folder)
        if job.config is not None and files.finished and not run.summary.exists():
            raise UsageError(
                f"{run.summary} is not there, though the run finished; put {run.root} back, or delete {files.result} "
                "to repeat the run"
            )


_DECIDING = ("folder", "data", "model", "weights", "checkpoints")


def _differing(before: Job, now: Job) -> str:
    """The differences of two jobs for a message; where a run computes may change."""
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in _DECIDING]
    pairs.append(("evaluations", _evaluations(before), _evaluations(now)))
    if before.config is not None and now.config is not None:
        old, new = (RunConfig.from_json(config).flat() for config in (before.config, now.config))
        pairs += [(name, old.get(name), new.get(name)) for name in {**old, **new} if not is_changeable(name)]
    return "; ".join(f"{name} was {old}, is now {new}" for name, old, new in pairs if old != new)


def _evaluations(job: Job) -> str:
    """A job's evaluations; baselines are no difference, since they are the same for every run."""
    return ", ".join(
        " ".join([spec.protocol, *(f"{k}={v}" for k, v in spec.options.items() if k != "baselines")])
        for spec in job.evaluations
    )


def run_jobs(root: Path, jobs: Sequence[Job], *, console: Console) -> tuple[bool, dict[str, str]]:
    """Run every job that is not done, in order, as many at a time as there are GPUs.

    Returns:
        Whether all was run (False where a signal stopped it), and by name why each failed job did.
    """
    waiting = [job for job in jobs if not JobFiles(root=root, name=job.name).finished]
    failed: dict[str, str] = {}
    running: dict[int, _Running] = {}
    slots = range(max(1, torch.cuda.device_count()) if jobs and jobs[0].device in ("auto", "cuda") else 1)
    with StopSignals() as signals, _display(console, root, jobs) as display:
        while (waiting or running) and not signals.asked:
            for slot in slots:
                if slot not in running and waiting:
                    running[slot] = _Running(root, waiting.pop(0), slot if torch.cuda.device_count() > 1 else None)
            time.sleep(_POLL_SECONDS)
            for slot, job in list(running.items()):
                if (code := job.process.poll()) is not None:
                    del running[slot]
                    if code != 0:
                        failed[job.job.name] = job.failure()
            display.show(running.values(), failed)
        if running:
            console.print("Stopping: waiting until running jobs are saved.", highlight=False)
        for job in running.values():
            if job.stop() not in (0, STOPPED, -signal.SIGTERM):
                failed[job.job.name] = job.failure()
    return not signals.asked, failed


class _Running:
    """A job's process; it saves and ends when this process closes its input or ends."""

    def __init__(self, root: Path, job: Job, gpu: int | None) -> None:
        self.job = job
        self.files = JobFiles(root=root, name=job.name)
        command = [
            sys.executable,
            "-P",
            "-m",
            "mae.experiments.core.worker",
            str(self.files.spec),
            str(self.files.result),
        ]
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": _visible(gpu)}
        with self.files.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **handed_on(), **chosen},
                start_new_session=True,  # Ctrl-C goes to the study, which then stops its jobs
            )

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()

    def failure(self) -> str:
        """Why the ended process failed: its last line, after the signal that killed it before it could say so."""
        lines = self.files.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        if (code := self.process.returncode) >= 0:
            return last
        cause = ", as when memory ran out" if code == -signal.SIGKILL else ""
        return f"killed by signal {-code}, {signal.strsignal(-code)}{cause}; its last line: {last}"

    def progress(self) -> tuple[float, str]:
        """About how much of the job is done, in [0, 1], and what it is doing."""
        rows = loss_rows(read_rows(RunFolder(self.job.folder).metrics)) if self.job.total_steps else []
        step = rows[-1]["step"] if rows else 0
        if step < self.job.total_steps:
            return _SHARE_OF_TRAINING * step / self.job.total_steps, f"step {step}/{self.job.total_steps}"
        evaluated = read_results(self.files.result)["evaluated"] if self.files.result.exists() else 0
        start = _SHARE_OF_TRAINING if self.job.total_steps else 0.0
        protocol = self.job.evaluations[min(evaluated, len(self.job.evaluations) - 1)].protocol
        return start + (1 - start) * evaluated / len(self.job.evaluations), f"evaluating ({protocol})"


def _visible(gpu: int) -> str:
    """The name of a GPU among those that this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return allowed[gpu].strip() if len(allowed) > gpu and allowed[gpu].strip() else str(gpu)


class _Display:
    """One line for the whole study: what is done, what is running, and the time left."""

    def __init__(self, console: Console, root: Path, jobs: Sequence[Job], bar: Progress) -> None:
        self._console, self._root, self._jobs, self._bar = console, root, jobs, bar
        self._task = bar.add_task("starting", total=len(jobs))
        self._printed_at = 0.0
        self._shown: tuple[object, ...] = ()
        self._start: tuple[float, float] | None = None

    def show(self, running: Iterable[_Running], failed: Mapping[str, str]) -> None:
        """Show the progress."""
        shares = [(job.job.name, *job.progress()) for job in running if not job.files.finished]
        finished = sum(JobFiles(root=self._root, name=job.name).finished for job in self._jobs)
        done = finished + sum(share for _, share, _ in shares)
        if self._start is None:  # a resumed job's progress from before says nothing of the pace now
            self._start = time.monotonic(), done
        seconds, gained = time.monotonic() - self._start[0], done - self._start[1]
        left = len(self._jobs) - len(failed) - done
        at = ", ".join(f"{name}: {what}" for name, _, what in shares)
        text = f"{finished} of {len(self._jobs)} runs done" + (f", {len(failed)} failed" if failed else "")
        text += f"; {at}" if at else ""
        if gained > 0.02:
            text += f"; {duration(seconds / gained * left)} left"
        self._bar.update(self._task, completed=done, description=text)
        state = (finished, tuple(failed), tuple(name for name, _, _ in shares))
        due = time.monotonic() - self._printed_at >= _SECONDS_BETWEEN_LINES
        if not self._console.is_terminal and (due or state != self._shown):
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)
            self._shown, self._printed_at = state, time.monotonic()


@contextmanager
def _display(console: Console, root: Path, jobs: Sequence[Job]) -> Iterator[_Display]:
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield _Display(console, root, jobs, bar)
