"""The JSON files of a checkpoint, checked value by value: its manifest and the state of the training.

No PyTorch here. Files may come from anyone, or may have been edited by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from mae import records
from mae.errors import MAEError, UsageError

MODEL, OPTIMIZER, TEACHER = "model.safetensors", "optimizer.safetensors", "teacher.safetensors"
STATE, MANIFEST = "state.json", "manifest.json"
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """Facts of a written file.

    Attributes:
        bytes: its size.
        sha256: its digest, hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        step: optimizer steps done, 1 or more.
        kept: whether the checkpoint is kept for good.
        files: the other files by name.

    Raises:
        UsageError: a value that no manifest has.
    """

    step: int
    kept: bool
    files: dict[str, FileFacts]

    def __post_init__(self) -> None:
        if self.step < 1:
            raise UsageError(f"step is {self.step}; expected 1 or more")
        if set(self.files) - {TEACHER} != {MODEL, OPTIMIZER, STATE}:
            named = records.shown(sorted(self.files))
            raise UsageError(f"it lists the files {named}; expected {MODEL}, {OPTIMIZER} and {STATE}")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of a training, beside weights and running averages.

    Attributes:
        step: optimizer steps done, 1 or more.
        samples: samples seen.
        seconds: of training so far.
        scaler: the state of fp16's gradient scaler; empty in other precisions.
        rolled_back_at: the step at which the run last rolled back to a checkpoint; None: never.
        identity: of the run, by name.

    Raises:
        UsageError: a value that no training has.
    """

    step: int
    samples: int
    seconds: float
    scaler: dict[str, int | float]
    rolled_back_at: int | None
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        back = self.rolled_back_at
        self._expect("step", self.step >= 1, "1 or more")
        self._expect("samples", self.samples >= self.step, f"{self.step} (a sample a step) or more")
        self._expect("seconds", 0 <= self.seconds < inf, "a finite number of 0 or more")
        self._expect("rolled_back_at", back is None or 0 < back <= self.step, f"null, or 1 to {self.step}")

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(f"{name} is {getattr(self, name)}; expected {expected}")


def read_manifest(path: Path, *, folder_step: int | None) -> Manifest:
    """The manifest of a checkpoint's folder.

    Args:
        path: the checkpoint's folder.
        folder_step: the step in the folder's name; None: it has another name.

    Raises:
        UsageError: no manifest, or that of another step.
    """
    file = path / MANIFEST
    found = records.read_record(Manifest, file, what="entry")
    if folder_step not in (None, found.step):
        raise UsageError(f"{file}: step is {found.step}; expected {folder_step}, as in its folder's name")
    return found


def read_training_state(path: Path, *, folder_step: int | None) -> TrainingState:
    """The state in a checkpoint's folder.

    Args:
        path: see `read_manifest`.
        folder_step: see `read_manifest`.

    Raises:
        MAEError: no state, or that of another step.
    """

    def read() -> TrainingState:
        found = records.read_record(TrainingState, path / STATE, what="entry")
        if folder_step not in (None, found.step):
            raise UsageError(f"{path / STATE}: step is {found.step}; expected {folder_step}, as in its folder's name")
        return found

    return valid(path, read)


def check_run(
    path: Path,
    state: TrainingState,
    *,
    identity: Mapping[str, Any],
    batch_size: int,
    total_steps: int,
    scaler: Mapping[str, int | float],
) -> None:
    """Refuse a checkpoint that a run cannot have written.

    Args:
        path: of the checkpoint.
        state: in it.
        identity: of the run.
        batch_size: of the run.
        total_steps: of the run.
        scaler: the state of a fresh gradient scaler of the run.

    Raises:
        MAEError: another run wrote it, or its values were edited.
    """
    for name, value in identity.items():
        if name not in state.identity or state.identity[name] != value:
            other = records.shown(state.identity[name]) if name in state.identity else "nothing"
            raise MAEError(
                f"{path} was written with {name} {other}, this run has {records.shown(value)}; start a new run in "
                "another folder, or resume with the options it was started with"
            )
    samples = state.step * batch_size
    wrong = check_scaler(state.scaler, scaler)
    if unknown := sorted(state.identity.keys() - identity.keys()):
        wrong = f"identity has the entries {records.shown(unknown)}, which this run does not have"
    if state.samples != samples:
        wrong = f"samples is {state.samples}; expected {samples}, batches of {batch_size}"
    if state.step > total_steps:
        wrong = f"step is {state.step}; expected at most {total_steps}, the steps of this run"
    if wrong:
        raise refused(path, f"{path / STATE}: {wrong}")


def check_scaler(given: Mapping[str, int | float], usual: Mapping[str, int | float]) -> str:
    """What is wrong with the stored state of a gradient scaler; empty: nothing.

    Args:
        given: as stored.
        usual: the state of a fresh one.
    """
    if given.keys() != usual.keys():
        return f"scaler has the entries {sorted(given)}; expected {sorted(usual)}"
    changing: dict[str, Callable[[int | float], bool]] = {
        "scale": lambda value: 0 < value < inf,
        "_growth_tracker": lambda value: isinstance(value, int) and 0 <= value < usual["growth_interval"],
    }
    for name, value in given.items():
        holds = changing[name](value) if name in changing else value == usual[name]
        if not holds:
            return f"scaler's {name} is {value}; expected, for example, {usual[name]}"
    return ""


def valid(path: Path, read: Callable[[], _Record]) -> _Record:
    """What `read` returns, for a checkpoint whose files match its manifest.

    Raises:
        MAEError: the values are not valid; names the folder to delete.
    """
    try:
        return read()
    except MAEError as error:
        raise refused(path, str(error)) from error


def refused(path: Path, wrong: str) -> MAEError:
    """The error for a checkpoint that matches its manifest, and yet is none of this run."""
    return MAEError(
        f"{wrong}; the checkpoint was edited, or another version of mae wrote it: delete {path} "
        "to resume from an earlier checkpoint"
    )
