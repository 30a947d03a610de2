"""One job in a process of its own: train, evaluate, write the numbers. What is done is not repeated."""

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from mae import records
from mae.config import RunConfig, is_changeable
from mae.errors import MAEError, UsageError
from mae.evaluation.common.record import hardware, versions
from mae.evaluation.protocols import find_protocol
from mae.evaluation.run import Evaluator
from mae.experiments.core.checkpoint_eval import checkpoint_interval, evaluate_checkpoints
from mae.experiments.core.job import STOPPED, EvalSpec, Job, JobResults, read_job, read_results
from mae.experiments.core.metrics import NUM_NEIGHBOURS
from mae.experiments.core.readout import read_baselines, read_numbers
from mae.pretraining.run import run_pretraining
from mae.records import write_json
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.run_folder import RunFolder

_LOCK_TIMEOUT = 60.0
"""Seconds."""

_OF_CHECKPOINTS = (
    EvalSpec(protocol="knn", options={"ks": [NUM_NEIGHBOURS], "baselines": False}),
    EvalSpec(protocol="linear_probe", options={"baselines": False}),
)
"""The evaluations of checkpoints."""


def run_job(job: Job, result: Path, *, console: Console) -> bool:
    """Do what is left of a job and write its results as it goes.

    Args:
        job: what to do.
        result: the JSON file of the results.
        console: where the training shows its progress.

    Returns:
        Whether it is finished; False where a signal stopped the training.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: training or an evaluation failed.
    """
    results = read_results(result) if result.exists() else _no_results(job)
    if job.config is not None and not _train(job, console):
        return False
    evaluator = None
    for number, spec in enumerate(job.evaluations):
        if number < results["evaluated"]:
            continue
        console.print(f"evaluating: {spec.protocol}", highlight=False)
        evaluator, protocol = evaluator or _evaluator(job, job.folder), _protocol(spec)
        if reason := protocol.why_not(evaluator.extractor):  # its numbers are absent, as others that are not measured
            console.print(f"left out: {reason}", highlight=False, markup=False)
        else:
            record = evaluator.run(protocol)
            results["near_copies"] = record.near_copies or results["near_copies"]
            results["numbers"] |= {f"{name}{spec.suffix}": value for name, value in read_numbers(record).items()}
            results["baselines"] |= {f"{name}{spec.suffix}": value for name, value in read_baselines(record).items()}
        results["evaluated"] = number + 1
        write_json(result, results)
    if job.checkpoints:
        _evaluate_checkpoints(job, results, result, console)
    results["finished"] = True
    write_json(result, results)
    return True


def _no_results(job: Job) -> JobResults:
    return {
        "finished": False,
        "evaluated": 0,
        "numbers": {},
        "baselines": {},
        "near_copies": None,
        "checkpoints": [],
        "hardware": hardware(choose_device(job.device)),
        "versions": versions(),
    }


def _train(job: Job, console: Console) -> bool:
    """Train or resume; whether the training is finished."""
    folder = RunFolder(job.folder)
    if folder.summary.exists():
        return True
    assert job.config is not None
    config = RunConfig.from_json(job.config).override({"out": job.folder})
    if job.checkpoints:
        every = checkpoint_interval(job.total_steps, job.checkpoints)
        config = config.override({"checkpoint_keep_every": every})
    # A resumed run may compute elsewhere, or faster, than it began.
    given = {name for name in config.flat() if is_changeable(name)} - {"out"}
    return run_pretraining(config, given=given, resume=folder.holds_run, console=console).finished


def _evaluate_checkpoints(job: Job, results: JobResults, result: Path, console: Console) -> None:
    """Evaluate the checkpoints that the run kept; their features are needed once and not stored."""

    def evaluate(checkpoint: str) -> dict[str, float]:
        console.print(f"evaluating: {Path(checkpoint).name}", highlight=False)
        with TemporaryDirectory(prefix="features-", dir=job.folder) as folder:
            evaluator = _evaluator(replace(job, model=checkpoint), out=Path(folder))
            found = [evaluator.run(_protocol(spec)) for spec in _OF_CHECKPOINTS]
        return {name: value for record in found for name, value in read_numbers(record).items()}

    def keep(checkpoints: list[dict[str, Any]]) -> None:
        results["checkpoints"] = checkpoints
        write_json(result, results)

    every = checkpoint_interval(job.total_steps, job.checkpoints)
    evaluate_checkpoints(RunFolder(job.folder), every=every, done=results["checkpoints"], evaluate=evaluate, keep=keep)


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


def _protocol(spec: EvalSpec) -> Any:
    kind = find_protocol(spec.protocol)
    return records.from_json(kind, spec.options, what=f"option of {spec.protocol}")


def main(spec: Path, result: Path) -> int:
    """Run the job in a file; stops early, saved, when its parent process ends or closes its input."""
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        # A process of a study that is gone may still be saving.
        with FileLock(result.with_suffix(".lock"), timeout=_LOCK_TIMEOUT):
            return 0 if run_job(read_job(spec), result, console=Console(width=200)) else STOPPED
    except Timeout:
        sys.stderr.write("error: another process is working on this run; wait for it, or stop it\n")
        return 1
    except (UsageError, MAEError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 1


def _stop_with_parent() -> None:
    """The end of the input stops this process as Ctrl-C does: the step is finished and saved."""
    while os.read(0, 1):  # not through sys.stdin, whose lock a thread must not hold when Python ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
