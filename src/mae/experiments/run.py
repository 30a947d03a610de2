"""A study from its request to its report."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from mae import records
from mae.config import PretrainConfig
from mae.credentials import concealed
from mae.data import sampled
from mae.data.base import LabelledData, fingerprint_of
from mae.data.images import ImageSet, load_images
from mae.data.sources import open_labelled, open_source
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors import open_extractor
from mae.evaluation.run import Overlap
from mae.experiments.collect import collect, draw_pictures
from mae.experiments.features import Features
from mae.experiments.job import Job, Judgement, feature_read, job_name
from mae.experiments.page import answer, comparison, write_report
from mae.experiments.plan import Bed, Study, differing
from mae.experiments.results import StudyResult
from mae.experiments.runner import Place, alone, run_jobs, write_specs
from mae.experiments.verdict import differences
from mae.options import shown
from mae.pretraining.settle import absolute_source, settle, source_stem, total_steps
from mae.recipes import recipe_config
from mae.report.canvas import visible
from mae.report.tables import show_grid
from mae.training.device import choose_device
from mae.training.distributed import World

STUDIES: Mapping[str, str] = {
    "compare": "Compare",
    "mask_ratio": "MaskRatio",
    "decoder": "Decoder",
    "decoder_depth": "DecoderDepth",
    "levers": "Levers",
    "quality": "Quality",
    "target": "Target",
    "features": "Features",
}
"""Each study's file in this folder, and the class in it that holds its options."""

_LOCKED = (
    "model",
    "img_size",
    "patch_size",
    "in_chans",
    "mlp_ratio",
    "cls_token",
    "pos_embed",
    "epochs",
    "steps",
    "batch_size",
    "statistics",
)
"""Options that no two arms may differ in: those of the encoder, and what it sees how often."""

