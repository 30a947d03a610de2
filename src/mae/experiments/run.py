"""A study from its request to its report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from rich.console import Console

from mae import records
from mae.config import PretrainConfig
from mae.data.augmentation import central_crop
from mae.data.images import load_images
from mae.data.loaders import normalise
from mae.data.sources import KNOWN, open_held_out, open_labelled, open_source
from mae.errors import MAEError, UsageError
from mae.experiments.features import Features
from mae.experiments.job import Job, Judgement, job_name
from mae.experiments.page import answer, comparison, write_report
from mae.experiments.plan import Bed, Study, commands, differing
from mae.experiments.results import Arm, RunResult, StudyResult
from mae.experiments.runner import Place, run_jobs, write_specs
from mae.experiments.verdict import differences
from mae.masking.random import RandomMasking
from mae.options import shown
from mae.pretraining.parts import FIXED_EPOCH, NUM_PANEL_IMAGES, readable
from mae.pretraining.run import load
from mae.pretraining.settle import settle, total_steps
from mae.randomness import permutation, sample_keys
from mae.recipes import recipe_config
from mae.records import read_json
from mae.report.comparison import draw_comparison
from mae.report.tables import show_grid
from mae.training.device import choose_device
from mae.training.distributed import World
from mae.training.run_folder import RunFolder

STUDIES: Mapping[str, str] = {
    "compare": "Compare",
    "mask_ratio": "MaskRatio",
    "decoder_depth": "DecoderDepth",
    "target": "Target",
    "features": "Features",
}
"""Each study's file in this folder, and the class in it that holds its options."""

_PICTURED_RATIO = 0.75


@dataclass(frozen=True, kw_only=True)
class Request:
    """What every study is told.

    Raises:
        UsageError: no seed, or fine-tuning of a negative length.
    """

    data: Annotated[str | None, shown("the source itself", "LABELLED")] = None
    """Labelled images to judge on."""
    seeds: int = 3
    """Runs of each arm; the first takes --seed, the next ones those after it."""
    finetune_epochs: float = 5.0
    """Passes of fine-tuning each run; 0: none."""

    def __post_init__(self) -> None:
        if self.seeds < 1 or self.finetune_epochs < 0:
            raise UsageError(
                f"--seeds is {self.seeds}, --finetune-epochs {self.finetune_epochs:g}; expected one seed or more, and "
                "0 epochs or more"
            )


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """A study that came to its end, or was stopped.

    Attributes:
        folder: of the study.
        finished: False where a signal stopped it; the same request goes on.
        report: the page; None where no run is done yet.
        result: what was found.
    """

    folder: Path
    finished: bool
    report: Path | None
    result: StudyResult


def find_study(name: str) -> type[Any]:
    """The class of a study's options.

    Raises:
        UsageError: no such study; the nearest names are given.
    """
    records.check_known([name], list(STUDIES), what="study")
    return getattr(import_module(f"mae.experiments.{name}"), STUDIES[name])


def study(name: str, source: str | Path, *, quiet: bool = False, **options: Any) -> StudyOutcome:
    """Train a model in several ways, all else being equal, and tell which is better; as `mae study` does.

    A study that was stopped goes on when it is asked for again in the same words.

    Args:
        name: one of `STUDIES` that train: `compare`, `mask_ratio`, `decoder_depth`, `target`.
        source: the images, see `PretrainConfig.source`.
        quiet: show nothing.
        options: of the study (such as `ratios`), of `Request` (such as `seeds`) and of `PretrainConfig` (such as
            `epochs`), which all arms share; `out` is the study's folder.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a run failed; the others are done.
    """
    kind = find_study(name)
    values = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    of_kind = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    of_request = {field.name: values.pop(field.name) for field in fields(Request) if field.name in values}
    recipe = values.pop("recipe", "default")
    config = recipe_config(recipe).override({**values, "source": str(source), "recipe": recipe})
    return run_study(
        records.from_json(kind, of_kind, what=f"option of {name}"),
        records.from_json(Request, of_request, what="option"),
        config,
        given=frozenset(values),
        console=Console(quiet=quiet),
    )


def run_study(
    options: Any, request: Request, config: PretrainConfig, *, given: frozenset[str], console: Console
) -> StudyOutcome:
    """Carry a study that trains out.

    Args:
        options: of the study: an object of one of its classes.
        request: how often, and judged on what.
        config: the run that all arms share; `out` is the study's folder, `seed` the first seed.
        given: names of the options that were given, which hold for every arm.
        console: where progress is shown.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a run failed; the others are done.
    """
    if not config.source:
        raise UsageError("no images are named; give a folder, a .zip or a name such as builtin:digits")
    shared = given - {"out", "seed", "recipe", "source"}

    def overridden(recipe: str) -> PretrainConfig:
        asked = {name: value for name, value in config.to_json().items() if name in shared}
        return recipe_config(recipe).override({**asked, "source": config.source, "recipe": recipe})

    bed = Bed(
        base=replace(config, out=None, seed=0), given=shared, find=overridden, finetune_epochs=request.finetune_epochs
    )
    plan = _told_apart(options.study(bed))
    out = config.out or Path("runs") / f"study-{plan.name}-{Path(config.source.replace(':', '-')).stem}"
    data = request.data or config.source
    open_labelled(data, data_root=config.data_root)  # refuses what is not labelled before anything is trained
    jobs = _training_jobs(plan, out, request, config, data)
    return _carry_out(plan, jobs, out, _facts(plan, jobs, config, data), console)


