"""What a run would take and whether it makes sense, told before it begins; nothing is written."""

import shlex
from bisect import bisect_left
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import ceil, floor, inf
from typing import Any

import torch

from mae import records
from mae.config import RunConfig, as_flags
from mae.contention import Contention, num_cores
from mae.data.dataset.images import ImageSet
from mae.errors import UsageError
from mae.pretraining.build import fresh_model, num_workers
from mae.pretraining.derived import effect_of_micro_batches, num_held_out, total_steps
from mae.pretraining.estimate.compilation import is_worth_trying, settle_compilation
from mae.pretraining.estimate.profile import (
    LONG_WAIT,
    Pace,
    StepCost,
    available_memory,
    cost_of,
    fitting_part_size,
    measure_loading,
    measure_steps,
    pace_of,
)
from mae.pretraining.init_weights import InitWeights, inherit_config
from mae.pretraining.resolve import RunContext, prepare_run, resolve_config
from mae.pretraining.sanity import MOST_EPOCHS, advise, advised_epochs, check_schedule, num_parameters
from mae.recipes import recipe_config
from mae.report.terminal.console import duration
from mae.training.device import choose_device, explained_memory_failure
from mae.training.distributed import World
from mae.training.resilience.health import shared_cores
from mae.training.run_folder import RunFolder

_USABLE = 0.9
"""Of the free memory: gaps between tensors, pictures and other programs take some too."""
_PROBES = (2, 4)
_PROBE_SECONDS, _STEP_SECONDS, _LOADING_SECONDS = 2.0, 5.0, 3.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run would take. Times leave out pictures, looks at the features and checkpoints.

    Attributes:
        images: of the source.
        held_out: of them that are not trained on.
        config: the run in full, everything chosen and fitted.
        parameters: trained values of the model.
        device: where it would run.
        workers: processes that load images.
        epochs: passes over the images.
        steps: optimizer steps of the whole run.
        steps_per_epoch: whole batches in a pass.
        part_size: images computed at once.
        largest_part: how many could be, by the memory there is.
        model_rate: images a second of the model, with images there already.
        loader_rate: images a second of the loader, with nothing else running.
        pace: the two together.
        epoch_seconds: time of a pass.
        run_seconds: time of the whole run.
        peak_bytes: memory that a step takes.
        available_bytes: memory that is free.
        hours: the time that the epochs were fitted to; None: they were asked for.
        advice: what is worth knowing or changing, a sentence each.
        command: what to type to carry the plan out.
    """

    images: int
    held_out: int
    config: RunConfig
    parameters: int
    device: str
    workers: int
    epochs: float
    steps: int
    steps_per_epoch: int
    part_size: int
    largest_part: int
    model_rate: float
    loader_rate: float
    pace: Pace
    epoch_seconds: float
    run_seconds: float
    peak_bytes: int
    available_bytes: int
    hours: float | None
    advice: tuple[str, ...]
    command: str

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one key a field."""
        return records.to_json(self)


def plan_pretraining(config: RunConfig, *, hours: float | None, given: Collection[str] = ()) -> tuple[RunContext, Plan]:
    """Read the images, settle the run and plan it; see `make_plan` and, of what was `given`, `prepare_run`.

    Raises:
        UsageError: the request cannot be carried out as asked, or makes no sense.
        MAEError: images that cannot be read, or too little memory for a few of them at once.
    """
    if hours is not None and not 0 < hours < inf:
        raise UsageError(f"--hours is {hours}; expected a finite number above 0")
    if not config.source:
        raise UsageError("no images are named; give a folder, a list file, a .zip or a name such as builtin:photos")
    folder = None if config.machine.out is None else RunFolder(config.machine.out)
    if folder is not None:
        folder.check_new()
    with explained_memory_failure(f"{max(_PROBES)} images at once are too many; take a smaller model or --img-size"):
        prepared = prepare_run(config, folder, choose_device(config.machine.device), World(), resume=False, given=given)
        if hours is not None or config.recipe != "default" or {"epochs", "steps"} & set(given):
            return prepared, make_plan(prepared, hours=hours, given=given)
        prepared, note = _long_enough(prepared)
        plan = make_plan(prepared, hours=None, given=given)
        return prepared, replace(plan, advice=(*note, *plan.advice))


def _long_enough(prepared: RunContext) -> tuple[RunContext, list[str]]:
    """A run of no given length with as many epochs as are advised, and what is told of that."""
    epochs = advised_epochs(prepared.steps_per_epoch)
    if prepared.total_steps >= epochs * prepared.steps_per_epoch:
        return prepared, []
    note = f"{epochs:,} epochs are taken here, for few images need many; --hours or --epochs sets another length"
    return replace(prepared, config=prepared.config.override({"epochs": float(epochs)})), [note]


