"""The run itself."""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

import torch.distributed as dist
from rich.console import Console
from torch import nn

from mae.config import RunConfig
from mae.data.loading.loader import explained_worker_failure
from mae.errors import MAEError, Stopped, UsageError
from mae.evaluation.common.baselines import TrivialBaselines
from mae.interop.imports.catalogue import terms
from mae.interop.imports.open import open_model
from mae.models.file import load_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.pretraining.build import baselines_of, check_disk, check_model, fresh_model, make_trainer, panel_drawer
from mae.pretraining.checks.doctor import examine
from mae.pretraining.derived import in_smaller_parts
from mae.pretraining.estimate.compilation import settle_compilation
from mae.pretraining.resolve import RunContext, default_place, prepare_run
from mae.pretraining.resume import find_begun_weights, stored_config
from mae.pretraining.summary import show_header, show_summary, summarise
from mae.pretraining.watch.alerts import make_health
from mae.pretraining.watch.online_eval import make_monitor, steps_between_looks
from mae.pretraining.watch.status import read_state
from mae.recipes import recipe_config
from mae.records import write_json
from mae.report.html.live import NotebookConsole, open_console, run_html
from mae.report.html.watch import write_watch_page
from mae.report.terminal.console import ProgressDisplay, stage
from mae.report.terminal.diagnosis import refuse, show_diagnosis
from mae.text import visible
from mae.training.checkpoint import remove_leftovers, usable_checkpoint
from mae.training.device import explained_memory_failure
from mae.training.distributed import World, joined_world, may_be_restarted, was_restarted
from mae.training.engine import Trainer
from mae.training.lock import only_writer
from mae.training.log import Callback, JsonLines, read_rows
from mae.training.run_folder import RunFolder, claim_run_folder, find_weights
from mae.training.run_records import read_ending
from mae.training.saver import BackgroundWriter
from mae.training.settings import PeriodicTask
from mae.training.trackers.installed import check_trackers
from mae.training.trackers.open import open_trackers

_log = logging.getLogger(__name__)
_LONGEST_REASON = 2000  # characters of an error's message


@dataclass(frozen=True, kw_only=True)
class PretrainResult:
    """A run that came to an end.

    Attributes:
        folder: the run's folder.
        finished: False where a signal stopped it; `resume=True` goes on.
        summary: what `summary.json` holds; empty for an unfinished run, and in all processes but the main one.
        stopped_by: that signal's number, SIGINT or SIGTERM (which stands for every one but Ctrl-C); 0: none.
        is_main: whether this process speaks for the run.
    """

    folder: Path
    finished: bool
    summary: Mapping[str, Any]
    stopped_by: int = 0
    is_main: bool = True

    def load_model(self) -> MaskedAutoencoder:
        """The trained model."""
        return load_model(find_weights(self.folder))

    def _repr_html_(self) -> str:
        return run_html(read_state(self.folder, now=time.time()))


def load(path: str | Path) -> PretrainedEncoder:
    """The model of a run folder (its newest checkpoint), a checkpoint folder or a file; of others' weights too.

    A `MaskedAutoencoder`, or where there is no decoder a `PretrainedEncoder`, whose `encode` is the same. Weights that
    the official code, timm, Hugging Face, mmpretrain or lightly wrote are told by their content (see
    `mae.interop.imports.load`); where something about them must be told, `mae import` can be told it. A name of public
    weights, such as `official/base` (see `mae list weights`), is fetched, if no file or folder is called so.

    Comes back on the CPU in evaluation mode; `model.config` tells its sizes and the channel statistics its
    images must be normalised with. Where a run's newest checkpoint is damaged an older one is taken, and a warning of
    the logger `mae.training.checkpoint` says so.

    Raises:
        UsageError: nothing there that is known.
        MAEError: damaged, or changed on its way.
    """
    model, report = open_model(Path(path))
    if report.notes:  # of weights that others wrote, and of what was guessed about them
        licence = report.origin.get("licence")
        _log.warning("%s: %s%s", path, report.line(), f", licence {terms(licence)}" if licence else "")
    return model