def run_features(
    options: Features, *, data: str, data_root: Path, out: Path | None, device: str, console: Console
) -> StudyOutcome:
    """Set models that are trained already beside each other.

    Args:
        options: which models.
        data: labelled images to judge on.
        data_root: where sets known by name are kept.
        out: the study's folder; None: one under `runs/`.
        device: where to compute.
        console: where progress is shown.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a model could not be judged; the others are.
    """
    choose_device(device)
    open_labelled(data, data_root=data_root)
    plan = options.study()
    out = out or Path("runs") / f"study-features-{Path(data.replace(':', '-')).stem}"
    jobs = [
        Job(
            arm=f"model{number}",
            seed=0,
            folder=out / "runs" / f"model{number}",
            data=_absolute(data),
            data_root=data_root.resolve(),
            device=device,
            judgements=_beside(plan.judgements, comparators=number == 0),
            model=str(Path(arm.name).resolve()) if Path(arm.name).exists() else arm.name,
        )
        for number, arm in enumerate(plan.arms)
    ]
    return _carry_out(plan, jobs, out, (("judged on", data),), console)


def _told_apart(plan: Study) -> Study:
    """The plan with every option that differs named for each arm."""
    configs = {arm.name: config for arm, config in zip(plan.arms, plan.configs, strict=True)}
    options = differing(configs)
    if not options:
        raise UsageError(f"the arms {' and '.join(configs)} are the same run; nothing is left to compare")
    arms = [replace(arm, options={name: by_arm[arm.name] for name, by_arm in options.items()}) for arm in plan.arms]
    return replace(plan, arms=tuple(arms))


def _beside(judgements: Sequence[Judgement], *, comparators: bool) -> tuple[Judgement, ...]:
    """Random weights and raw pixels are judged once: they are the same beside every run."""
    return tuple(
        replace(judgement, options={**judgement.options, "comparators": comparators})
        if judgement.protocol in ("knn", "linear_probe")
        else judgement
        for judgement in judgements
    )


def _training_jobs(plan: Study, out: Path, request: Request, config: PretrainConfig, data: str) -> list[Job]:
    """Every run, seed by seed, so that each arm has as many seeds as any other whenever one looks."""
    device = choose_device(config.device)
    source = open_source(config.source, data_root=config.data_root)
    images = load_images(source, in_chans=config.in_chans, max_unreadable=config.max_unreadable, memory_limit=0)
    steps = [total_steps(settle(arm, images, device, World())[0], len(images)) for arm in plan.configs]
    return [
        Job(
            arm=arm.name,
            seed=seed,
            folder=out.resolve() / "runs" / job_name(arm.name, seed),
            data=_absolute(data),
            data_root=config.data_root.resolve(),
            device=config.device,
            judgements=_beside(plan.judgements, comparators=(number, seed) == (0, config.seed)),
            total_steps=steps[number],
            config=replace(arm_config, seed=seed, source=_absolute(config.source)).to_json(),
        )
        for seed in range(config.seed, config.seed + request.seeds)
        for number, (arm, arm_config) in enumerate(zip(plan.arms, plan.configs, strict=True))
    ]


def _absolute(source: str) -> str:
    return source if source in KNOWN else str(Path(source).resolve())


def _carry_out(
    plan: Study, jobs: list[Job], out: Path, facts: tuple[tuple[str, str], ...], console: Console
) -> StudyOutcome:
    write_specs(out, jobs)
    console.print(f"Study {plan.name} in {out}: {plan.question}", highlight=False, soft_wrap=True, markup=False)
    finished, failed = run_jobs(out, jobs, console=console)
    result = _collect(plan, jobs, out, facts)
    report = None
    if result.runs:
        pictures = {} if jobs[0].config is None else _draw(result, jobs, out)
        report = write_report(result, folder=out, pictures=pictures)
        _show(result, console)
    if failed:
        first, words = next(iter(failed.items()))
        raise MAEError(
            f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}. {first} said: {words} "
            f"(all of it in {Place(root=out, name=first).log}). Ask for the study again to try them again"
        )
    return StudyOutcome(folder=out, finished=finished, report=report, result=result)


def _show(result: StudyResult, console: Console) -> None:
    """Numbers and verdicts, in the terminal."""
    found = differences(result)
    table, verdict = comparison(result, found), answer(result, found)
    show_grid(console, table.title, table.header, table.rows)
    console.print(f"{table.text}\n\n{verdict.text}", highlight=False, markup=False)