def make_plan(prepared: RunContext, *, hours: float | None, given: Collection[str] = ()) -> Plan:
    """Measure a few steps and some loading, and work out what the run takes.

    The batch stays what was asked for; it is divided into more parts where it would not fit, which costs next to
    nothing. Where not even one image fits, blocks are computed again in the backward pass
    (`--activation-checkpointing`), which does.

    Args:
        prepared: the run.
        hours: fit the epochs to this time; None: take those that were asked for.
        given: names of the options that the user set: only what was asked for is advised against.

    Raises:
        UsageError: the run makes no sense (see `check_schedule`), not one image fits in memory, or an epoch takes
            longer than `hours`.
        MAEError: images that cannot be read, or too little memory for a few of them at once.
    """
    images, device, world = prepared.images, prepared.device, prepared.world
    if hours is None:
        check_schedule(prepared.config, len(images))  # before any time is spent on it
    available, contention = available_memory(device), Contention()
    costs = _measure_costs(prepared, floor(_USABLE * available))
    loader_rate = measure_loading(prepared, seconds=_LOADING_SECONDS)
    taken = contention.look()
    largest_part = fitting_part_size(costs, floor(_USABLE * available))
    if not largest_part and not prepared.config.machine.activation_checkpointing:
        checkpointed = prepared.config.override({"activation_checkpointing": True})
        plan = make_plan(replace(prepared, config=checkpointed), hours=hours, given=given)
        return replace(
            plan, advice=("--activation-checkpointing, for without it not one image fits in memory", *plan.advice)
        )
    accumulate = fitting_accumulate(prepared.config, world, largest_part)
    config = prepared.config.override({"accumulate": accumulate})
    assert config.optim.batch_size is not None
    part_size = config.optim.batch_size // (accumulate * world.size)
    at_work = cost_of(costs, part_size)
    model_rate = world.size * part_size / at_work.seconds
    pace = pace_of(model_rate, loader_rate, num_workers(prepared))
    epoch_seconds = prepared.steps_per_epoch * config.optim.batch_size / pace.images_per_second
    if hours is not None:
        fitted = max(1, floor(3600 * hours / epoch_seconds))  # whether that makes sense is checked below
        config = config.override({"epochs": float(fitted), "steps": None})
    weights = None if prepared.start is None else prepared.start.config
    config = resolve_config(config, images, device, world, weights)
    model = config.resolved
    if hours is None:
        check_schedule(config, len(images))
    else:
        check_time(config, len(images), hours=hours, epoch_seconds=epoch_seconds)
    steps = total_steps(config, len(images))
    epochs = steps / prepared.steps_per_epoch
    return Plan(
        images=len(images),
        held_out=num_held_out(config, len(images)),
        config=config,
        parameters=num_parameters(model),
        device=str(device),
        workers=num_workers(prepared),
        epochs=epochs,
        steps=steps,
        steps_per_epoch=prepared.steps_per_epoch,
        part_size=part_size,
        largest_part=largest_part,
        model_rate=model_rate,
        loader_rate=loader_rate,
        pace=pace,
        epoch_seconds=epoch_seconds,
        run_seconds=epochs * epoch_seconds,
        peak_bytes=at_work.peak_bytes,
        available_bytes=available,
        hours=hours,
        advice=(
            *_on_parts(prepared.config, accumulate),
            *_on_pace(pace, num_workers(prepared)),
            *_on_cores(taken, device),
            *_on_compilation(prepared, config, epochs * epoch_seconds),
            *advise(config, model, len(images), epoch_seconds=epoch_seconds, given=given),
        ),
        command=command_of(config, images, device, world, prepared.start),
    )


def _measure_costs(prepared: RunContext, usable: int) -> list[StepCost]:
    """Of two small parts, then of the run's own or the largest that fits in memory and does not take long."""
    views = prepared.compared_views
    probes = [views * size for size in _PROBES]
    costs = measure_steps(prepared, part_sizes=probes, seconds=_PROBE_SECONDS)
    size = min(prepared.part_size, fitting_part_size(costs, usable)) // views * views
    while size > max(probes) and cost_of(costs, size).seconds > _STEP_SECONDS:
        size = size // 2 // views * views
    if size > max(probes):
        costs += measure_steps(prepared, part_sizes=[size], seconds=_STEP_SECONDS)
    return costs


