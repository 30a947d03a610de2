"""Checkpoints that are complete or absent: staged, committed by a rename, verified before use.

A checkpoint `step-00001200/` holds `model.safetensors`, `optimizer.safetensors`, `state.json`, of a module with a
teacher `teacher.safetensors` and, written last, `manifest.json` with size and SHA-256 of the others, and whether it is
kept for good. Never a pickle.
"""

import copy
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from mae.errors import MAEError, UsageError
from mae.records import read_json, to_json
from mae.training.sharding import whole
from mae.training.state import (
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    TEACHER,
    FileFacts,
    Manifest,
    TrainingState,
    read_manifest,
    read_training_state,
)

_NAME = re.compile(r"step-([0-9]{8,})")
_ASIDE = ".writing-"
_NUM_NAMED = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """A copy of what a checkpoint holds, on the CPU: training may go on while it is written.

    Attributes:
        weights: by name.
        averages: the optimizer's, by parameter and kind, `blocks.0.norm1.weight/exp_avg`.
        teacher: the weights of the module's teacher, by name; empty where it has none.
    """

    weights: Mapping[str, Tensor]
    averages: Mapping[str, Tensor]
    teacher: Mapping[str, Tensor]

    @property
    def files(self) -> dict[str, Mapping[str, Tensor]]:
        """The tensors of each file."""
        taught = {TEACHER: self.teacher} if self.teacher else {}
        return {MODEL: self.weights, OPTIMIZER: self.averages, **taught}


def take_snapshot(module: nn.Module, optimizer: Optimizer, *, keep: bool = True) -> Snapshot:
    """Copy weights and running averages to the CPU; sharded tensors are gathered.

    Args:
        module: whose weights, and whose teacher's.
        optimizer: whose running averages, under the parameters' names.
        keep: False for a process that only lends its parts to the others: its snapshot is empty.
    """
    teacher = teacher_of(module)
    return Snapshot(
        weights=whole_weights(module, keep=keep),
        averages=_copied(_optimizer_tensors(module, optimizer), keep=keep),
        teacher={} if teacher is None else whole_weights(teacher, keep=keep),
    )


def teacher_of(module: nn.Module | None) -> nn.Module | None:
    """The module's teacher, see `Trainer`; None where it has none."""
    return getattr(module, "teacher", None)


def whole_weights(module: nn.Module, *, keep: bool = True) -> dict[str, Tensor]:
    """A copy of the weights alone; see `take_snapshot`."""
    return _copied(module.state_dict(), keep=keep)


def with_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A module like another one on the CPU, without its teacher, that holds these very weights, not a copy of them.

    Args:
        module: any of the same parameters; not changed.
        weights: on the CPU, those of its parameters among them.
    """
    parameters = dict(module.named_parameters())
    copied: dict[int, Any] = {
        id(own): nn.Parameter(weights[name], requires_grad=False) for name, own in parameters.items()
    }
    if (teacher := teacher_of(module)) is not None:
        copied[id(teacher)] = None  # a copy of it would take as much memory again
    return copy.deepcopy(module, memo=copied).to("cpu")


def _copied(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    copies = {}
    for name, tensor in tensors.items():
        gathered = whole(tensor.detach())  # every process takes part
        if keep:
            copies[name] = gathered.to("cpu", copy=True).contiguous()
    return copies


def stage(
    folder: Path,
    snapshot: Snapshot,
    *,
    state: TrainingState,
    metadata: dict[str, str],
    kept: bool = False,
) -> None:
    """Stage a checkpoint: write it to disk under another name, which `commit` changes.

    Args:
        folder: where the checkpoints stand.
        snapshot: what to store.
        state: how far the training is, to store beside it.
        metadata: text written into the header of the weights' file.
        kept: the manifest says that `prune` must leave it.

    Raises:
        MAEError: it could not be written, or a value in it is not finite; nothing half-written is left, earlier
            checkpoints are untouched.
    """
    final, aside = _places(folder, state.step)
    _refuse_broken(final, {**snapshot.weights, **snapshot.averages, **snapshot.teacher})
    with _explained(folder, final, aside):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, tensors in snapshot.files.items():
            _save(tensors, aside / name, metadata if name == MODEL else None)
        (aside / STATE).write_text(json.dumps(to_json(state), indent=2))
        files = {name: _describe(aside / name) for name in (*snapshot.files, STATE)}
        manifest = to_json(Manifest(step=state.step, kept=kept, files=files))
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for name in (*files, MANIFEST):
            _flush(aside / name)


def _save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    save_file(dict(tensors), path, metadata=metadata)
    with safe_open(path, framework="pt"):  # refuses a file that is shorter than its header says: a short write
        pass


def commit(folder: Path, step: int) -> Path:
    """Commit the staged checkpoint; returns its folder.

    Raises:
        MAEError: it cannot be renamed; earlier checkpoints are untouched.
    """
    final, aside = _places(folder, step)
    with _explained(folder, final, aside):
        shutil.rmtree(final, ignore_errors=True)  # an older one of this step that did not verify
        aside.rename(final)
        _flush(folder)
    return final


def _places(folder: Path, step: int) -> tuple[Path, Path]:
    """The folder of a step's checkpoint, and the one it is staged in."""
    final = folder / f"step-{step:08d}"
    return final, folder / f"{_ASIDE}{final.name}"


