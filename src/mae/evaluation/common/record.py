"""The record of an evaluation: enough to know what was measured, on what, by what, and to repeat it."""

import csv
import hashlib
import io
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mae import fragments, records
from mae.contention import num_cores
from mae.records import write_json, write_whole
from mae.version import __version__

_SHOWN, _FEW = 40, 12  # numbers in a notebook: at the most, and unfolded


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One protocol's result on one model and one set, as `evaluation/<protocol>.json` holds it.

    Attributes:
        protocol: its name.
        model: what the user called the model.
        weights: `digest_of` its weights and configuration; None for a function whose weights are unknown.
        data: what the user called the images, with what they hold.
        options: the protocol's options.
        seed: decided what it drew.
        result: the numbers; shares in [0, 1].
        chance: the share that a guess among the classes gets right; None without labels.
        majority: the share that the commonest training class has in the test part; None without labels.
        verdict: the model beside its baselines on test images without near copies in training: the `answer` (`better`,
            `unclear`, `worse`), its `text`, `accuracy`, `low` and `high` ends of 95 % intervals, `differences`; None
            without labels.
        near_copies: test images that nearly show a training image: how many `test_images` `of` how many, names of a few
            pairs as `examples`, `top1` of all and `top1_without` them; None without labels.
        pictures: drawn beside the file, by what they show.
        classifier: file beside this one of what was trained to tell the classes apart; None: there is none.
        seconds: how long it took, features that had to be computed included.
        hardware: what it ran on.
        versions: of the packages that decide the numbers.
        finished_at: local time.
    """

    protocol: str
    model: str
    weights: str | None
    data: Mapping[str, Any]
    options: Mapping[str, Any]
    seed: int
    result: Mapping[str, Any]
    chance: float | None
    majority: float | None
    verdict: Mapping[str, Any] | None
    near_copies: Mapping[str, Any] | None
    pictures: Mapping[str, str]
    classifier: str | None
    seconds: float
    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    finished_at: str

    def _repr_html_(self) -> str:
        numbers = [(" / ".join(names), f"{value:.4g}") for names, value in _numbers(self.result)]
        left = len(numbers) - _SHOWN
        more = [("more", f"{left} numbers, in `result`")] if left > 0 else []
        shares = {"chance": self.chance, "commonest class": self.majority}
        told = [
            ("model", self.model),
            ("data", ", ".join(f"{name} {value}" for name, value in self.data.items() if value is not None)),
            *([] if self.verdict is None else [("verdict", self.verdict["text"])]),
            *((name, f"{share:.4g}") for name, share in shares.items() if share is not None),
            ("time", f"{self.seconds:.1f} s"),
        ]
        unfolded = " open" if len(numbers) <= _FEW else ""
        listed = fragments.table("", [*numbers[:_SHOWN], *more])
        details = f"<details{unfolded}><summary>{len(numbers)} numbers</summary>{listed}</details>"
        return fragments.table(self.protocol, told) + details


def write_record(path: Path, record: Evaluation) -> None:
    """Write the record; an existing one of another model, set, options or seed is first moved to `earlier/`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = records.to_json(record)
    before = records.read_json(path) if path.exists() else written
    if any(before.get(name) != written[name] for name in ("weights", "data", "options", "seed")):
        earlier = path.parent / "earlier"
        earlier.mkdir(exist_ok=True)
        path.replace(earlier / f"{path.stem}-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.json")
    write_json(path, written)


def write_csv(path: Path, record: Evaluation) -> None:
    """Write the numbers of a result as a table: a row a number, with the names that lead to it and its value."""
    lines = io.StringIO()
    rows = csv.writer(lines, lineterminator="\n")
    rows.writerow(["protocol", "result", "value"])
    rows.writerows([record.protocol, " / ".join(names), value] for names, value in _numbers(record.result))
    write_whole(path, lines.getvalue())


def _numbers(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """Every number in nested mappings, with the names that lead to it; curves, which are lists, are left out."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, (*above, name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*above, name), value


def digest_of(identity: str | None) -> str | None:
    """An extractor's identity as records hold it: 16 hexadecimal digits."""
    return None if identity is None else hashlib.sha256(identity.encode()).hexdigest()[:16]


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, cores that may be used, threads, device, and the name of a GPU."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def versions() -> dict[str, str]:
    """Of Python, this package and those it computes with; of timm and transformers where they are installed."""
    installed = {"python": platform.python_version(), "mae": __version__}
    for name in ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "timm", "transformers"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return installed


def _processor() -> str:
    """Its name; Linux tells it in a file alone."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