def pretrain(
    source: str | Path = "",
    *,
    recipe: str = "default",
    resume: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> PretrainResult:
    """Pre-train a masked autoencoder; does what the command `mae pretrain` does.

    Args:
        source: the images, see `RunConfig.source`.
        recipe: where the defaults come from.
        resume: go on with the run in `out`; begin it where there is none yet and `source` says of what.
        quiet: show nothing; else in a notebook the cell's output is kept up to date, as a terminal is.
        callbacks: get each row of the run's log, in the main process alone; see `mae.Callback`. An exception that one
            raises ends the run, and is raised here.
        options: fields of `RunConfig`, such as `model="mae_vit_small"` or `epochs=100`.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: it failed on the way.
    """
    if not isinstance(source, str | Path):
        raise UsageError(
            f"the source is of type {type(source).__name__}; expected the path or name of images (arrays: save them as "
            ".npy files, one an image, in a folder)"
        )
    if not isinstance(callbacks, Sequence) or not all(isinstance(each, Callback) for each in callbacks):
        raise UsageError(f"callbacks is {callbacks!r}; expected a list of objects with the methods log and close")
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    if source:
        given["source"] = str(source)
    if recipe != "default":
        given["recipe"] = recipe
    config = recipe_config(recipe).override({**given, "recipe": recipe})
    with open_console(quiet=quiet) as console:
        return run_pretraining(config, given=given, resume=resume, console=console, callbacks=callbacks)


def run_pretraining(
    config: RunConfig,
    *,
    given: Collection[str],
    resume: bool,
    console: Console,
    callbacks: Sequence[Callback] = (),
) -> PretrainResult:
    """Carry a configuration out.

    Args:
        config: the whole run.
        given: names of the options the user set: a resumed run refuses other values of them.
        resume: go on with the run in `config.out`; begin it where there is none yet and the configuration has a source.
        console: where header and progress are shown.
        callbacks: see `pretrain`.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: it failed on the way.
    """
    advice = "Go on from the last checkpoint with --resume"
    if dist.is_initialized():
        raise UsageError("this program has joined its processes already; leave that to mae, which does it by itself")
    with (
        joined_world(config.machine.device, advice=advice) as (world, device),
        explained_memory_failure(in_smaller_parts(config)),
        ExitStack() as held,
    ):
        if not world.is_main:
            console = Console(quiet=True)
        config, folder, newest = _begun(config, given, world, console, held, resume=resume or was_restarted())
        world.from_main(partial(check_trackers, config.machine.log_to))
        # No name here keeps the weights to begin with, which are let go once they are in the model.
        with stage(console, f"Reading the images of {config.source}"):
            prepared = [prepare_run(config, folder, device, world, resume=newest is not None, given=given)]
        return _run(prepared.pop(), newest, console, held, callbacks)


def _begun(
    config: RunConfig, given: Collection[str], world: World, console: Console, held: ExitStack, *, resume: bool
) -> tuple[RunConfig, RunFolder | None, str | None]:
    """What to carry out and where, and what to go on from: a checkpoint, an empty text where none was written yet."""
    folder = RunFolder(config.machine.out) if config.machine.out is not None else None
    if folder is None and may_be_restarted():
        raise UsageError("torchrun may start this run anew (--max-restarts); give --out, so that it finds what it did")
    # A source tells what to begin where nothing was begun yet: the same command then does for every start of a job.
    if resume and not (folder is not None and config.source and not world.from_main(lambda: folder.holds_run)):
        begun = world.from_main(lambda: stored_config(config, folder, given)[0].to_json())
        assert folder is not None
        newest, note = world.from_main(lambda: _found(folder, held))
        if note:
            console.print(visible(note), style="yellow", highlight=False, soft_wrap=True, markup=False)
        return RunConfig.from_json(begun), folder, newest
    if folder is not None:
        world.from_main(folder.check_new)
    if not config.source:
        raise UsageError("no images are named; give a folder, a list file, a .zip or a name such as builtin:photos")
    return config, folder, None


def _found(folder: RunFolder, held: ExitStack) -> tuple[str, str]:
    """The checkpoint to go on from, and what to tell of it; from here on until `held` is closed nobody else writes."""
    held.enter_context(only_writer(folder.root))
    # Before anything else: without its checkpoints a run would begin again and write over its history.
    newest, note = usable_checkpoint(folder.checkpoints)
    rows = read_rows(folder.metrics, complete=True)  # what cannot be gone on with is told before anything is changed
    if newest is None:
        ending = read_ending(folder.ended)
        if ending is not None and ending.how != "failed" and ending.saved and ending.step:
            raise UsageError(
                f"{folder.checkpoints} holds no checkpoint, and the run {ending.how} after step {ending.step:,}, which "
                "saved one; put it back, or begin anew with another --out: beginning here would write over its records"
            )
        note = f"{folder.root} holds no checkpoint yet: the run begins again at step 0" if rows else ""
    return "" if newest is None else str(newest), note


def _run(
    prepared: RunContext, newest: str | None, console: Console, held: ExitStack, callbacks: Sequence[Callback]
) -> PretrainResult:
    if newest == "":  # it was stopped before its first checkpoint
        prepared = replace(prepared, start=find_begun_weights(prepared))
    world, model = prepared.world, fresh_model(prepared)
    prepared = replace(prepared, start=None)
    world.from_main(partial(check_disk, prepared, model, newest))
    with _folder_claimed(prepared) as prepared:
        return _carry_out(prepared, model, newest, console, held, callbacks)


@contextmanager
def _folder_claimed(prepared: RunContext) -> Iterator[RunContext]:
    """A new folder of a default name is made at once: a run that is begun beside this one would take the same name."""
    if prepared.resume or prepared.config.machine.out is not None:
        yield prepared
        return
    root = Path(prepared.world.from_main(lambda: str(claim_run_folder(*default_place(prepared.config)).root)))
    try:
        yield replace(prepared, folder=RunFolder(root))
    finally:
        if prepared.world.is_main:
            with suppress(OSError):  # they go where they are empty: nothing was begun
                root.rmdir()
                root.parent.rmdir()


def _carry_out(
    prepared: RunContext,
    model: MaskedAutoencoder,
    newest: str | None,
    console: Console,
    held: ExitStack,
    callbacks: Sequence[Callback],
) -> PretrainResult:
    world = prepared.world
    if not newest and prepared.config.machine.doctor:
        world.from_main(partial(_see_doctor, prepared, model, console))
    with stage(console, "Computing what trivial predictors reach"):
        baselines = baselines_of(prepared, model)
    trainer = make_trainer(prepared, model)
    if newest:
        trainer.resume(Path(newest))
        world.from_main(partial(check_model, prepared, Path(newest)))
    # Made before anything is written: images that cannot be used must not leave a run begun.
    tasks: list[PeriodicTask] = []
    with stage(console, "Reading the images to draw and to evaluate"):
        world.from_main(lambda: tasks.extend(_make_tasks(prepared, trainer.whole_module, console)))
    if not world.is_main:
        tasks = [PeriodicTask(every=every, run=lambda step: None) for every in _steps_between_tasks(prepared)]
    asked = prepared.config.machine.compile
    with stage(console, "Timing the model") if asked != "off" else nullcontext():
        prepared, told = settle_compilation(prepared, model, done=trainer.step, held=held)
    failed = asked == "on" and prepared.config.machine.compile == "off"
    if failed and console.quiet and world.is_main:  # told in the header otherwise
        _log.warning("%s", told)
    show_header(console, prepared, model, trainer, baselines, compilation=told)
    world.from_main(partial(_open_folder, prepared, held))
    with _ending_recorded(prepared, trainer):
        finished = _train(prepared, trainer, tasks, baselines, console, callbacks)
        # The loss at the end is compared with what predictors reach on its target and its masks by then.
        if finished and (prepared.method.target_changes or prepared.method.mask_changes):
            baselines = baselines_of(prepared, model)
        summary = summarise(prepared, trainer, baselines) if finished and world.is_main else {}
    if world.is_main:
        _write_page(prepared.folder, console)
    if summary:
        show_summary(console, prepared.folder, summary)
    return PretrainResult(
        folder=prepared.folder.root,
        finished=finished,
        summary=summary,
        stopped_by=trainer.stopped_by,
        is_main=world.is_main,
    )


@contextmanager
def _ending_recorded(prepared: RunContext, trainer: Trainer) -> Iterator[None]:
    """Write into the run's folder how it ended, for those who watch it; a run that is killed writes nothing."""
    how, why, saved = "stopped", "", False
    try:
        yield
        saved = True
        if trainer.step == prepared.total_steps:
            how = "finished"
        elif trainer.stopped_by:
            why = "Ctrl-C" if trainer.stopped_by == SIGINT else Signals(trainer.stopped_by).name
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, Stopped):
            how = "failed"
        why = str(error)[:_LONGEST_REASON] or type(error).__name__
        raise
    finally:
        if prepared.world.is_main:
            ending = {"how": how, "why": why, "step": trainer.step, "at": round(time.time(), 3), "saved": saved}
            with suppress(OSError):  # on a full disk it is missing, and nothing else is lost
                write_json(prepared.folder.ended, ending)


