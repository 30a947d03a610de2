"""One run of a study, in a process of its own: train, judge, write the numbers. What is done is not done again."""

import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from mae import records
from mae.config import MACHINE_FIELDS, PretrainConfig
from mae.errors import MAEError, UsageError
from mae.evaluation.bench import THIS_MODEL
from mae.evaluation.record import Evaluation, hardware, versions
from mae.evaluation.run import Evaluator, Overlap, find_protocol
from mae.experiments.looks import look_through, steps_between
from mae.pretraining.run import run_pretraining
from mae.records import read_json, write_json
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.run_folder import RunFolder

NEIGHBOURS = 20
"""Of k-NN; fixed beforehand, as the feature is, so that no arm is shown at its luckiest."""
_OURS, _TIMM, _HF = ("mean",), ("pooled", "cls", "mean"), ("cls", "pooled", "mean")

_PATIENCE = 60.0
"""Seconds."""

STOPPED = 130
"""The exit code of a job that a signal stopped."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One evaluation of a run.

    Attributes:
        protocol: its name.
        options: the protocol's constants.
        suffix: added to the names of its numbers, where a protocol is run twice.
    """

    protocol: str
    options: Mapping[str, Any]
    suffix: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of a study, in full.

    Attributes:
        arm: what is tried.
        seed: decides weights, order, crops, masks, and what evaluations draw.
        folder: of the run.
        data: labelled images to judge on.
        data_fingerprint: of these, names, sizes and sampled content.
        images_fingerprint: of the images that are trained on; empty where nothing is trained.
        data_root: where sets known by name are kept.
        device: where to compute.
        overlap: what to do where test images are among the training images.
        judgements: what is measured of the model.
        total_steps: of the training; 0 where nothing is trained.
        config: the training, as JSON; None where a model is there already.
        model: what that model is called.
        looks: how often the run is judged on its way, by k-NN and the probe; 0: not.
    """

    arm: str
    seed: int
    folder: Path
    data: str
    data_fingerprint: str = ""
    images_fingerprint: str = ""
    data_root: Path
    device: str
    overlap: Overlap = "error"
    judgements: tuple[Judgement, ...]
    total_steps: int = 0
    config: dict[str, Any] | None = None
    model: str | None = None
    looks: int = 0

    @property
    def name(self) -> str:
        """Of the job's files."""
        return job_name(self.arm, self.seed)


LOOKED_AT = {
    "knn": Judgement(protocol="knn", options={"ks": [NEIGHBOURS], "comparators": False}),
    "linear_probe": Judgement(protocol="linear_probe", options={"comparators": False}),
}
"""What a run is judged by on its way."""


def job_name(arm: str, seed: int) -> str:
    """What the files of an arm's run are called; an arm may be named by a path."""
    return f"{records.safe_name(arm).strip('.')}-seed{seed}"


def read_job(spec: Path) -> Job:
    """The job in a file.

    Raises:
        UsageError: no such file, or not a job's.
    """
    return records.from_json(Job, read_json(spec), what="entry of a job")


def carry_out(job: Job, result: Path, *, console: Console) -> bool:
    """Do what is left of a job and write its result as it goes.

    Args:
        job: what to do.
        result: the JSON file with what was found.
        console: where the training shows its progress.

    Returns:
        Whether it is finished; False where a signal stopped the training.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: it failed on the way.
    """
    found = read_json(result) if result.exists() else _nothing_yet(job)
    if job.config is not None and not _train(job, console):
        return False
    evaluator = None
    for number, judgement in enumerate(job.judgements):
        if number < found["judged"]:
            continue
        console.print(f"judging: {judgement.protocol}", highlight=False)
        evaluator = evaluator or _evaluator(job, job.folder)
        record = evaluator.judge(judgement.protocol, _protocol(judgement))
        found["near_copies"] = record.near_copies or found["near_copies"]
        found["numbers"] |= {f"{name}{judgement.suffix}": value for name, value in read_numbers(record).items()}
        found["yardsticks"] |= {f"{who}{judgement.suffix}": value for who, value in read_yardsticks(record).items()}
        found["judged"] = number + 1
        write_json(result, found)
    if job.looks:
        _look_back(job, found, result, console)
    found["finished"] = True
    write_json(result, found)
    return True


def _nothing_yet(job: Job) -> dict[str, Any]:
    return {
        "finished": False,
        "judged": 0,
        "numbers": {},
        "yardsticks": {},
        "near_copies": None,
        "looks": [],
        "hardware": hardware(choose_device(job.device)),
        "versions": versions(),
    }


