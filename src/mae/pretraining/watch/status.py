"""Watching a run, or a training with labels, from outside: what its files tell of it, until it is over.

No PyTorch here: who watches should not take the memory of what is watched.
"""

import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live

from mae.config import RunConfig
from mae.errors import MAEError, UsageError
from mae.pretraining.watch.looks import read_looks
from mae.pretraining.watch.verdict import verdict
from mae.recipes.reference import reference_for
from mae.report.figures.curves import Line, read_line
from mae.report.html.watch import Look, Newest, RunState, Warned, terminal_view, write_watch_page
from mae.training.lock import was_killed
from mae.training.log import LogRow, loss_rows, read_rows
from mae.training.run_folder import RunFolder, check_local
from mae.training.run_records import Ending, read_ending, read_image_facts, read_summary, read_training

# The names that `RunFolder` gives, which cannot be asked: its file loads PyTorch.
_CONFIG, _DATA, _METRICS, _SUMMARY = "config.json", "data.json", "metrics.jsonl", "summary.json"
_TRAINING = "training.json"  # of a training with labels, in a folder of its own below the run's
_ENDED = "ended.json"
_PANELS, _CHECKPOINTS = "panels", "checkpoints"
_GENERATED = b'content="openmae"'
"""In the head of every page of ours."""

_PACE_ROWS = 20
_PATIENCE = 4
"""A run is held for stopped that is silent for so many times its longest gap between two rows."""
_LEAST_PATIENCE = 60.0  # seconds
_FIRST_PATIENCE = 600.0  # seconds: before the first rows it compiles, reads, draws and measures
_SECONDS_BETWEEN_VIEWS = 2.0
_OF_THE_WHOLE_RUN = ("loss", "terms", "images_per_second")  # what a summary tells better than the last row
_OF_SUMMARY = ("steps", *_OF_THE_WHOLE_RUN)


def watch(folder: Path, *, page: Path | None, every: int, once: bool, console: Console) -> None:
    """Show the state of a run until it is finished or Ctrl-C is pressed.

    Args:
        folder: of a run, or of a training with labels; nothing is written there.
        page: an HTML file to write it to as well, and to write again.
        every: seconds between two versions of that file.
        once: show and write it once.
        console: where to show it; one that is no terminal gets the last state alone, at once where there is no page.

    Raises:
        UsageError: `folder` holds no run, or `page` or `every` cannot be as asked.
        MAEError: the run's files are damaged, or the page cannot be written.
    """
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--page is {page}; expected a file that ends in .html, so that nothing else is replaced")
    if page is not None and page.is_file() and _GENERATED not in page.read_bytes()[:2000]:
        raise UsageError(f"--page is {page}, a file that is there already and no page of mae; choose another name")
    if every < 1:
        raise UsageError(f"--every is {every}; expected 1 second or more")
    try:
        if not once and (page is not None or console.is_terminal):
            _follow(folder, page, every, console)
    except KeyboardInterrupt:  # the usual way to end it, and no failure
        pass
    state = read_state(folder, now=time.time())
    if once or not console.is_terminal:
        console.print(terminal_view(state))
    if page is not None:
        write_watch_page(state, page, refresh=None)  # nobody writes it again
        console.print(f"Page in {page}", soft_wrap=True, highlight=False, markup=False)


def _follow(folder: Path, page: Path | None, every: int, console: Console) -> None:
    """Show and write the state until the run is finished."""
    due, silence = time.monotonic(), _Silence(folder)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            state = read_state(folder, now=time.time(), silent=silence.seconds())
            if console.is_terminal:
                live.update(terminal_view(state), refresh=True)
            if state.status == "finished" or state.ended_by:
                return
            if page is not None and time.monotonic() >= due:
                write_watch_page(state, page, refresh=every)
                due = time.monotonic() + every
            time.sleep(min(_SECONDS_BETWEEN_VIEWS, every))


