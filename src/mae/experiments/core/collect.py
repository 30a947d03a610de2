"""From the files of finished jobs to the result of a study, and its pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from mae import records
from mae.config import RunConfig
from mae.core.types import MaskRequest
from mae.data.dataset.images import load_images
from mae.data.loading.loader import normalise
from mae.data.sources.open import open_held_out
from mae.errors import MAEError
from mae.evaluation.common.capabilities import predicts_pixels
from mae.evaluation.common.near_duplicates import warning
from mae.experiments.core.commands import commands
from mae.experiments.core.job import Job, JobFiles, JobResults, read_results
from mae.experiments.core.metrics import COMMON_MASK_RATIO
from mae.experiments.core.plan import Study
from mae.experiments.core.results import CheckpointMetrics, RunResult, StudyResult, Variant
from mae.masks.random import RandomMasking
from mae.models.file import load_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.reconstruction import reconstruct
from mae.pretraining.build import pictured
from mae.pretraining.derived import steps_per_epoch
from mae.recipes import recipe_config
from mae.report.figures.comparison import draw_comparison
from mae.report.html.page import Section
from mae.training.run_folder import RunFolder, find_weights
from mae.training.run_records import read_image_facts, read_summary


def collect(plan: Study, jobs: Sequence[Job], out: Path, facts: tuple[tuple[str, str], ...]) -> StudyResult:
    """The results of the finished jobs."""
    done = [(job, read_results(files.result)) for job in jobs if (files := JobFiles(root=out, name=job.name)).finished]
    runs = [
        RunResult(
            variant=job.variant,
            seed=job.seed,
            folder=job.folder,
            numbers={**results["numbers"], **_of_training(job)},
            commands=commands(job, None if job.config is None else recipe_config(job.config["recipe"])),
            checkpoints=tuple(
                records.from_json(CheckpointMetrics, each, what="entry of a checkpoint")
                for each in results["checkpoints"]
            ),
        )
        for job, results in done
    ]
    variants = plan.variants
    if jobs[0].config is None:
        variants, runs = _with_baselines(plan, jobs, runs, done)
    versions = {str(results["versions"]) for _, results in done}
    notes = (
        plan.notes if len(versions) < 2 else (*plan.notes, "The runs were made with different versions of packages.")
    )
    machine = {
        name: str(value)
        for _, results in done
        for name, value in {**results["hardware"], **results["versions"]}.items()
    }
    baselines = {
        f"baseline: {name}": f"{value:.2f} dB" if name.startswith("psnr") else f"{value:.1%}"
        for name, value in _baselines([results for _, results in done]).items()
    }
    return StudyResult(
        name=plan.name,
        question=plan.question,
        reference=variants[0].name,
        variants=variants,
        seeds=tuple(dict.fromkeys(job.seed for job in jobs)),
        metrics=plan.metrics,
        runs=tuple(runs),
        facts=(*facts, *baselines.items(), *machine.items()),
        notes=notes,
        warnings=_warnings([results for _, results in done]),
        axis=plan.axis,
    )


def _warnings(results: Sequence[JobResults]) -> tuple[str, ...]:
    """Each once, though all jobs evaluate on the same images."""
    warnings = [warning(each["near_copies"]) for each in results if each["near_copies"] is not None]
    return tuple(dict.fromkeys(filter(None, warnings)))


def _baselines(results: Sequence[JobResults]) -> dict[str, float]:
    """Mean of each baseline over the jobs that measured it."""
    names = dict.fromkeys(name for each in results for name in each["baselines"])
    return {name: mean(each["baselines"][name] for each in results if name in each["baselines"]) for name in names}


def _of_training(job: Job) -> dict[str, float]:
    """Numbers from the run's own folder; the time per epoch excludes periodic tasks and checkpoints."""
    if job.config is None:
        return {}
    folder = RunFolder(job.folder)
    summary = read_summary(folder.summary, needed=("terms", "seconds", "images_per_second"))
    config = RunConfig.read(folder.config)
    assert config.optim.batch_size is not None
    # Batches and rates count each view of an image; held-out images are in no batch.
    images = read_image_facts(folder.data, needed=("images",))["images"]
    an_epoch = steps_per_epoch(config, images) * config.optim.batch_size
    return {
        "loss": summary["terms"]["reconstruction"],
        "seconds": summary["seconds"],
        "epoch_seconds": an_epoch / summary["images_per_second"],
    }


