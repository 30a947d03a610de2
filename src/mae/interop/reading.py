"""Tensors of a file from outside: safetensors, or what `torch.save` wrote; nothing in it is ever executed.

PyTorch's files are pickles. They are read by a reader of our own, which makes tensors and plain values and can make
nothing else: see `mae.interop.checkpoints`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mae import records
from mae.errors import MAEError, UsageError
from mae.interop.checkpoints import read_checkpoint
from mae.interop.pickles import ODD_TENSOR, Options, StoredTensor
from mae.models.storage import check_header

CONFIG, PREPROCESSING = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # where both are, the one without a pickle
_INDEX = ".index.json"
_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_MOST_TIMES = 2
"""The bytes of tensors over those of their files: some share their values."""
_MOST_TENSORS, _MOST_SHARDS, _MOST_NAMED = 20_000, 1024, 5
_MOST_JSON = 8 << 20
"""Bytes of a file beside the weights; the names of 22,000 classes take two million."""
_LONGEST_NAME = 255  # of a file, as file systems have it
_FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_SAFETENSORS_HEADER = 8  # bytes of its length, before the brace
_EXPECTED = "expected safetensors or a file of torch.save"


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """What lies in a file or folder from outside.

    Attributes:
        path: of the file or folder.
        tensors: by name, as stored.
        options: the options that the official code keeps beside its weights; empty where there are none.
        config: `config.json` beside the weights, as Hugging Face and timm write it; empty where there is none.
        preprocessing: `preprocessor_config.json` likewise.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)


def read_foreign(path: Path) -> Foreign:
    """The tensors of a weights' file, or of a folder that `save_pretrained` or timm wrote, on the CPU.

    Raises:
        UsageError: nothing there, or nothing of that kind.
        MAEError: damaged, holds more than weights, or far more than any model has.
    """
    if path.is_dir():
        files, folder = _files_of(path), path
    elif path.is_file():
        files, folder = (path,), path.parent
    else:
        what = "no file or folder" if path.exists() else "not there"
        raise UsageError(f"{path} is {what}; expected a file of weights, or a folder with {' or '.join(WEIGHTS)}")
    tensors: dict[str, Tensor] = {}
    options: Mapping[str, Any] = {}
    for file in files:
        found, options = _read(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise MAEError(f"{path}: tensor {records.shown(twice[0])} is in two of its files; get them anew")
        tensors |= found
        _check_number(path, tensors)
    return Foreign(
        path=path,
        tensors=_checked(path, tensors, room=_MOST_TIMES * sum(file.stat().st_size for file in files)),
        options=options,
        config=_json_beside(folder / CONFIG),
        preprocessing=_json_beside(folder / PREPROCESSING),
    )


def _files_of(folder: Path) -> tuple[Path, ...]:
    """The weights' file of a folder, or the files it is divided into."""
    for name in WEIGHTS:
        if (folder / name).is_file():
            return (folder / name,)
        if (index := folder / f"{name}{_INDEX}").is_file():
            return _parts(index)
    raise UsageError(f"{folder} holds no weights; expected {' or '.join(WEIGHTS)} in it, or the path of a file")


def _parts(index: Path) -> tuple[Path, ...]:
    names = _json_beside(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise MAEError(f"{index} names no files; expected a weight_map of tensors and files")
    parts = sorted(set(names.values()))
    if len(parts) > _MOST_SHARDS or not all(map(_is_plain_name, parts)):
        raise MAEError(f"{index} names files outside its folder, or too many of them; get it anew")
    for name in parts:
        if not (index.parent / name).is_file():
            raise MAEError(f"{index} names {records.shown(name)}, which is no file beside it; get the model anew")
    return tuple(index.parent / name for name in parts)


def _is_plain_name(name: str) -> bool:
    return Path(name).name == name and "\0" not in name and len(name.encode(errors="replace")) <= _LONGEST_NAME


def _json_beside(path: Path) -> Mapping[str, Any]:
    return records.read_json(path, max_bytes=_MOST_JSON) if path.is_file() else {}


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The tensors of one file, and the options beside them."""
    with path.open("rb") as file:
        start = file.read(_SAFETENSORS_HEADER + 1)
    if start[_SAFETENSORS_HEADER:] == b"{":
        return _read_safetensors(path), {}
    if not start.startswith((b"PK", b"\x80")):
        raise UsageError(f"{path} begins with {start[:4]!r} and is no file of weights; {_EXPECTED}")
    return _read_pickled(path)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            _check_number(path, file.keys())
            return {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise MAEError(f"{path} cannot be read as a safetensors file: {error}") from error


def _read_pickled(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    checkpoint = read_checkpoint(path)
    found = checkpoint.content
    stored = _tensors_in(path, found)
    _check_number(path, stored)
    if odd := [name for name, tensor in stored.items() if not isinstance(tensor, StoredTensor)]:
        raise MAEError(_without_values(path, odd[0]))
    floats = {name: tensor for name, tensor in stored.items() if tensor.dtype.is_floating_point}
    options = found.get("args")
    return checkpoint.tensors(floats), _plain(options.state) if isinstance(options, Options) else {}


def _plain(state: Any) -> dict[str, Any]:
    """Of a command line's options those that are one value."""
    values = state if isinstance(state, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def _check_number(path: Path, tensors: Collection[str]) -> None:
    if len(tensors) > _MOST_TENSORS:
        raise MAEError(f"{path} holds {len(tensors):,} tensors; at most {_MOST_TENSORS:,} are read")


def _without_values(path: Path, name: str) -> str:
    return f"{path}: tensor {records.shown(name)} holds no plain values; get the file anew"


def _tensors_in(path: Path, found: Any) -> dict[str, Any]:
    """The tensors of a file, which may hold them beside other things, under one of the usual names.

    Returns:
        `StoredTensor` or `ODD_TENSOR` by name, one at least.
    """
    for name in (*_CONTAINERS, None):  # beside a container a tensor may stand alone, such as the best accuracy
        held = found if name is None else found.get(name) if isinstance(found, dict) else None
        if isinstance(held, dict):
            tensors = {key: value for key, value in held.items() if _is_tensor(value)}
            if tensors:
                return tensors
    names = islice(found, _MOST_NAMED) if isinstance(found, dict) else ()
    there = ", ".join(map(records.shown, names)) or ("one tensor" if _is_tensor(found) else type(found).__name__)
    raise UsageError(
        f"{path} holds no weights that can be told ({there}); expected tensors by name, alone or under "
        f"{' or '.join(map(repr, _CONTAINERS))}"
    )


def _is_tensor(value: Any) -> bool:
    return value is ODD_TENSOR or isinstance(value, StoredTensor)


def _checked(path: Path, tensors: Mapping[str, Tensor], *, room: int) -> dict[str, Tensor]:
    """The floating-point tensors, whose values must be there, in no more bytes than `room`, and finite."""
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name, tensor in floats.items():
        if tensor.dtype not in _FLOATS:
            raise MAEError(f"{path}: tensor {records.shown(name)} is of {tensor.dtype}; expected plain floating point")
        if tensor.numel() == 0:
            raise MAEError(_without_values(path, name))
    # A view may claim any size over a few bytes.
    if (claimed := sum(tensor.numel() * tensor.element_size() for tensor in floats.values())) > room:
        raise MAEError(f"{path} claims {claimed:,} bytes of tensors, far more than it has; get the file anew")
    for name, tensor in floats.items():
        if not bool(tensor.float().isfinite().all()):  # as they will be
            raise MAEError(f"{path}: tensor {records.shown(name)} holds values that are not finite; get the file anew")
    return floats