@contextmanager
def _explained(folder: Path, final: Path, aside: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise MAEError(f"could not write {final}: {error}; free space there and resume ({_left(folder)})") from error


def _refuse_broken(path: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise MAEError(
                f"{path} was not written: {name} holds values that are not finite (nan or inf); lower the learning "
                f"rate, or compute in --precision fp32 ({_left(path.parent)})"
            )


def _left(folder: Path) -> str:
    earlier = find_checkpoint(folder)
    return f"the last good checkpoint, {earlier}, is untouched" if earlier else "there is no earlier checkpoint"


def remove_leftovers(folder: Path) -> None:
    """Delete what a killed writer left; call it before a run writes, never while one does."""
    for leftover in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def check_room(folder: Path, *, count: int, num_bytes: int, instead: str = "") -> None:
    """Refuse to train where the next checkpoints would not fit.

    Args:
        folder: of the checkpoints; it need not be there yet.
        count: how many there must be room for.
        num_bytes: of one.
        instead: what may be done instead of freeing space, as the message ends.

    Raises:
        MAEError: there is too little.
    """
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free + leftover_bytes(folder)
    if free < count * num_bytes:
        what = "its next checkpoint needs" if count == 1 else f"{count} checkpoints of this model need"
        raise MAEError(
            f"{folder.parent} is on a disk with {free / 1e6:,.1f} MB free; {what} {count * num_bytes / 1e6:,.1f} MB; "
            f"free space there{instead}"
        )


def state_bytes(module: nn.Module) -> int:
    """Of its parameters and buffers, as far as they are saved."""
    return sum(each.nbytes for each in module.state_dict().values())


def leftover_bytes(folder: Path) -> int:
    """Bytes that `remove_leftovers` would free."""
    return sum(_num_bytes(leftover) for leftover in folder.glob(f"{_ASIDE}*"))


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def find_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that verifies, or None."""
    return next((path for path in reversed(_committed(folder)) if not check(path)), None)


def usable_checkpoint(folder: Path) -> tuple[Path | None, str]:
    """The newest checkpoint that verifies, with a note on damaged newer ones.

    Returns:
        It, None where nothing was committed yet; and what to tell of damaged newer ones, empty where there is none.

    Raises:
        MAEError: there are checkpoints, and every one is damaged.
    """
    damaged: list[str] = []
    for path in reversed(_committed(folder)):
        if not (wrong := check(path)):
            return path, f"{_some(damaged)}; the older {path} is used instead" if damaged else ""
        damaged.append(wrong)
    if damaged:
        raise MAEError(
            f"every checkpoint in {folder} is damaged: {_some(damaged)}; restore the files from a copy, or start a "
            "new run in another folder"
        )
    return None, ""


def good_checkpoints(folder: Path) -> dict[int, Path]:
    """Every checkpoint whose weights verify, by step in ascending order; the others are logged."""
    good: dict[int, Path] = {}
    for path in _committed(folder):
        if wrong := check_weights(path):
            tell(f"{wrong}; it is skipped")
        else:
            good[_step(path)] = path
    return good


def tell(text: str) -> None:
    """Warn of a checkpoint through Python's logging: a line on stderr, unless a program wants it elsewhere."""
    _log.warning("%s", text if text.isprintable() else repr(text))  # names of folders may hold anything


def prune(folder: Path, *, keep: int, step: int) -> None:
    """Delete old checkpoints once a newer one is there.

    Args:
        folder: where they stand.
        keep: how many of the newest are left, besides those written to be kept; fewer where the disk has no room for
            the next one.
        step: that of the checkpoint just written. Later ones are damaged, or it would have gone on from them: they
            are left, but must not push out a good one.
    """
    paths = [path for path in _committed(folder) if _step(path) <= step]
    old = [path for path in paths[:-keep] if not _is_kept(path)]
    for path in old:
        shutil.rmtree(path, ignore_errors=True)
    spare = [path for path in paths[-keep:-1] if not _is_kept(path)]
    if spare and shutil.disk_usage(folder).free < _num_bytes(paths[-1]):
        tell(f"{folder} has no room for another checkpoint: {', '.join(path.name for path in spare)} is deleted for it")
        for path in spare:
            shutil.rmtree(path, ignore_errors=True)


def check(path: Path) -> str:
    """What is wrong with a checkpoint; empty where its files match its manifest."""
    try:
        if missing := [name for name in (MANIFEST, MODEL, OPTIMIZER, STATE) if not (path / name).exists()]:
            return f"{path} lacks {', '.join(missing)}"
        files = read_manifest(path, folder_step=folder_step(path)).files
        return next((wrong for name in files if (wrong := _difference(path / name, files[name]))), "")
    except UsageError as error:  # names the manifest
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error}"


def check_weights(path: Path) -> str:
    """What is wrong with the weights' file of a checkpoint, whatever the state of the others; empty: nothing."""
    try:
        manifest = read_manifest(path, folder_step=folder_step(path))
        return _difference(path / MODEL, manifest.files[MODEL])
    except UsageError as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read: {error}"


def _difference(file: Path, written: FileFacts) -> str:
    """How a file differs from the one that was written; empty: not at all."""
    status = file.stat()
    # First what costs nothing: what is larger than it should be, or a pipe, is not read to its end.
    if not S_ISREG(status.st_mode) or status.st_size != written.bytes or _describe(file) != written:
        return f"{file} is not the file that was written (size or checksum differs)"
    return ""


def read_state(path: Path) -> TrainingState:
    """The state stored in a checkpoint.

    Raises:
        MAEError: it is none, or of another step.
    """
    return read_training_state(path, folder_step=folder_step(path))


def folder_step(path: Path) -> int | None:
    """The number of steps in the name of a checkpoint's folder; None where it has another name."""
    found = _NAME.fullmatch(path.name)
    return None if found is None else int(found[1])


def _optimizer_tensors(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return {
        f"{names[parameter]}/{key}": torch.as_tensor(value)
        for parameter, values in optimizer.state.items()
        for key, value in values.items()
    }


def _committed(folder: Path) -> list[Path]:
    """Committed checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()), key=_step)


def _step(path: Path) -> int:
    step = folder_step(path)
    assert step is not None
    return step


def _some(damaged: Sequence[str]) -> str:
    more = len(damaged) - _NUM_NAMED
    return "; ".join(damaged[:_NUM_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _is_kept(path: Path) -> bool:
    """Whether the manifest says so; this holds whatever options the run resumes with."""
    try:
        return read_json(path / MANIFEST)["kept"] is True
    except (OSError, ValueError, KeyError):
        return False


def _describe(path: Path) -> FileFacts:
    with path.open("rb") as file:
        return FileFacts(bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def _flush(path: Path) -> None:
    """Wait until a file or a folder is on the disk, so that a commit survives a power cut."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders; its renames are journalled
        return
    # Windows flushes only what is open for writing, Unix opens a folder only for reading.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