def _with_baselines(
    plan: Study, jobs: Sequence[Job], runs: Sequence[RunResult], done: Sequence[tuple[Job, Mapping[str, Any]]]
) -> tuple[tuple[Variant, ...], list[RunResult]]:
    """The models, and the baselines (random weights, raw pixels) as variants of their own."""
    variants, with_baselines = list(plan.variants), list(runs)
    numbers: dict[str, dict[str, float]] = {}
    for _, result in done:
        for name, value in result["baselines"].items():
            metric, _, baseline = name.partition(", ")
            if metric in ("knn", "linear_probe"):
                numbers.setdefault(baseline, {})[metric] = value
    for baseline, values in numbers.items():
        variants.append(Variant(name=baseline, what="baseline", options={}))
        with_baselines.append(RunResult(variant=baseline, seed=0, folder=jobs[0].folder, numbers=values, commands=()))
    return tuple(variants), with_baselines


def draw_pictures(result: StudyResult, jobs: Sequence[Job], out: Path) -> list[Section]:
    """Reconstructions of the same images under the same masks by each variant that predicts pixels, all of one seed.

    The section names the variants whose weights are gone; there is none where no variant predicts pixels.
    """
    first = result.runs[0].seed
    runs = [run for run in result.runs if run.seed == first]
    loaded = {run.variant: load_model(path) for run in runs if (path := _weights(run)) is not None}
    gone = [run.variant for run in runs if run.variant not in loaded]
    models = {variant: model for variant, model in loaded.items() if predicts_pixels(model)}
    if not models and not gone:
        return []
    text = f"Not drawn, since no intact checkpoint of seed {first} is left: {', '.join(gone)}." if gone else ""
    pictures = _reconstructions(models, jobs[0], seed=first, path=out / "pictures.png") if models else []
    return [Section(title="The same images by a model of each variant", text=text, pictures=pictures)]


def _weights(run: RunResult) -> Path | None:
    """Of the finished run; None where its checkpoints were removed or are damaged."""
    try:
        return find_weights(run.folder)
    except MAEError:
        return None


def _reconstructions(models: Mapping[str, MaskedAutoencoder], job: Job, *, seed: int, path: Path) -> list[Path]:
    """Images that a job is evaluated on, drawn by each model, which all predict pixels."""
    config = next(iter(models.values())).config
    assert config is not None and config.tokenizer.mean is not None and config.tokenizer.std is not None
    source = open_held_out(job.data, data_root=job.data_root)
    images = load_images(
        source,
        in_chans=config.layout.channels,
        channels=config.tokenizer.channels,
        nodata=config.tokenizer.nodata,
        pixel_dtype=config.tokenizer.pixel_dtype,
        max_unreadable=0.5,
        memory_limit=0,
    )
    crops, keys = pictured(images, config.tokenizer.img_size, seed=seed)
    inputs = normalise(crops, torch.tensor(config.tokenizer.mean), torch.tensor(config.tokenizer.std))
    plan = RandomMasking(ratio=COMMON_MASK_RATIO).plan(MaskRequest(layout=config.layout, keys=keys))
    return draw_comparison(
        inputs,
        {variant: reconstruct(model, inputs, plan) for variant, model in models.items()},
        mean=config.tokenizer.mean,
        std=config.tokenizer.std,
        path=path,
        title=f"Images of the evaluation, {COMMON_MASK_RATIO:.0%} masked, seed {seed}",
    )
