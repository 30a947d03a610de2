"""A study from its request to its report."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mae import fragments, records
from mae.config import RunConfig
from mae.credentials import concealed
from mae.data.dataset import sampled
from mae.data.dataset.images import ImageSet, load_images
from mae.data.sources.open import open_labelled, open_source
from mae.errors import MAEError, UsageError
from mae.evaluation.common.record import digest_of
from mae.evaluation.extractors.open import open_extractor
from mae.evaluation.protocols.finetune import takes_augmentation
from mae.experiments.core.collect import collect, draw_pictures
from mae.experiments.core.job import EvalSpec, Job, JobFiles, job_name
from mae.experiments.core.metrics import NUM_NEIGHBOURS
from mae.experiments.core.page import answer, comparison, write_report
from mae.experiments.core.plan import Study, StudyRequest, StudySetup, absolute_model, differing, with_differences
from mae.experiments.core.readout import preferred_features
from mae.experiments.core.results import StudyResult
from mae.experiments.core.runner import check_finished, run_jobs, study_folder, write_specs
from mae.experiments.core.stats import differences
from mae.experiments.studies import STUDIED, find_study
from mae.pretraining.derived import total_steps
from mae.pretraining.resolve import absolute_source, resolve_config, said, source_stem
from mae.recipes import recipe_config
from mae.report.terminal.tables import show_grid
from mae.text import visible
from mae.training.device import choose_device
from mae.training.distributed import World

_FIXED = (
    "model",
    "img_size",
    "patch_size",
    "in_chans",
    "encoder",
    "embed_dim",
    "depth",
    "num_heads",
    "mlp_ratio",
    "norm_eps",
    "cls_token",
    "cls_tokens",
    "pos_embed",
    "epochs",
    "steps",
    "batch_size",
    "statistics",
)
"""Options that no two variants may differ in: those of the encoder, and how much it is trained."""

_SHOWN = 60  # rows of a table, in a notebook

_DECIDE_CROPS = ("batch_size", "epochs", "steps", "repeated_aug", "crop_scale", "color_jitter", "grayscale")
"""Options that decide which crops a variant gets in which step."""


@dataclass(frozen=True, kw_only=True)
class StudyOutcome:
    """A study that finished, or was stopped.

    Attributes:
        folder: of the study.
        finished: False where a signal stopped it; the same request resumes it.
        report: the page; None where no run is done yet.
        result: of the runs that are done.
    """

    folder: Path
    finished: bool
    report: Path | None
    result: StudyResult

    def _repr_html_(self) -> str:
        title = f"Study {self.result.name}: {len(self.result.runs)} of {self.result.planned} runs done"
        facts = [("question", self.result.question), ("page", self.report or "none yet")]
        if not self.result.runs:
            return fragments.table(title, facts)
        found = differences(self.result)
        compared, verdict = comparison(self.result, found), answer(self.result, found)
        told = fragments.table(title, [*facts, ("answer", verdict.text)])
        return told + fragments.table(compared.title, compared.rows[:_SHOWN], header=compared.header)


def study(name: str, source: str | Path, *, quiet: bool = False, **options: Any) -> StudyOutcome:
    """Train a model in several ways, all else being equal, and report which is better; as `mae study` does.

    A study that was stopped resumes when it is called again with the same arguments.

    Args:
        name: of the study, see `mae study`.
        source: the images, see `RunConfig.source`; for a study that trains nothing, such as `features`, the
            labelled images of the evaluations.
        quiet: print nothing.
        options: of the study (such as `ratios`), of `StudyRequest` (such as `seeds`) and of `RunConfig` (such as
            `epochs`), which all variants share; `out` is the study's folder. A study that trains nothing takes its own
            options, `out`, `data_root` and `device`.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a run failed; the others are done.
    """
    kind = find_study(name)
    values = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    of_kind = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    chosen, console = records.from_json(kind, of_kind, what=f"option of {name}"), Console(quiet=quiet)
    if not kind.trains:
        records.check_known(values, ["out", "data_root", "device"], what="option")
        return compare_models(
            chosen,
            data=str(source),
            data_root=Path(values.get("data_root", "data")),
            out=Path(values["out"]) if "out" in values else None,
            device=values.get("device", "auto"),
            console=console,
        )
    of_request = {field.name: values.pop(field.name) for field in fields(StudyRequest) if field.name in values}
    request = records.from_json(StudyRequest, of_request, what="option")
    recipe = values.pop("recipe", STUDIED)
    config = recipe_config(recipe).override({**values, "source": str(source), "recipe": recipe})
    return run_study(chosen, request, config, given=frozenset(values), console=console)


def run_study(
    options: Any, request: StudyRequest, config: RunConfig, *, given: frozenset[str], console: Console
) -> StudyOutcome:
    """Run a study that trains.

    Args:
        options: of the study: an object of one of the classes in `mae.experiments.studies`.
        request: number of runs, and their evaluations.
        config: the run that all variants share; `out` is the study's folder, `seed` the first seed.
        given: names of the options that were given, which hold for every variant.
        console: where progress is shown.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a run failed; the others are done.
    """
    if not config.source:
        raise UsageError("no images are named; give a folder, a .zip or a name such as builtin:digits")
    shared = given - {"out", "seed", "recipe", "source"}

    def overridden(recipe: str) -> RunConfig:
        values = {name: value for name, value in config.flat().items() if name in shared}
        return recipe_config(recipe).override({**values, "source": config.source, "recipe": recipe})

    data = request.data or config.source
    labelled = open_labelled(
        data, data_root=config.machine.data_root
    )  # refuses unlabelled images before anything is trained
    if len(labelled.train.labels) < NUM_NEIGHBOURS:
        raise UsageError(
            f"{data} holds {len(labelled.train.labels)} labelled training images; expected {NUM_NEIGHBOURS} or more, "
            "as many as vote in a study's k-NN"
        )
    setup = StudySetup(
        base=config.override({"out": None, "seed": 0}),
        given=shared,
        find=overridden,
        finetune_epochs=request.finetune_epochs,
        labelled=len(labelled.train.labels),
    )
    plan = with_differences(options.study(setup))
    out = config.machine.out or Path("runs") / f"study-{plan.name}-{source_stem(config.source)}"
    jobs = _training_jobs(plan, out.resolve(), request, config, data, sampled.labelled_fingerprint(labelled))
    _check_names(jobs)
    return _run(plan, jobs, out, _facts(plan, jobs, config, data), console)


def compare_models(
    options: Any, *, data: str, data_root: Path, out: Path | None, device: str, console: Console
) -> StudyOutcome:
    """Run a study of trained models.

    Args:
        options: of the study: an object of a class in `mae.experiments.studies` that trains nothing.
        data: labelled images for the evaluations.
        data_root: where data sets known by name are kept.
        out: the study's folder; None: one under `runs/`.
        device: where to compute.
        console: where progress is shown.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a model could not be evaluated; the others are done.
    """
    data = concealed(data)
    labelled = open_labelled(data, data_root=data_root)
    plan = options.study()
    models = list(map(absolute_model, options.models))
    opened = [open_extractor(model, device=choose_device(device)) for model in models]
    ours = [extractor.model is not None for extractor in opened]
    weights = [digest_of(extractor.identity) or "" for extractor in opened]
    del opened
    out = out or Path("runs") / f"study-{plan.name}-{source_stem(data)}"
    data_fingerprint = sampled.labelled_fingerprint(labelled)
    jobs = [
        Job(
            variant=variant.name,
            seed=0,
            folder=out.resolve() / "runs" / job_name(variant.name, 0),
            data=absolute_source(data),
            data_fingerprint=data_fingerprint,
            data_root=data_root.resolve(),
            device=device,
            # Random weights are those of the first model of our own architecture.
            evaluations=_with_baselines(plan.evaluations, number == (ours.index(True) if any(ours) else 0)),
            model=model,
            weights=digest,
        )
        for number, (variant, model, digest) in enumerate(zip(plan.variants, models, weights, strict=True))
    ]
    _check_names(jobs)
    features = [(f"feature of {name}", ", else ".join(preferred_features(name))) for name in options.models]
    return _run(plan, jobs, out, (("evaluated on", data), *features), console)


def _without_augmentation(evaluations: Sequence[EvalSpec]) -> tuple[EvalSpec, ...]:
    """The evaluations; fine-tuning without the colour changes that are made for 8 bits, of all variants alike."""
    return tuple(
        replace(spec, options={**spec.options, "augment": False}) if spec.protocol == "finetune" else spec
        for spec in evaluations
    )


def _with_baselines(evaluations: Sequence[EvalSpec], measured: bool) -> tuple[EvalSpec, ...]:
    """The evaluations; random weights and raw pixels are measured in one run, since they are the same for all."""
    return tuple(
        replace(spec, options={**spec.options, "baselines": measured})
        if spec.protocol in ("knn", "linear_probe")
        else spec
        for spec in evaluations
    )


def _check_names(jobs: Sequence[Job]) -> None:
    """Refuse variants whose runs or numbers would be kept in the same files."""
    models: dict[str, str] = {}
    for job in jobs:
        if (other := models.setdefault(job.name, job.variant)) != job.variant:
            raise UsageError(f"{other} and {job.variant} would both be called {job.name} here; rename one of the two")


def _training_jobs(
    plan: Study, out: Path, request: StudyRequest, config: RunConfig, data: str, data_fingerprint: str
) -> list[Job]:
    """Every run, seed by seed, so that all variants have equally many runs at any time.

    Raises:
        UsageError: a variant cannot be trained, or the variants differ in an option that studies hold fixed.
    """
    source = open_source(config.source, data_root=config.machine.data_root)
    images = load_images(
        source,
        in_chans=said(config, "in_chans"),
        channels=said(config, "channels"),
        nodata=said(config, "nodata"),
        max_unreadable=config.data.max_unreadable,
        memory_limit=0,
    )
    evaluations = plan.evaluations if takes_augmentation(images) else _without_augmentation(plan.evaluations)
    resolved = {
        variant.name: _resolve(variant.name, each, images)
        for variant, each in zip(plan.variants, plan.configs, strict=True)
    }
    for name, by_variant in differing(resolved).items():
        if name in _FIXED and name not in plan.varied:
            values = ", ".join(f"{variant}: {value}" for variant, value in by_variant.items())
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"the variants differ in {flag} ({values}), so not all else is equal; give {flag} for all")
    return [
        Job(
            variant=variant.name,
            seed=seed,
            folder=out / "runs" / job_name(variant.name, seed),
            data=absolute_source(data),
            data_fingerprint=data_fingerprint,
            images_fingerprint=images.fingerprint(),
            data_root=config.machine.data_root.resolve(),
            device=config.machine.device,
            overlap=request.overlap,
            evaluations=_with_baselines(evaluations, (number, seed) == (0, config.optim.seed)),
            total_steps=total_steps(resolved[variant.name], len(images)),
            checkpoints=plan.checkpoints,
            config=variant_config.override({"seed": seed, "source": absolute_source(config.source)}).to_json(),
        )
        for seed in range(config.optim.seed, config.optim.seed + request.seeds)
        for number, (variant, variant_config) in enumerate(zip(plan.variants, plan.configs, strict=True))
    ]


def _resolve(variant: str, config: RunConfig, images: ImageSet) -> RunConfig:
    try:
        return resolve_config(config, images, choose_device(config.machine.device), World())
    except UsageError as error:
        raise UsageError(f"variant {variant}: {error}") from error


def _run(plan: Study, jobs: list[Job], out: Path, facts: tuple[tuple[str, str], ...], console: Console) -> StudyOutcome:
    with study_folder(out, plan.name):
        write_specs(out, jobs)
        check_finished(out, jobs)
        console.print(f"Study {plan.name} in {out}: {plan.question}", highlight=False, soft_wrap=True, markup=False)
        finished, failed = run_jobs(out, jobs, console=console)
        result = collect(plan, jobs, out, facts)
        report = None
        if result.runs:
            pictures = () if jobs[0].config is None else draw_pictures(result, jobs, out)
            report = write_report(result, folder=out, pictures=pictures)
            _show(result, console)
    if failed:
        first, line = next(iter(failed.items()))
        raise MAEError(
            f"{len(failed)} of {len(jobs)} runs failed: {', '.join(failed)}. {first}: {line} "
            f"(full log: {JobFiles(root=out, name=first).log}). Rerun the same command to retry them"
        )
    return StudyOutcome(folder=out, finished=finished, report=report, result=result)


def _show(result: StudyResult, console: Console) -> None:
    """Print numbers, verdicts and warnings."""
    found = differences(result)
    table, verdict = comparison(result, found), answer(result, found)
    show_grid(console, table.title, table.header, table.rows)
    console.print(f"{table.text}\n\n{verdict.text}", highlight=False, markup=False)
    for warning in result.warnings:
        console.print(visible(warning), style="yellow", highlight=False, soft_wrap=True, markup=False)


def _held_fixed(options: Collection[str]) -> str:
    """What all variants share, as a sentence, where they differ in these options."""
    deciding = [name for name in _DECIDE_CROPS if name in options]
    crops = (
        "Their crops and masks differ with " + ", ".join(deciding).replace("_", " ")
        if deciding
        else "They see the same images in the same order and crops; their masks are drawn from the same random "
        "numbers, so that a higher mask ratio masks all that a lower one masks"
    )
    return f"For each seed all variants start from the same encoder weights. {crops}. All are evaluated alike."


def _facts(plan: Study, jobs: Sequence[Job], config: RunConfig, data: str) -> tuple[tuple[str, str], ...]:
    """What all runs share."""
    configs = {
        variant.name: variant_config for variant, variant_config in zip(plan.variants, plan.configs, strict=True)
    }
    shown = ("model", "img_size", "patch_size", "epochs", "steps", "batch_size", "lr", "base_lr", "precision")
    shared = {name: plan.configs[0].flat().get(name) for name in shown if name not in differing(configs)}
    return (
        ("pre-trained on", config.source),
        ("evaluated on", data),
        *((name.replace("_", " "), str(value)) for name, value in shared.items() if value is not None),
        ("optimizer steps", ", ".join(dict.fromkeys(f"{job.total_steps:,}" for job in jobs))),
        ("held fixed", _held_fixed(differing(configs))),
    )