def _write_page(folder: RunFolder, console: Console) -> None:
    """The run on one page; a run that came to its end is not called failed for want of it."""
    try:
        write_watch_page(read_state(folder.root, now=time.time()), folder.summary_page, refresh=None)
    except (MAEError, OSError) as error:
        console.print(visible(f"the page of the run is missing: {error}"), style="yellow", markup=False, soft_wrap=True)


def _open_folder(prepared: RunContext, held: ExitStack) -> None:
    """Make the folder ready to be written; that of a new run is from here on nobody else's until `held` is closed."""
    folder = prepared.folder
    if not prepared.resume:
        folder.root.mkdir(parents=True, exist_ok=True)
        held.enter_context(only_writer(folder.root))
        folder.begin(prepared.config.to_json(), prepared.found)
    else:
        folder.record_source(prepared.config.source)  # names and content are those of the run by now
    folder.ended.unlink(missing_ok=True)
    remove_leftovers(folder.checkpoints)


def _see_doctor(prepared: RunContext, model: MaskedAutoencoder, console: Console) -> None:
    with stage(console, "Checking images, model and machine"):
        diagnosis = examine(prepared, model)
    show_diagnosis(console, diagnosis, everything=False)
    refuse(diagnosis)


def _make_tasks(prepared: RunContext, model: nn.Module, console: Console) -> list[PeriodicTask]:
    assert isinstance(model, MaskedAutoencoder)
    _, drawing = _steps_between_tasks(prepared)
    writer = BackgroundWriter("picture")
    return [
        make_monitor(prepared, model, console),
        PeriodicTask(every=drawing, run=panel_drawer(prepared, model, writer), finish=writer.wait),
    ]