def fitting_accumulate(config: RunConfig, world: World, largest_part: int) -> int:
    """The fewest parts, no fewer than asked for, into which the batch divides so that each fits.

    Raises:
        UsageError: not even one image fits.
    """
    assert config.optim.batch_size is not None
    for accumulate in range(config.machine.accumulate, config.optim.batch_size // world.size + 1):
        part_size, left = divmod(config.optim.batch_size, accumulate * world.size)
        if not left and part_size <= largest_part and part_size % config.data.repeated_aug == 0:
            return accumulate
    raise UsageError(
        f"--batch-size {config.optim.batch_size} cannot be divided into --accumulate {config.machine.accumulate} or "
        "more equal parts "
        f"that fit in memory, where {largest_part} image(s) of {config.model} fit at once; take a smaller --model, a "
        "smaller --img-size, larger --patch-size, or fewer parts"
    )


def check_time(config: RunConfig, num_images: int, *, hours: float, epoch_seconds: float) -> None:
    """Refuse a time in which no run that makes sense fits, and say how long one takes.

    Raises:
        UsageError: see `check_schedule`, whose message it is where no number of epochs would do.
    """
    epochs = floor(3600 * hours / epoch_seconds)
    try:
        check_schedule(config, num_images)
    except UsageError:
        least = _least_epochs(config, num_images)
        if least is None:
            raise
    else:
        least = 1
    if epochs < least:
        needed = ceil(1000 * least * epoch_seconds / 3600) / 1000
        raise UsageError(
            f"--hours {hours:g} is {duration(3600 * hours)}, in which {epochs} epoch(s) fit here; a run that learns "
            f"anything takes --hours {needed:g} or more ({least:,} epochs), or a smaller --model or --img-size"
        )


def _least_epochs(config: RunConfig, num_images: int) -> int | None:
    """The fewest epochs with which a run makes sense; None: no number of them does."""

    def makes_sense(epochs: int) -> bool:
        try:
            check_schedule(config.override({"epochs": float(epochs)}), num_images)
        except UsageError:
            return False
        return True

    tried = range(1, MOST_EPOCHS + 1)
    place = bisect_left(tried, True, key=makes_sense)
    return tried[place] if place < len(tried) else None


def _on_parts(asked: RunConfig, accumulate: int) -> list[str]:
    if accumulate == asked.machine.accumulate:
        return []
    why = f"for {asked.machine.accumulate} part(s) of the batch are unequal or do not fit in memory"
    return [f"--accumulate {accumulate}, {why}{effect_of_micro_batches(asked)}"]


def _on_pace(pace: Pace, workers: int) -> list[str]:
    if pace.data_wait < LONG_WAIT:
        return []
    cores = num_cores()
    remedy = (
        f"try --workers {max(cores - 1, 1)}"
        if workers < cores - 1
        else "all cores load already: store the images smaller, or take a machine with more"
    )
    return [f"the model waits for images {pace.data_wait:.0%} of the time; {remedy}"]


def _on_cores(taken: float, device: torch.device) -> list[str]:
    text = shared_cores(taken, threads=torch.get_num_threads(), cores=num_cores())
    return [text] if text and device.type == "cpu" else []


def _on_compilation(prepared: RunContext, config: RunConfig, seconds: float) -> list[str]:
    """What a run of so many seconds gains by compiled blocks, which is tried where `auto` would try it."""
    if config.machine.compile != "auto" or not is_worth_trying(prepared.device, seconds):
        return []
    length = {"accumulate": config.machine.accumulate, "epochs": config.optim.epochs, "steps": config.optim.steps}
    planned = replace(prepared, config=prepared.config.override(length))
    with ExitStack() as held:
        _, told = settle_compilation(planned, fresh_model(planned), done=0, held=held)
    return [told]


def command_of(
    config: RunConfig, images: ImageSet, device: torch.device, world: World, start: InitWeights | None = None
) -> str:
    """The shortest command that carries a settled run out, to be typed in a shell on the same machine.

    It names the source, the model or the weights to begin with, the length, the batch, and what else differs from the
    recipe and would not be chosen for these images anyway.
    """
    recipe = recipe_config(config.recipe)
    told: dict[str, Any] = {"source": config.source, "recipe": config.recipe}
    if start is not None:
        told["init_from"] = config.init_from

    def asked(options: Mapping[str, Any]) -> RunConfig:
        found = recipe.override({**told, **options})
        return found if start is None else inherit_config(found, {*told, *options}, start)

    def means_the_same(options: Mapping[str, Any]) -> bool:
        try:
            weights = None if start is None else start.config
            again = resolve_config(asked(options), images, device, world, weights)
            return _unmeasured(again) == _unmeasured(config)
        except UsageError:
            return False

    plain, begun_with = asked({}).flat(), {} if start is None else start.config.flat()
    decided = config.resolved.measured
    changed = {
        name: value
        for name, value in config.flat().items()
        if name not in told
        and name not in decided
        and (value != plain.get(name) or value != begun_with.get(name, value))
    }
    named_anyway = ("model", "epochs", "steps", "batch_size")
    for name in [name for name, value in changed.items() if value is None or name not in named_anyway]:
        shorter = {key: value for key, value in changed.items() if key != name}
        changed = shorter if means_the_same(shorter) else changed
    begin_flags = [] if config.recipe == "default" else ["--recipe", config.recipe]
    begin_flags += [] if config.init_from is None else ["--init-from", config.init_from]
    flags = [flag for name, value in changed.items() for flag in as_flags(name, value)]
    return shlex.join(["mae", "pretrain", config.source, *begin_flags, *flags])


def _unmeasured(config: RunConfig) -> RunConfig:
    """What is measured is so when a run is prepared, not resolved."""
    return config.override(config.resolved.measured)