_FEEDING = ("batch_size", "epochs", "steps", "views", "crop_scale")
"""Options on which it depends which crops an arm is given in which step."""


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
    overlap: Overlap = "error"
    """Test images that are among the training images: an error, or left out of the test."""

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", concealed(self.data))
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
        name: one of `STUDIES`.
        source: the images, see `PretrainConfig.source`; for `features` those that are judged on.
        quiet: show nothing.
        options: of the study (such as `ratios`), of `Request` (such as `seeds`) and of `PretrainConfig` (such as
            `epochs`), which all arms share; `out` is the study's folder. `features` trains nothing and knows `models`,
            `out`, `data_root` and `device`.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: a run failed; the others are done.
    """
    kind = find_study(name)
    values = {key: str(value) if isinstance(value, Path) else value for key, value in options.items()}
    of_kind = {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    chosen, console = records.from_json(kind, of_kind, what=f"option of {name}"), Console(quiet=quiet)
    if isinstance(chosen, Features):
        records.check_known(values, ["out", "data_root", "device"], what="option")
        return run_features(
            chosen,
            data=str(source),
            data_root=Path(values.get("data_root", "data")),
            out=Path(values["out"]) if "out" in values else None,
            device=values.get("device", "auto"),
            console=console,
        )
    of_request = {field.name: values.pop(field.name) for field in fields(Request) if field.name in values}
    request = records.from_json(Request, of_request, what="option")
    recipe = values.pop("recipe", "default")
    config = recipe_config(recipe).override({**values, "source": str(source), "recipe": recipe})
    return run_study(chosen, request, config, given=frozenset(values), console=console)


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

    data = request.data or config.source
    # What is not labelled is refused before anything is trained.
    labelled = open_labelled(data, data_root=config.data_root)
    bed = Bed(
        base=replace(config, out=None, seed=0),
        given=shared,
        find=overridden,
        finetune_epochs=request.finetune_epochs,
        labelled=len(labelled.train.labels),
    )
    plan = _told_apart(options.study(bed))
    out = config.out or Path("runs") / f"study-{plan.name}-{source_stem(config.source)}"
    jobs = _training_jobs(plan, out.resolve(), request, config, data, _fingerprint(labelled))
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
    data = concealed(data)
    labelled = open_labelled(data, data_root=data_root)
    plan = options.study()
    models = [str(Path(name).resolve()) if Path(name).exists() else name for name in options.models]
    ours = [open_extractor(model, device=choose_device(device)).model is not None for model in models]
    out = out or Path("runs") / f"study-features-{source_stem(data)}"
    data_fingerprint = _fingerprint(labelled)
    jobs = [
        Job(
            arm=arm.name,
            seed=0,
            folder=out.resolve() / "runs" / job_name(arm.name, 0),
            data=absolute_source(data),
            data_fingerprint=data_fingerprint,
            data_root=data_root.resolve(),
            device=device,
            # Random weights are those of the first model whose architecture is ours.
            judgements=_beside(plan.judgements, comparators=number == (ours.index(True) if any(ours) else 0)),
            model=model,
        )
        for number, (arm, model) in enumerate(zip(plan.arms, models, strict=True))
    ]
    features = [(f"feature of {name}", ", else ".join(feature_read(name))) for name in options.models]
    return _carry_out(plan, jobs, out, (("judged on", data), *features), console)


def _told_apart(plan: Study) -> Study:
    """The plan with every option that differs named for each arm.

    Raises:
        UsageError: two arms of one name, or two that are the same run.
    """
    configs = {arm.name: config for arm, config in zip(plan.arms, plan.configs, strict=True)}
    if len(configs) < len(plan.arms):
        raise UsageError(f"two of the arms {', '.join(arm.name for arm in plan.arms)} have the same name")
    for (one, first), (other, second) in combinations(configs.items(), 2):
        if not differing({one: first, other: second}):
            raise UsageError(f"the arms {one} and {other} are the same run; leave one of them out")
    options = differing(configs)
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


def _fingerprint(data: LabelledData) -> str:
    """Of both parts, with the classes."""
    parts = [sampled.fingerprint(part.source) for part in (data.train, data.test)]
    return fingerprint_of([*parts, *data.class_names])


def _training_jobs(
    plan: Study, out: Path, request: Request, config: PretrainConfig, data: str, data_fingerprint: str
) -> list[Job]:
    """Every run, seed by seed, so that each arm has as many seeds as any other whenever one looks.

    Raises:
        UsageError: an arm cannot be trained, or the arms differ in what a study locks.
    """
    source = open_source(config.source, data_root=config.data_root)
    images = load_images(
        source,
        in_chans=config.in_chans,
        channels=config.channels,
        no_data=config.no_data,
        max_unreadable=config.max_unreadable,
        memory_limit=0,
    )
    settled = {arm.name: _settle(arm.name, each, images) for arm, each in zip(plan.arms, plan.configs, strict=True)}
    for name, by_arm in differing(settled).items():
        if name in _LOCKED and name not in plan.varied:
            values = ", ".join(f"{arm}: {value}" for arm, value in by_arm.items())
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"the arms differ in {flag} ({values}), so not all else is equal; give {flag} for all")
    return [
        Job(
            arm=arm.name,
            seed=seed,
            folder=out / "runs" / job_name(arm.name, seed),
            data=absolute_source(data),
            data_fingerprint=data_fingerprint,
            images_fingerprint=images.fingerprint(),
            data_root=config.data_root.resolve(),
            device=config.device,
            overlap=request.overlap,
            judgements=_beside(plan.judgements, comparators=(number, seed) == (0, config.seed)),
            total_steps=total_steps(settled[arm.name], len(images)),
            looks=plan.looks,
            config=replace(arm_config, seed=seed, source=absolute_source(config.source)).to_json(),
        )
        for seed in range(config.seed, config.seed + request.seeds)
        for number, (arm, arm_config) in enumerate(zip(plan.arms, plan.configs, strict=True))
    ]


def _settle(arm: str, config: PretrainConfig, images: ImageSet) -> PretrainConfig:
    try:
        return settle(config, images, choose_device(config.device), World())[0]
    except UsageError as error:
        raise UsageError(f"arm {arm}: {error}") from error


def _carry_out(
    plan: Study, jobs: list[Job], out: Path, facts: tuple[tuple[str, str], ...], console: Console
) -> StudyOutcome:
    with alone(out, plan.name):
        write_specs(out, jobs)
        console.print(f"Study {plan.name} in {out}: {plan.question}", highlight=False, soft_wrap=True, markup=False)
        finished, failed = run_jobs(out, jobs, console=console)
        result = collect(plan, jobs, out, facts)
        report = None
        if result.runs:
            pictures = {} if jobs[0].config is None else draw_pictures(result, jobs, out)
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
    for told in result.warnings:
        console.print(visible(told), style="yellow", highlight=False, soft_wrap=True, markup=False)


def _locked(options: Collection[str]) -> str:
    """What is the same in all arms, in words, where they differ in these options."""
    feeding = [name for name in _FEEDING if name in options]
    seen = (
        "What they see and which masks they are given differs with " + ", ".join(feeding).replace("_", " ")
        if feeding
        else "They see the same images in the same order and crops; their masks are drawn from the same numbers, so "
        "that one that hides more hides what the other hides too"
    )
    return f"For each seed all arms begin with the same encoder. {seen}. All are judged alike."


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
        ("locked", _locked(differing(configs))),
    )