def _collect(plan: Study, jobs: Sequence[Job], out: Path, facts: tuple[tuple[str, str], ...]) -> StudyResult:
    """What the finished jobs found."""
    done = [(job, read_json(place.result)) for job in jobs if (place := Place(root=out, name=job.name)).finished]
    runs = [
        RunResult(
            arm=job.arm,
            seed=job.seed,
            folder=job.folder,
            numbers={**found["numbers"], **_of_training(job)},
            commands=commands(job, None if job.config is None else recipe_config(job.config["recipe"])),
            seconds=found["seconds"],
        )
        for job, found in done
    ]
    arms = plan.arms
    if jobs[0].config is None:
        arms, runs = _with_yardsticks(plan, jobs, runs, done)
    made_by = {str(found["versions"]) for _, found in done}
    notes = plan.notes if len(made_by) < 2 else (*plan.notes, "The runs were made with different versions of packages.")
    yardsticks = {name: value for _, found in done for name, value in found["yardsticks"].items()}
    machine = {
        name: str(value) for _, found in done for name, value in {**found["hardware"], **found["versions"]}.items()
    }
    beside = {
        f"yardstick: {name}": f"{value:.2f} dB" if name.startswith("psnr") else f"{value:.1%}"
        for name, value in yardsticks.items()
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
        axis=plan.axis,
    )


def _of_training(job: Job) -> dict[str, float]:
    """What the run's own folder tells; the time of an epoch leaves looks at the run and checkpoints out."""
    if job.config is None:
        return {}
    folder = RunFolder(job.folder)
    summary, found = read_json(folder.summary), read_json(folder.data)
    return {
        "loss": summary["terms"]["reconstruction"],
        "seconds": summary["seconds"],
        "epoch_seconds": found["images"] / summary["images_per_second"],
    }


def _with_yardsticks(
    plan: Study, jobs: Sequence[Job], runs: Sequence[RunResult], done: Sequence[tuple[Job, Mapping[str, Any]]]
) -> tuple[tuple[Arm, ...], list[RunResult]]:
    """Models under their own names, and random weights and raw pixels as models of their own."""
    named = {job.arm: arm.name for job, arm in zip(jobs, plan.arms, strict=True)}
    arms, found = list(plan.arms), [replace(run, arm=named[run.arm]) for run in runs]
    numbers: dict[str, dict[str, float]] = {}
    for _, result in done:
        for name, value in result["yardsticks"].items():
            metric, _, who = name.partition(", ")
            if metric in ("knn", "linear_probe"):
                numbers.setdefault(who, {})[metric] = value
    for who, values in numbers.items():
        arms.append(Arm(name=who, what="what must be beaten", options={}))
        found.append(RunResult(arm=who, seed=0, folder=jobs[0].folder, numbers=values, commands=(), seconds=0.0))
    return tuple(arms), found


def _facts(plan: Study, jobs: Sequence[Job], config: PretrainConfig, data: str) -> tuple[tuple[str, str], ...]:
    """What all runs share, and what was done to keep it so."""
    configs = {arm.name: arm_config for arm, arm_config in zip(plan.arms, plan.configs, strict=True)}
    shown = ("model", "img_size", "patch_size", "epochs", "steps", "batch_size", "lr", "base_lr", "precision")
    shared = {name: getattr(plan.configs[0], name) for name in shown if name not in differing(configs)}
    return (
        ("pre-trained on", config.source),
        ("judged on", data),
        *((name.replace("_", " "), str(value)) for name, value in shared.items() if value is not None),
        ("optimizer steps", ", ".join(dict.fromkeys(f"{job.total_steps:,}" for job in jobs))),
        (
            "locked",
            "For each seed all arms begin with the same encoder and see the same images in the same order and crops; "
            "their masks are drawn from the same numbers, so that one that hides more hides what the other hides too. "
            "All are judged alike.",
        ),
    )


def _draw(result: StudyResult, jobs: Sequence[Job], out: Path) -> dict[str, list[Path]]:
    """The same images under the same masks by a model of each arm, all of one seed."""
    first = result.runs[0].seed
    models = {run.arm: load(run.folder) for run in result.runs if run.seed == first}
    config = next(iter(models.values())).config
    assert config is not None and config.mean is not None and config.std is not None
    source = open_held_out(jobs[0].data, data_root=jobs[0].data_root)
    images = load_images(source, in_chans=config.in_chans, max_unreadable=0.5, memory_limit=0)
    order = permutation(first, FIXED_EPOCH, len(images)).tolist()
    shown = list(islice(readable(images, order), NUM_PANEL_IMAGES))
    crops = torch.stack([central_crop(image, config.img_size) for _, image in shown])
    keys = sample_keys(first, FIXED_EPOCH, torch.tensor([number for number, _ in shown]))
    drawn = draw_comparison(
        models,
        normalise(crops, torch.tensor(config.mean), torch.tensor(config.std)),
        RandomMasking(ratio=_PICTURED_RATIO).plan(config.grid, keys),
        mean=config.mean,
        std=config.std,
        path=out / "pictures.png",
        title=f"Held-out images, {_PICTURED_RATIO:.0%} hidden, seed {first}",
    )
    return {"The same images by a model of each arm": drawn}