class _Silence:
    """How long a run has written nothing, by a clock that does not jump.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._marks = self._look()
        self._changed_at: float | None = None

    def seconds(self) -> float | None:
        """Since the last change that was seen here; None: none was seen yet."""
        if (marks := self._look()) != self._marks:
            self._marks, self._changed_at = marks, time.monotonic()
        return None if self._changed_at is None else time.monotonic() - self._changed_at

    def _look(self) -> list[tuple[int, int]]:
        return [(status.st_mtime_ns, status.st_size) for status in _files(self._folder)]


def read_state(folder: Path, *, now: float, silent: float | None = None) -> RunState:
    """What the files of a run tell of it; they are only read.

    Args:
        folder: the run's folder, of a live run or one that is over.
        now: seconds since 1970.
        silent: seconds for which it has written nothing; None: as its files' times tell, by which a clock that was
            set anew, or another machine's, misleads.

    Raises:
        UsageError: `folder` holds no run, or its `config.json`, `data.json`, `summary.json` or `training.json` is none.
        MAEError: they hold what no run writes.
    """
    if (folder / _TRAINING).is_file():
        with _explained(folder, _TRAINING):
            return _training_state(folder, now, now - silent if silent is not None else _written_at(folder, now))
    if not (folder / _CONFIG).is_file():
        check_local(folder)
        raise UsageError(f"{folder} holds no run (no {_CONFIG} there); give the folder of a run, such as runs/NAME")
    config = RunConfig.read(folder / _CONFIG, as_options=True)  # components would load PyTorch
    found = read_image_facts(folder / _DATA, needed=("images",))
    summary = read_summary(folder / _SUMMARY, needed=_OF_SUMMARY) if (folder / _SUMMARY).is_file() else None
    with _explained(folder, f"{_DATA} or {_SUMMARY}"):
        rows = read_rows(folder / _METRICS)
        written_at = _written_at(folder, now) if silent is None else now - silent
        ending = read_ending(folder / _ENDED)
        state = _state(folder, config, found, summary, rows, ending, now, written_at)
    return _with_reference(state, config, state.total_steps * (config.optim.batch_size or 0))


@contextmanager
def _explained(folder: Path, files: str) -> Iterator[None]:
    """Name the files where they hold what no run writes."""
    try:
        yield
    except (MAEError, UsageError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:  # such as a row without a step
        raise MAEError(
            f"{_METRICS}, {files} in {folder} holds what no run writes ({type(error).__name__}: {error}); "
            "expected what docs/reference/run-folder.md tells of; put back what was edited by hand"
        ) from error


def _training_state(folder: Path, now: float, written_at: float) -> RunState:
    """The state of a training with labels. It never says how it ended: one that is silent for long was stopped."""
    training, rows = read_training(folder / _TRAINING), read_rows(folder / _METRICS)
    total, trained = training.pop("total_steps"), loss_rows(rows)
    # The last look comes after the last step.
    looked = any("evaluation" in row and row["step"] >= total for row in rows)
    term = next(iter(trained[0]["terms"]), "loss") if trained else "loss"
    return replace(
        _progress(folder, rows, total, now, written_at, finished=looked, broken_off=False),
        newest=_newest(trained, None),
        loss=_loss_line(trained, term),
        loss_name=term.replace("_", " "),
        facts=[(name.replace("_", " "), str(value)) for name, value in training.items()],
        resume="the same command",
    )


def _state(
    folder: Path,
    config: RunConfig,
    found: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    rows: Sequence[LogRow],
    ending: Ending | None,
    now: float,
    written_at: float,
) -> RunState:
    trained, total = loss_rows(rows), _total_steps(config, found, summary, rows)
    broken_off = ending is not None and ending.how != "finished"
    # A run that is over has them in its summary; one that was resumed has measured them again.
    baselines = [row["baselines"] for row in (*rows, summary or {}) if "baselines" in row]
    run = shlex.quote(str(folder))
    return replace(
        _progress(folder, rows, total, now, written_at, finished=summary is not None, broken_off=broken_off),
        newest=_newest(trained, summary),
        loss=_loss_line(trained, "reconstruction"),
        loss_name="reconstruction loss",
        baselines=_floats(baselines[-1]) if baselines else {},
        warnings=[
            Warned(step=row["step"], name=str(row["warning"]["name"]), text=str(row["warning"]["text"]))
            for row in rows
            if "warning" in row
        ],
        panel=max((folder / _PANELS).glob("step-*.png"), default=None),
        facts=_facts(config, found),
        ended_by=f"{ending.how}: {ending.why}" if ending is not None and ending.how != "finished" else "",
        verdict=verdict(trained, read_looks(rows), baselines[-1] if baselines else {}),
        resume=RunFolder(folder).resume_command,
        next_commands=(
            f"mae reconstruct {run} IMAGE ...",
            f"mae neighbours {run} IMAGES/",
            f"mae evaluate all {run} --data LABELLED/",
        ),
    )


def _progress(
    folder: Path,
    rows: Sequence[LogRow],
    total: int,
    now: float,
    written_at: float,
    *,
    finished: bool,
    broken_off: bool,
) -> RunState:
    """What is told alike of a run and of a training with labels: how far it is, and whether it goes on."""
    trained = loss_rows(rows)
    step, silent = max((int(row["step"]) for row in rows), default=0), max(0.0, now - written_at)
    stopped = broken_off or was_killed(folder) or silent > _patience(trained)
    status: Literal["live", "stopped", "finished"] = "finished" if finished else "stopped" if stopped else "live"
    return RunState(
        folder=folder,
        status=status,
        read_at=now,
        written_at=written_at,
        step=step,
        total_steps=total,
        seconds_left=_seconds_left(trained, total - step, silent) if status == "live" else None,
        baselines={},
        looks=_looks(rows),
    )


def _looks(rows: Sequence[LogRow]) -> list[Look]:
    """The online evaluations."""
    return [
        Look(step=row["step"], samples=row["samples"], numbers=_floats(row["evaluation"])) for row in read_looks(rows)
    ]


def _total_steps(
    config: RunConfig, found: Mapping[str, Any], summary: Mapping[str, Any] | None, rows: Sequence[LogRow]
) -> int:
    """Optimizer steps of the whole run: as it told them, else reckoned as it does."""
    if summary is not None:
        return int(summary["steps"])
    told = [row["total_steps"] for row in rows if "total_steps" in row]
    if told:
        return int(told[-1])
    if config.optim.steps is not None:
        return config.optim.steps
    if config.optim.epochs is None or config.optim.batch_size is None:
        raise UsageError(f"{_CONFIG} names no length or no batch; expected one that a run has written")

    from mae.pretraining.derived import total_steps  # loads PyTorch, and only older runs do not tell

    return total_steps(config, int(found["images"]))


def _written_at(folder: Path, now: float) -> float:
    """When something was last written; a folder changes when a file is put there.

    Times that are still to come are of a clock that was set back since: they tell nothing while others do.
    """
    times = [status.st_mtime for status in _files(folder)]
    return max((each for each in times if each <= now + _LEAST_PATIENCE), default=max(times))


def _files(folder: Path) -> list[os.stat_result]:
    files = [folder / name for name in (_CONFIG, _TRAINING, _METRICS, _SUMMARY, _PANELS, _CHECKPOINTS)]
    return [file.stat() for file in files if file.exists()]


def _patience(rows: Sequence[LogRow]) -> float:
    """Seconds of silence that are nothing unusual in this run: looks and checkpoints lie between rows too."""
    if not rows:
        return _FIRST_PATIENCE
    seconds = [0.0, *(row["seconds"] for row in rows)]  # the first look is in what came before the first row
    return max(_LEAST_PATIENCE, _PATIENCE * max(after - before for before, after in pairwise(seconds)))


def _seconds_left(rows: Sequence[LogRow], steps: int, silent: float) -> float | None:
    """Until the end at the pace of the last rows, what lies between them and since the last one included."""
    if not rows:
        return None
    first, last = rows[-_PACE_ROWS:][0], rows[-1]
    if last["step"] > first["step"]:
        pace = (last["seconds"] - first["seconds"]) / (last["step"] - first["step"])
    else:  # the seconds of the first row hold what came before the first step
        pace = last["samples"] / last["step"] / last["images_per_second"]
    return max(0.0, pace * steps - silent)


def _newest(rows: Sequence[LogRow], summary: Mapping[str, Any] | None) -> Newest | None:
    if not rows:
        return None
    last = {**rows[-1], **({} if summary is None else {name: summary[name] for name in _OF_THE_WHOLE_RUN})}
    norm = last["grad_norm"]
    return Newest(
        loss=float(last["loss"]),
        terms=_floats(last["terms"]),
        lr=float(last["lr"]),
        grad_norm=None if norm is None else float(norm),
        images_per_second=float(last["images_per_second"]),
        data_wait=float(last["data_wait"]),
        seconds=float(last["seconds"]),
    )


def _floats(numbers: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _loss_line(rows: Sequence[LogRow], term: str) -> Line | None:
    terms = [{"samples": row["samples"], "loss": row["loss"], **row["terms"]} for row in rows]
    return read_line(terms, x="samples", y=term, label="this run")


def _with_reference(state: RunState, config: RunConfig, samples: int) -> RunState:
    """The state, with what others reached by the same recipe where that is known."""
    curve = reference_for(config)
    line = None if curve is None else curve.line(samples)
    if curve is None or line is None:
        return state
    otherwise = curve.differences(config)
    note = (
        f"Grey: {curve.label}, mean and std; {curve.config['model']} on {curve.config['source']}, "
        f"mae {curve.mae_version}, {curve.hardware}, {curve.date}."
    )
    if otherwise:
        note += f" This run was trained otherwise: {', '.join(otherwise)}."
    return replace(state, reference=line, reference_note=note)


def _facts(config: RunConfig, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run was told, for the reader of a page."""
    flat = config.flat()
    img_size, patch_size = ("x".join(map(str, flat[name])) for name in ("img_size", "patch_size"))
    # Options may have changed the sizes that a name stands for; an encoder of an extension may have none of these.
    known = ((flat.get(name), what) for name, what in (("embed_dim", "wide"), ("depth", "blocks")))
    sizes = [f"{size} {what}" for size, what in known if size is not None]
    return [
        ("recipe", config.recipe),
        ("model", ": ".join(filter(None, [config.model, ", ".join(sizes)]))),
        ("images", f"{found['images']:,} of {config.source}"),
        ("crops", f"{img_size} pixels in patches of {patch_size}, {flat['in_chans']} channel(s)"),
        ("masked", f"{flat['mask_ratio']:.3g} of the patches, {config.optim.mask_schedule}"),
        (
            "batch",
            f"{config.optim.batch_size} images"
            + (f", {config.data.repeated_aug} crops of each" if config.data.repeated_aug > 1 else ""),
        ),
        ("seed", str(config.optim.seed)),
        ("compute", f"{config.machine.device}, {config.optim.precision}"),
    ]
