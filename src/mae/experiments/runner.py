"""Carrying jobs out: one after another, or one a GPU, each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from mae import records
from mae.config import MACHINE_FIELDS, PretrainConfig
from mae.credentials import handed_on
from mae.errors import UsageError
from mae.experiments.job import STOPPED, Job, read_job
from mae.records import read_json, write_json
from mae.report.console import duration
from mae.training.log import loss_rows, read_rows
from mae.training.run_folder import RunFolder
from mae.training.signals import StopSignals

_SECONDS_BETWEEN_LOOKS, _SECONDS_BETWEEN_LINES = 1.0, 60.0
_SHARE_OF_TRAINING = 0.8
"""Of a job's time, as long as no job has told; the rest is spent on judging."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a job's files lie in the folder of its study.

    Attributes:
        root: the study's folder.
        name: of the job.
    """

    root: Path
    name: str

    @property
    def spec(self) -> Path:
        """The job as JSON."""
        return self.root / "jobs" / f"{self.name}.json"

    @property
    def result(self) -> Path:
        """What was found."""
        return self.root / "jobs" / f"{self.name}.result.json"

    @property
    def log(self) -> Path:
        """What the job's process printed."""
        return self.root / "jobs" / f"{self.name}.log"

    @property
    def finished(self) -> bool:
        """Whether the job is done."""
        return self.result.exists() and bool(read_json(self.result)["finished"])


@contextmanager
def alone(root: Path, name: str) -> Iterator[None]:
    """The folder of a study, new or gone on with; inside no other process can carry it out.

    Raises:
        UsageError: it holds another study, or something else, or another process is at it.
    """
    mark = root / "study.json"
    if root.exists() and (not root.is_dir() or (any(root.iterdir()) and not mark.exists())):
        raise UsageError(f"{root} is there already and holds no study; choose another --out")
    if mark.exists() and (there := read_json(mark).get("study")) != name:
        raise UsageError(f"{root} holds the study {there}, this is {name}; choose another --out")
    (root / "jobs").mkdir(parents=True, exist_ok=True)
    write_json(mark, {"study": name})
    lock = FileLock(root / "jobs" / "lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"another process is carrying out the study in {root}; wait for it, or choose another --out"
        ) from error
    with lock:
        yield


def write_specs(root: Path, jobs: Sequence[Job]) -> None:
    """Write what each job does; jobs that stand there already must be the same.

    Raises:
        UsageError: a job was otherwise.
    """
    for job in jobs:
        place = Place(root=root, name=job.name)
        if not place.spec.exists():
            continue
        before = read_job(place.spec)
        _check_same_images(root, before, job)
        if differing := _differing(before, job):
            raise UsageError(
                f"{root} holds a study whose run {job.name} differs: {differing}. Give the same options to go on with "
                "it, or choose another --out"
            )
    for job in jobs:
        write_json(Place(root=root, name=job.name).spec, records.to_json(job))


def _check_same_images(root: Path, before: Job, now: Job) -> None:
    """Runs on images that were changed between them cannot be compared."""
    trained_on = "" if now.config is None else now.config["source"]
    told = [
        (now.data, before.data_fingerprint, now.data_fingerprint, before.data),
        (trained_on, before.images_fingerprint, now.images_fingerprint, (before.config or {}).get("source")),
    ]
    for source, one, other, source_before in told:
        if one != other and source == source_before:
            raise UsageError(
                f"{source} holds other images than when the study in {root} was begun, whose runs could not be "
                "compared; put them back, or choose another --out"
            )


def _differing(before: Job, now: Job) -> str:
    """What was otherwise, in words; where a run computes may change."""
    pairs = [(name, getattr(before, name), getattr(now, name)) for name in ("folder", "data", "model", "looks")]
    pairs.append(("what is judged", _in_words(before), _in_words(now)))
    if before.config is not None and now.config is not None:
        # Read as configurations: one written before an option was there has its default.
        old, new = (PretrainConfig.from_json(config).to_json() for config in (before.config, now.config))
        pairs += [(name, old[name], new[name]) for name in new if name not in MACHINE_FIELDS]
    return "; ".join(f"{name} was {old}, is now {new}" for name, old, new in pairs if old != new)