def _steps_between_tasks(prepared: RunContext) -> tuple[int, int]:
    return steps_between_looks(prepared), max(1, prepared.total_steps // 8)


def _train(
    prepared: RunContext,
    trainer: Trainer,
    tasks: list[PeriodicTask],
    baselines: TrivialBaselines,
    console: Console,
    callbacks: Sequence[Callback],
) -> bool:
    if not prepared.world.is_main:
        with explained_worker_failure():
            return trainer.run(tasks=tasks)
    folder = prepared.folder
    with ExitStack() as stack:
        observers: list[Callback] = []
        for observer in _observers(prepared, trainer, baselines, console):
            stack.callback(observer.close)  # at once: a later one may fail to open
            observers.append(observer)
        for callback in callbacks:
            stack.callback(callback.close)
        observers += callbacks
        health = make_health(prepared, trainer, baselines, observers)
        health.remember(read_rows(folder.metrics))
        if trainer.step == 0:
            observers[0].log(
                {"step": 0, "samples": 0, "baselines": baselines.as_dict(), "total_steps": prepared.total_steps}
            )
        if about := {name: text for task in tasks for name, text in task.about.items()}:
            observers[0].log({"step": trainer.step, "samples": trainer.samples, **about})
        with explained_worker_failure():
            return trainer.run(observers=[*observers, health], tasks=tasks)


def _observers(
    prepared: RunContext, trainer: Trainer, baselines: TrivialBaselines, console: Console
) -> Iterator[Callback]:
    """What a run's rows go to, each opened when it is asked for; the run's own log first."""
    config, start = prepared.config, {"start_step": trainer.step}
    yield JsonLines(prepared.folder.metrics, **start)
    yield from open_trackers(
        config.machine.log_to,
        prepared.folder,
        config=config.to_json(),
        start=(trainer.step, trainer.samples),
        total_steps=prepared.total_steps,
    )
    yield ProgressDisplay(
        console, total_steps=prepared.total_steps, mean_baseline=_mean_baseline(prepared, baselines), **start
    )
    if isinstance(console, NotebookConsole):
        yield console.view.follow(lambda: read_state(prepared.folder.root, now=time.time()))


def _mean_baseline(prepared: RunContext, baselines: TrivialBaselines) -> float | None:
    """What losses are shown beside; None where their target changes."""
    return None if prepared.method.target_changes else baselines.mean_of_visible
