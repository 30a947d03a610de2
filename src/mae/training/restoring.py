"""Restore a module and its optimizer from a checkpoint, after checking everything in it.

The files may be of another run, or edited along with their manifest: every tensor must have the name, shape and dtype
that this module and this optimizer would have written, and values that a training can have.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from mae.errors import MAEError
from mae.training.checkpoint import check, folder_step, teacher_of
from mae.training.distributed import World
from mae.training.lars import LARS
from mae.training.sharding import sharded_like
from mae.training.state import MODEL, OPTIMIZER, TEACHER, read_manifest, refused

_NUM_NAMED = 3
_STEP, _SQUARES = "step", "exp_avg_sq"
_IN_FILES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
_DTYPES = {str(dtype): dtype for dtype in _IN_FILES}

_Spec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def restore(path: Path | None, *, module: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Restore a checkpoint's weights, running averages and teacher, in every process.

    Args:
        path: the checkpoint; the main process alone reads it, the others may give None.
        module: gets the weights, and its teacher its own; whole or sharded over the processes.
        optimizer: AdamW, Muon or LARS; gets the running averages.
        world: the processes.

    Raises:
        MAEError: the checkpoint is damaged, or of another model or training; nothing was changed.
    """
    stored: dict[str, dict[str, Tensor]] = {}
    teacher = teacher_of(module)
    modules = {MODEL: module} | ({} if teacher is None or not teacher.state_dict() else {TEACHER: teacher})

    def read() -> dict[str, Any]:
        assert path is not None
        if wrong := check(path):
            raise MAEError(f"{wrong}; delete that folder to resume from an earlier checkpoint")
        steps = read_manifest(path, folder_step=folder_step(path)).step
        stored.update({file: _tensors_of(path, file, _weights_of(own)) for file, own in modules.items()})
        stored[OPTIMIZER] = _tensors_of(path, OPTIMIZER, _averages_of(module, optimizer))
        if wrong := _wrong_average(stored[OPTIMIZER], steps):
            raise refused(path, f"{path / OPTIMIZER}: {wrong}")
        # What the others must allocate.
        return {
            file: {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in tensors.items()}
            for file, tensors in stored.items()
        }

    table = world.from_main(read)
    for file, own in modules.items():
        _load_weights(own, table[file], stored.get(file, {}), world)
    _load_optimizer(module, optimizer, table[OPTIMIZER], stored.get(OPTIMIZER, {}), world)


def _weights_of(module: nn.Module) -> dict[str, _Spec]:
    """The weights that a checkpoint of this module holds."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in module.state_dict().items()}


def _averages_of(module: nn.Module, optimizer: Optimizer) -> dict[str, _Spec]:
    """The running averages that a checkpoint of this optimizer holds: all of every parameter that it updates."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    forms: dict[str, _Spec] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for kind in _kinds(optimizer, group):
                form = (torch.float32, ()) if kind == _STEP else (parameter.dtype, tuple(parameter.shape))
                forms[f"{names[parameter]}/{kind}"] = form
    return forms


def _kinds(optimizer: Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    if isinstance(optimizer, LARS):
        return ("mu",)
    if group.get("orthogonal"):  # Muon's
        return ("momentum",)
    assert isinstance(optimizer, AdamW), "only AdamW, Muon and LARS can be restored"
    return (_STEP, "exp_avg", _SQUARES)


def _tensors_of(path: Path, name: str, expected: Mapping[str, _Spec]) -> dict[str, Tensor]:
    """The tensors in a file of a checkpoint: exactly the expected ones, with finite values.

    Raises:
        MAEError: others; where names, dtypes or shapes differ no value was read.
    """
    file = path / name
    try:
        with safe_open(file, framework="pt") as opened:
            if wrong := _wrong_names(set(opened.keys()), expected) or _wrong_form(opened, expected):
                raise refused(path, f"{file} does not fit this model: {wrong}")
            tensors = {key: opened.get_tensor(key) for key in expected}
    except (OSError, SafetensorError) as error:
        raise refused(path, f"{file} cannot be read as a safetensors file: {error}") from error
    for key, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise refused(path, f"{file}: {key} holds values that are not finite (nan or inf)")
    return tensors


def _wrong_names(found: set[str], expected: Mapping[str, _Spec]) -> str:
    if missing := [name for name in expected if name not in found]:
        return f"it lacks {_some(missing)}"
    if unknown := sorted(found - expected.keys()):
        return f"it holds {_some(unknown)}, which this training does not have"
    return ""


def _wrong_form(opened: Any, expected: Mapping[str, _Spec]) -> str:
    for name, (dtype, shape) in expected.items():
        part = opened.get_slice(name)
        found = part.get_dtype(), tuple(part.get_shape())
        if found != (_IN_FILES[dtype], shape):
            return f"{name} is {found[0]} of shape {found[1]}; expected {_IN_FILES[dtype]} of {shape}"
    return ""


def _wrong_average(averages: Mapping[str, Tensor], steps: int) -> str:
    """What is wrong with running averages after so many steps, of which some may have been skipped; empty: nothing."""
    counted: dict[str, float] = {}
    for name, tensor in averages.items():
        kind = name.rpartition("/")[2]
        if kind == _SQUARES and bool((tensor < 0).any()):
            return f"{name} holds values below 0; expected means of squares"
        if kind == _STEP:
            counted[name] = float(tensor)
    for name, count in counted.items():
        if not (0 <= count <= steps and count.is_integer()):
            return f"{name} is {count:g}; expected a whole number from 0 to {steps}, the steps of this checkpoint"
    if len(set(counted.values())) > 1:
        least, most = min(counted, key=counted.__getitem__), max(counted, key=counted.__getitem__)
        return f"{least} is {counted[least]:g} and {most} is {counted[most]:g}; expected the same of all parameters"
    return ""


def _some(names: Sequence[str]) -> str:
    shown = [name if name.isprintable() else repr(name) for name in names[:_NUM_NAMED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _received(stored: Tensor | None, form: Sequence[Any], device: torch.device, world: World) -> Tensor:
    """The main process's tensor, on a device of this one."""
    shape, dtype = form
    if stored is None:
        here = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
    else:  # a copy: the tensor maps the file, which must not change and would stay on the disk after its deletion
        here = stored.to(device, copy=True)
    world.broadcast(here)
    return here


def _load_weights(
    module: nn.Module, table: Mapping[str, Sequence[Any]], stored: Mapping[str, Tensor], world: World
) -> None:
    weights = module.state_dict()
    with torch.no_grad():
        for name, form in table.items():
            received = _received(stored.get(name), form, weights[name].device, world)
            weights[name].copy_(sharded_like(weights[name], received))


def _load_optimizer(
    module: nn.Module,
    optimizer: Optimizer,
    table: Mapping[str, Sequence[Any]],
    stored: Mapping[str, Tensor],
    world: World,
) -> None:
    parameters = dict(module.named_parameters())
    for full_name, form in table.items():
        name, key = full_name.rsplit("/", 1)
        parameter = parameters[name]
        # AdamW expects its step counter where it created it, the averages on the weights' device.
        device = optimizer.param_groups[0]["params"][0].device if key == _STEP else parameter.device
        received = _received(stored.get(full_name), form, device, world)
        value, state = received if key == _STEP else sharded_like(parameter, received), optimizer.state[parameter]
        if key in state:  # in its place, where a recorded step looks for it
            state[key].copy_(value)
        else:
            state[key] = value