def _in_words(job: Job) -> str:
    """How a job is judged; comparators are not a difference, since they are the same beside every run."""
    return ", ".join(
        " ".join([judgement.protocol, *(f"{k}={v}" for k, v in judgement.options.items() if k != "comparators")])
        for judgement in job.judgements
    )


def run_jobs(root: Path, jobs: Sequence[Job], *, console: Console) -> tuple[bool, dict[str, str]]:
    """Carry out every job that is not done, in order, as many at a time as there are GPUs.

    Returns:
        Whether it came to the end (not where a signal stopped it), and by name what jobs that failed said last.
    """
    waiting = [job for job in jobs if not Place(root=root, name=job.name).finished]
    failed: dict[str, str] = {}
    running: dict[int, _Running] = {}
    slots = range(max(1, torch.cuda.device_count()) if jobs and jobs[0].device in ("auto", "cuda") else 1)
    with StopSignals() as signals, _display(console, root, jobs) as display:
        while (waiting or running) and not signals.asked:
            for slot in slots:
                if slot not in running and waiting:
                    running[slot] = _Running(root, waiting.pop(0), slot if torch.cuda.device_count() > 1 else None)
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for slot, job in list(running.items()):
                if (code := job.process.poll()) is not None:
                    del running[slot]
                    if code != 0:
                        failed[job.job.name] = job.last_words()
            display.show(running.values(), failed)
        if running:
            console.print("Stopping: waiting until what runs is saved.", highlight=False)
        for job in running.values():
            if job.stop() not in (0, STOPPED, -signal.SIGTERM):
                failed[job.job.name] = job.last_words()
    return not signals.asked, failed


class _Running:
    """A job's process; it ends, its work saved, when this process closes its input or is gone."""

    def __init__(self, root: Path, job: Job, gpu: int | None) -> None:
        self.job, self.began = job, time.monotonic()
        self.place = Place(root=root, name=job.name)
        command = [sys.executable, "-m", "mae.experiments.job", str(self.place.spec), str(self.place.result)]
        chosen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": _visible(gpu)}
        with self.place.log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **handed_on(), **chosen},
                start_new_session=True,  # Ctrl-C is for the study, which then asks its jobs to stop
            )

    def stop(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()

    def last_words(self) -> str:
        lines = self.place.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def share_done(self) -> tuple[float, str]:
        """How much of the job is done, about, and what it is at."""
        rows = loss_rows(read_rows(RunFolder(self.job.folder).metrics)) if self.job.total_steps else []
        step = rows[-1]["step"] if rows else 0
        if step < self.job.total_steps:
            return _SHARE_OF_TRAINING * step / self.job.total_steps, f"step {step}/{self.job.total_steps}"
        judged = read_json(self.place.result)["judged"] if self.place.result.exists() else 0
        start = _SHARE_OF_TRAINING if self.job.total_steps else 0.0
        at = self.job.judgements[min(judged, len(self.job.judgements) - 1)].protocol
        return start + (1 - start) * judged / len(self.job.judgements), f"judging ({at})"


def _visible(gpu: int) -> str:
    """The name of a GPU among those this process may use."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return allowed[gpu].strip() if len(allowed) > gpu and allowed[gpu].strip() else str(gpu)


class _Display:
    """One line for the whole study: what is done, what is being done, and the time left."""

    def __init__(self, console: Console, root: Path, jobs: Sequence[Job], bar: Progress) -> None:
        self._console, self._root, self._jobs, self._bar = console, root, jobs, bar
        self._task = bar.add_task("starting", total=len(jobs))
        self._spoke = 0.0
        self._shown: tuple[object, ...] = ()
        self._start: tuple[float, float] | None = None

    def show(self, running: Iterable[_Running], failed: Mapping[str, str]) -> None:
        """Tell how far it is."""
        shares = [(job.job.name, *job.share_done()) for job in running if not job.place.finished]
        finished = sum(Place(root=self._root, name=job.name).finished for job in self._jobs)
        done = finished + sum(share for _, share, _ in shares)
        if self._start is None:  # a job that goes on has a share from before, which says nothing of the pace now
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
        due = time.monotonic() - self._spoke >= _SECONDS_BETWEEN_LINES
        if not self._console.is_terminal and (due or state != self._shown):
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)
            self._shown, self._spoke = state, time.monotonic()


@contextmanager
def _display(console: Console, root: Path, jobs: Sequence[Job]) -> Iterator[_Display]:
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        yield _Display(console, root, jobs, bar)
