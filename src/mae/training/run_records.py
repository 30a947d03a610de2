"""The JSON files of a run, checked before use; no PyTorch here."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

from mae import records
from mae.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class _StartFacts:
    model: dict[str, Any]
    loaded: str
    fresh: str | None
    licence: str | None
    digest: str | None = None


@dataclass(frozen=True, kw_only=True)
class _ImageFacts:
    """The contents of `data.json`."""

    source: str = ""
    images: int = 1
    channels: int | None = None
    channel_names: tuple[str, ...] | None = None
    fingerprint: str = ""
    listing: str = ""
    content: str = ""
    version: str = ""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    unreadable: tuple[str, ...] = ()
    start: _StartFacts | None = None

    def __post_init__(self) -> None:
        _expect("images", self.images, self.images >= 1, "1 or more")
        for name in ("mean", "std", "channel_names"):
            values = getattr(self, name)
            holds = values is None or self.channels is None or len(values) == self.channels
            _expect(name, values, holds, f"{self.channels} of them, one a channel")
        _expect("mean", self.mean, all(map(isfinite, self.mean or ())), "finite numbers")
        _expect("std", self.std, all(0 < value < inf for value in self.std or ()), "finite numbers above 0")


@dataclass(frozen=True, kw_only=True)
class _SummaryFacts:
    """The entries of `summary.json` that are read."""

    steps: int = 1
    samples: int = 1
    loss: float = 0.0
    terms: dict[str, float] | None = None
    baselines: dict[str, float] | None = None
    seconds: float = 0.0
    images_per_second: float = 1.0

    def __post_init__(self) -> None:
        _expect("steps", self.steps, self.steps >= 1, "1 or more")
        _expect("samples", self.samples, self.samples >= 1, "1 or more")
        _expect(
            "terms", self.terms, "reconstruction" in (self.terms or ("reconstruction",)), "one named reconstruction"
        )
        _expect("seconds", self.seconds, 0 <= self.seconds < inf, "a finite number of 0 or more")
        rate = self.images_per_second
        _expect("images_per_second", rate, 0 < rate < inf, "a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class _TrainingFacts:
    """The entries of `training.json` that are read."""

    name: str = ""
    note: str = ""
    total_steps: int = 1
    batch_size: int = 1
    rate: float = 0.0
    precision: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        _expect("total_steps", self.total_steps, self.total_steps >= 1, "1 or more")


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The contents of `ended.json`.

    Attributes:
        how: `finished`; `stopped`, by a signal; or `failed`.
        why: the signal or the error's message; empty for a finished run.
        step: optimizer steps done.
        at: when, in seconds since 1970.
        saved: whether a checkpoint of that step was written: not where a second signal did not wait for it.

    Raises:
        UsageError: a value that no run writes.
    """

    how: Literal["finished", "stopped", "failed"]
    why: str
    step: int
    at: float
    saved: bool = True  # records of earlier versions do not say

    def __post_init__(self) -> None:
        _expect("step", self.step, self.step >= 0, "0 or more")
        _expect("at", self.at, 0 <= self.at < inf, "seconds since 1970")


def read_ending(path: Path) -> Ending | None:
    """How a run ended, by its `ended.json`; None: it goes on, or was killed.

    Raises:
        UsageError: the file holds what no run writes.
    """
    if not path.is_file():
        return None
    try:
        return records.read_record(Ending, path, what="entry")
    except UsageError as error:
        raise UsageError(f"{error}; put back what was edited by hand, or delete the file") from error


def read_image_facts(path: Path, *, needed: Collection[str]) -> dict[str, Any]:
    """The contents of a run's `data.json`.

    Args:
        path: the file.
        needed: names of the entries that must be there; others are checked if they are.

    Raises:
        UsageError: no such file, an entry that is missing, or a value that no run writes.
    """
    return _checked(_ImageFacts, path, needed)


def read_summary(path: Path, *, needed: Collection[str]) -> dict[str, Any]:
    """The contents of a run's `summary.json`; see `read_image_facts`."""
    return _checked(_SummaryFacts, path, needed)


def read_training(path: Path) -> dict[str, Any]:
    """The entries of the `training.json` of a training with labels that are read; see `read_image_facts`."""
    names = [field.name for field in fields(_TrainingFacts)]
    values = _checked(_TrainingFacts, path, names)
    return {name: values[name] for name in names}


def _checked(kind: type[Any], path: Path, needed: Collection[str]) -> dict[str, Any]:
    """The file's values; entries that `kind` does not have are ignored."""
    values = records.read_json(path)
    known = {field.name for field in fields(kind)}
    try:
        for name in needed:
            _expect(name, None, values.get(name) is not None, "an entry as a run writes it")
        records.from_json(kind, {name: value for name, value in values.items() if name in known}, what="entry")
    except UsageError as error:
        raise UsageError(f"{path}: {error}; put back what was edited by hand") from error
    return values


def _expect(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {records.shown(value)}; expected {expected}")


_OF_A_LOSS_ROW = ("loss", "lr", "grad_norm", "images_per_second", "data_wait", "seconds", "terms", "samples")
_TABLES = ("terms", "evaluation", "baselines")
_LARGEST = 1 << 63


def wrong_row(row: object, *, complete: bool) -> str:
    """What is wrong with a row of `metrics.jsonl`; empty: nothing.

    Args:
        row: the line as JSON.
        complete: whether rows of losses must have all that a run writes.
    """
    if not isinstance(row, dict):
        return f"{type(row).__name__}; expected a JSON object"
    needed = ("step", *(_OF_A_LOSS_ROW if complete and "loss" in row else ()))
    if missing := [name for name in needed if name not in row]:
        return f"{', '.join(missing)} is missing"
    expected: dict[str, tuple[str, Callable[[Any], bool]]] = {
        **dict.fromkeys(_OF_A_LOSS_ROW, ("a number", _is_number)),
        **dict.fromkeys(_TABLES, ("numbers by name", _is_table)),
        "step": ("a whole number of 0 or more", _is_count),
        "samples": ("a whole number of 0 or more", _is_count),
        "total_steps": ("a whole number of 0 or more", _is_count),
        "grad_norm": ("a number or null", lambda value: value is None or _is_number(value)),
        "images_per_second": ("a number above 0", lambda value: _is_number(value) and value > 0),
        "warning": ("a name and a text", _is_warning),
        "monitor": ("a text", lambda value: isinstance(value, str)),
    }
    for name, (what, holds) in expected.items():
        if name in row and not holds(row[name]):
            return f"{name} is {records.shown(row[name])}; expected {what}"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < _LARGEST)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(number is None or _is_number(number) for number in value.values())


def _is_warning(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("name", "text"))
