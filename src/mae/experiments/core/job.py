"""A run of a study as a record: what to train, what to evaluate, and where its files are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

from mae import records
from mae.errors import UsageError
from mae.records import read_json

STOPPED = 130
"""Exit code of a job that a signal stopped."""

Overlap = Literal["error", "drop"]
"""What to do with test images that are among the training images: refuse, or leave them out of the test."""


@dataclass(frozen=True, kw_only=True)
class EvalSpec:
    """One evaluation of a run.

    Attributes:
        protocol: its name.
        options: of the protocol.
        suffix: appended to the names of its numbers, where a protocol runs twice.
    """

    protocol: str
    options: Mapping[str, Any]
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run of a study.

    Attributes:
        variant: its name.
        seed: decides weights, order, crops, masks, and what evaluations draw.
        folder: of the run.
        data: labelled images for the evaluations.
        data_fingerprint: of these: names, sizes and sampled content.
        images_fingerprint: of the training images; empty where nothing is trained.
        data_root: where data sets known by name are kept.
        device: where to compute.
        overlap: what to do with test images that are among the training images.
        evaluations: of the finished model.
        total_steps: of the training; 0 where nothing is trained.
        config: the training run, as JSON; None to evaluate `model`.
        model: path or name of an existing model.
        weights: digest of that model as it is evaluated; empty where one is trained.
        checkpoints: how many checkpoints, evenly spaced, are evaluated by k-NN and linear probe; 0: none.
    """

    variant: str
    seed: int
    folder: Path
    data: str
    data_fingerprint: str = ""
    images_fingerprint: str = ""
    data_root: Path
    device: str
    overlap: Overlap = "error"
    evaluations: tuple[EvalSpec, ...]
    total_steps: int = 0
    config: dict[str, Any] | None = None
    model: str | None = None
    weights: str = ""
    checkpoints: int = 0

    @property
    def name(self) -> str:
        """Of the job's files."""
        return job_name(self.variant, self.seed)


@dataclass(frozen=True, kw_only=True)
class JobFiles:
    """The files of a job in the folder of its study.

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
        """Its results so far, as JSON."""
        return self.root / "jobs" / f"{self.name}.result.json"

    @property
    def log(self) -> Path:
        """What the job's process printed."""
        return self.root / "jobs" / f"{self.name}.log"

    @property
    def finished(self) -> bool:
        """Whether the job is done."""
        return self.result.exists() and bool(read_results(self.result)["finished"])


def job_name(variant: str, seed: int) -> str:
    """The name of a run's files; a variant may be named by a path, of which a long one is known by its end."""
    return f"{records.short_name(variant, keep_end=True).strip('.')}-seed{seed}"


def read_job(spec: Path) -> Job:
    """The job in a file.

    Raises:
        UsageError: no such file, or not a job's.
    """
    return records.read_record(Job, spec, what="entry of a job")


class JobResults(TypedDict):
    """The results of a job so far, as its file has them."""

    finished: bool
    evaluated: int
    numbers: dict[str, Any]
    baselines: dict[str, Any]
    near_copies: Any
    checkpoints: list[dict[str, Any]]
    hardware: dict[str, Any]
    versions: dict[str, Any]


def read_results(path: Path) -> JobResults:
    """The results of a job so far.

    Raises:
        UsageError: no such file, or one that lacks an entry.
    """
    try:
        results = read_json(path)
        if missing := [name for name in JobResults.__annotations__ if name not in results]:
            raise UsageError(f"{path} has no {', '.join(missing)}; expected the results of a run")
    except UsageError as error:
        raise UsageError(f"{error}; delete the file to evaluate that run again") from error
    return cast(JobResults, results)