def _train(job: Job, console: Console) -> bool:
    """Train, or go on; whether the training is finished."""
    folder = RunFolder(job.folder)
    if folder.summary.exists():
        return True
    assert job.config is not None
    config = replace(PretrainConfig.from_json(job.config), out=job.folder)
    if job.looks:
        config = replace(config, keep_every=steps_between(job.total_steps, job.looks))
    # Of a run that was begun, where and how fast it computes may be another than before.
    return run_pretraining(config, given=MACHINE_FIELDS - {"out"}, resume=folder.holds_run, console=console).finished


def _look_back(job: Job, found: dict[str, Any], result: Path, console: Console) -> None:
    """Judge what the run kept on its way; features of these are needed once and not stored for good."""

    def judge(checkpoint: str) -> dict[str, float]:
        console.print(f"judging: {Path(checkpoint).name}", highlight=False)
        with TemporaryDirectory(prefix="looks-", dir=job.folder) as aside:
            evaluator = _evaluator(replace(job, model=checkpoint), out=Path(aside))
            records = [evaluator.judge(name, _protocol(judgement)) for name, judgement in LOOKED_AT.items()]
        return {name: value for record in records for name, value in read_numbers(record).items()}

    def keep(looks: list[dict[str, Any]]) -> None:
        found["looks"] = looks
        write_json(result, found)

    every = steps_between(job.total_steps, job.looks)
    look_through(RunFolder(job.folder), every=every, done=found["looks"], judge=judge, keep=keep)


def _evaluator(job: Job, out: Path) -> Evaluator:
    return Evaluator(
        job.folder if job.model is None else job.model,
        data=job.data,
        test=None,
        out=out,
        data_root=job.data_root,
        device=choose_device(job.device),
        world=World(),
        seed=job.seed,
        overlap=job.overlap,
        console=Console(quiet=True),
    )


def _protocol(judgement: Judgement) -> Any:
    kind = find_protocol(judgement.protocol)
    return records.from_json(kind, judgement.options, what=f"option of {judgement.protocol}")


def read_numbers(record: Evaluation) -> dict[str, float]:
    """The numbers of one evaluation that studies compare, by name; what could not be measured is absent."""
    result = record.result
    found: dict[str, float | None]
    match record.protocol:
        case "knn" | "linear_probe":
            found = {record.protocol: _accuracy(record, THIS_MODEL)}
        case "finetune":
            found = {"finetune": result["top1"]}
        case "reconstruction":
            found = {name: result["model"][name] for name in ("mse", "psnr", "ssim", "laplacian")}
            if "with_true_statistics" in result:
                found["psnr_told"] = result["with_true_statistics"]["psnr"]
        case _:
            raise ValueError(f"nothing is read of {record.protocol}")
    return {name: value for name, value in found.items() if value is not None}


def read_yardsticks(record: Evaluation) -> dict[str, float]:
    """What must be beaten, by the protocol and who reached it: `knn, raw pixels`."""
    found: dict[str, float | None] = {}
    if record.protocol in ("knn", "linear_probe"):
        found = {f"{record.protocol}, {who}": _accuracy(record, who) for who in record.result if who != THIS_MODEL}
    if record.protocol == "reconstruction":
        found = {f"psnr, {who}": record.result[who]["psnr"] for who in ("mean_colour", "nearest_patch")}
    if record.majority is not None:
        found["accuracy, commonest class"] = record.majority
    return {name: value for name, value in found.items() if value is not None}


def feature_read(model: str) -> tuple[str, ...]:
    """Of which feature k-NN and probe are read: the first of these that the model has.

    Ours is the mean of the patch tokens; of another's model its own choice, such as a class token.
    """
    return _TIMM if model.startswith("timm:") else _HF if model.startswith("hf:") else _OURS


def _accuracy(record: Evaluation, who: str) -> float | None:
    """Top-1 of the feature that is read; None where there are fewer training images than neighbours."""
    features = record.result[who]
    name = next((name for name in feature_read(record.model) if name in features), next(iter(features)))
    found = features[name][str(NEIGHBOURS)] if record.protocol == "knn" else features[name]
    return None if found is None else found["top1"]


def main(spec: Path, result: Path) -> int:
    """Carry out the job in a file; ends early, saved, when whoever started it is gone or closes its input."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        # A process that was asked to stop, by a study that is gone, may still be saving.
        with FileLock(result.with_suffix(".lock"), timeout=_PATIENCE):
            return 0 if carry_out(read_job(spec), result, console=Console(width=200)) else STOPPED
    except Timeout:
        sys.stderr.write("error: another process is at this run; wait for it, or stop it\n")
        return 1
    except (UsageError, MAEError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 1


def _stop_with_parent() -> None:
    """An end of the input asks to stop, as Ctrl-C does: the step is finished and saved."""
    while os.read(0, 1):  # not through sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
