"""What a checkpoint says of itself in JSON, checked value by value: the manifest and the state of the training.

No PyTorch here. Files may come from anyone, or may have been edited by hand.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from mae import records
from mae.errors import MAEError, UsageError

MODEL, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What was written into a file.

    Attributes:
        bytes: its size.
        sha256: its digest, hexadecimal.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint's manifest tells.

    Attributes:
        step: optimizer steps done, 1 or more.
        kept: whether the checkpoint is kept for good.
        files: the other three files by name.

    Raises:
        UsageError: a value that no manifest has.
    """

    step: int
    kept: bool
    files: dict[str, FileFacts]

    def __post_init__(self) -> None:
        if self.step < 1:
            raise UsageError(f"step is {self.step}; expected 1 or more")
        if set(self.files) != {MODEL, OPTIMIZER, STATE}:
            named = records.shown(sorted(self.files))
            raise UsageError(f"it lists the files {named}; expected {MODEL}, {OPTIMIZER} and {STATE}")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """How far a training is, beside weights and averages.

    Attributes:
        step: optimizer steps done, 1 or more.
        samples: samples seen.
        seconds: how long that took.
        scaler: the state of fp16's gradient scaler; empty in other precisions.
        went_back_at: the step at which broken steps last sent the run back to a checkpoint; None: never.
        identity: what run this is, by name.

    Raises:
        UsageError: a value that no training has.
    """

    step: int
    samples: int
    seconds: float
    scaler: dict[str, int | float]
    went_back_at: int | None
    identity: dict[str, Any]

    def __post_init__(self) -> None:
        back = self.went_back_at
        self._expect("step", self.step >= 1, "1 or more")
        self._expect("samples", self.samples >= self.step, f"{self.step} (a sample a step) or more")
        self._expect("seconds", 0 <= self.seconds < inf, "a finite number of 0 or more")
        self._expect("went_back_at", back is None or 0 < back <= self.step, f"null, or 1 to {self.step}")

    def _expect(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UsageError(f"{name} is {getattr(self, name)}; expected {expected}")


def read_manifest(path: Path, *, folder_step: int | None) -> Manifest:
    """The manifest of a checkpoint's folder.

    Args:
        path: the checkpoint's folder.
        folder_step: the step in the folder's name; None: it has another name.

    Raises:
        UsageError: no manifest, or one of another step.
    """
    file = path / MANIFEST
    found = records.read_record(Manifest, file, what="entry")
    if folder_step not in (None, found.step):
        raise UsageError(f"{file}: step is {found.step}; expected {folder_step}, as its folder is called")
    return found


def read_training_state(path: Path, *, folder_step: int | None) -> TrainingState:
    """The state in a checkpoint's folder.

    Args:
        path: see `read_manifest`.
        folder_step: see `read_manifest`.

    Raises:
        MAEError: none, or one of another step.
    """

    def read() -> TrainingState:
        found = records.read_record(TrainingState, path / STATE, what="entry")
        if folder_step not in (None, found.step):
            raise UsageError(f"{path / STATE}: step is {found.step}; expected {folder_step}, as its folder is called")
        return found

    return valid(path, read)


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
            return f"scaler's {name} is {value}; a scaler has, for one, {usual[name]}"
    return ""


def valid(path: Path, read: Callable[[], _Record]) -> _Record:
    """What is read of a checkpoint whose files are those that its manifest lists.

    Raises:
        MAEError: it is not valid; says which folder to delete.
    """
    try:
        return read()
    except MAEError as error:
        raise refused(path, str(error)) from error


def refused(path: Path, wrong: str) -> MAEError:
    """The error for a checkpoint that is as it was written by its manifest, and yet is none of this run."""
    return MAEError(
        f"{wrong}; the manifest beside it was made anew, or another version of mae wrote it: delete {path} "
        "to go on from an earlier checkpoint"
    )
