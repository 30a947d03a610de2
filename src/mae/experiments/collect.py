"""From the files of finished jobs to what a study found, and its pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from mae import records
from mae.data.images import load_images
from mae.data.loaders import normalise
from mae.data.sources import open_held_out
from mae.evaluation.near_copies import warning
from mae.experiments.job import Job
from mae.experiments.looks import Look
from mae.experiments.plan import COMMON_RATIO, Study, commands
from mae.experiments.results import Arm, RunResult, StudyResult
from mae.experiments.runner import Place
from mae.masking.random import RandomMasking
from mae.models.storage import load_model
from mae.pretraining.parts import pictured
from mae.recipes import recipe_config
from mae.records import read_json
from mae.report.comparison import draw_comparison
from mae.training.run_folder import RunFolder, find_weights
from mae.training.run_records import read_image_facts, read_summary


def collect(plan: Study, jobs: Sequence[Job], out: Path, facts: tuple[tuple[str, str], ...]) -> StudyResult:
    """What the finished jobs found."""
    done = [(job, read_json(place.result)) for job in jobs if (place := Place(root=out, name=job.name)).finished]
    runs = [
        RunResult(
            arm=job.arm,
            seed=job.seed,
            folder=job.folder,
            numbers={**found["numbers"], **_of_training(job)},
            commands=commands(job, None if job.config is None else recipe_config(job.config["recipe"])),
            looks=tuple(records.from_json(Look, look, what="entry of a look") for look in found.get("looks", ())),
        )
        for job, found in done
    ]
    arms = plan.arms
    if jobs[0].config is None:
        arms, runs = _with_yardsticks(plan, jobs, runs, done)
    made_by = {str(found["versions"]) for _, found in done}
    notes = plan.notes if len(made_by) < 2 else (*plan.notes, "The runs were made with different versions of packages.")
    machine = {
        name: str(value) for _, found in done for name, value in {**found["hardware"], **found["versions"]}.items()
    }
    beside = {
        f"yardstick: {name}": f"{value:.2f} dB" if name.startswith("psnr") else f"{value:.1%}"
        for name, value in _yardsticks([found for _, found in done]).items()
    }
    return StudyResult(
        name=plan.name,
        question=plan.question,
        reference=arms[0].name,
        arms=arms,
        seeds=tuple(dict.fromkeys(job.seed for job in jobs)),
        metrics=plan.metrics,
        runs=tuple(runs),
        facts=(*facts, *beside.items(), *machine.items()),
        notes=notes,
        warnings=_warnings([found for _, found in done]),
        axis=plan.axis,
    )


def _warnings(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Each once, though all jobs judge on the same images."""
    told = [warning(result["near_copies"]) for result in found if result["near_copies"] is not None]
    return tuple(dict.fromkeys(filter(None, told)))


def _yardsticks(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What must be beaten, mean over the jobs that measured it."""
    names = dict.fromkeys(name for result in found for name in result["yardsticks"])
    return {
        name: mean(result["yardsticks"][name] for result in found if name in result["yardsticks"]) for name in names
    }


def _of_training(job: Job) -> dict[str, float]:
    """What the run's own folder tells; the time of an epoch leaves looks at the run and checkpoints out."""
    if job.config is None:
        return {}
    folder = RunFolder(job.folder)
    summary = read_summary(folder.summary, needed=("terms", "seconds", "images_per_second"))
    found = read_image_facts(folder.data, needed=("images",))
    return {
        "loss": summary["terms"]["reconstruction"],
        "seconds": summary["seconds"],
        "epoch_seconds": found["images"] / summary["images_per_second"],
    }


def _with_yardsticks(
    plan: Study, jobs: Sequence[Job], runs: Sequence[RunResult], done: Sequence[tuple[Job, Mapping[str, Any]]]
) -> tuple[tuple[Arm, ...], list[RunResult]]:
    """The models, and random weights and raw pixels as models of their own."""
    arms, found = list(plan.arms), list(runs)
    numbers: dict[str, dict[str, float]] = {}
    for _, result in done:
        for name, value in result["yardsticks"].items():
            metric, _, who = name.partition(", ")
            if metric in ("knn", "linear_probe"):
                numbers.setdefault(who, {})[metric] = value
    for who, values in numbers.items():
        arms.append(Arm(name=who, what="what must be beaten", options={}))
        found.append(RunResult(arm=who, seed=0, folder=jobs[0].folder, numbers=values, commands=()))
    return tuple(arms), found


def draw_pictures(result: StudyResult, jobs: Sequence[Job], out: Path) -> dict[str, list[Path]]:
    """The same images under the same masks by a model of each arm, all of one seed."""
    first = result.runs[0].seed
    models = {run.arm: load_model(find_weights(run.folder)) for run in result.runs if run.seed == first}
    config = next(iter(models.values())).config
    assert config is not None and config.mean is not None and config.std is not None
    source = open_held_out(jobs[0].data, data_root=jobs[0].data_root)
    images = load_images(
        source,
        in_chans=config.in_chans,
        channels=config.channels,
        no_data=config.no_data,
        pixel_dtype=config.pixel_dtype,
        max_unreadable=0.5,
        memory_limit=0,
    )
    crops, keys = pictured(images, config.img_size, seed=first)
    drawn = draw_comparison(
        models,
        normalise(crops, torch.tensor(config.mean), torch.tensor(config.std)),
        RandomMasking(ratio=COMMON_RATIO).plan(config.grid, keys),
        mean=config.mean,
        std=config.std,
        path=out / "pictures.png",
        title=f"Held-out images, {COMMON_RATIO:.0%} hidden, seed {first}",
    )
    return {"The same images by a model of each arm": drawn}
