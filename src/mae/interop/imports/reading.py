"""Read the tensors of an untrusted file, safetensors or `torch.save`; nothing in it is ever executed.

PyTorch's files are pickles. Our own reader makes tensors and plain values of them and can make nothing else: see
`mae.interop.imports.checkpoints`.
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
from mae.interop.imports.checkpoints import read_checkpoint
from mae.interop.imports.pickles import ODD_TENSOR, Options, StoredTensor
from mae.models.file import check_header

CONFIG, PREPROCESSING = "config.json", "preprocessor_config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.pth")
"""Of transformers and timm, and of an export for the official code; the one without a pickle first."""
_INDEX = ".index.json"
_CONTAINERS = ("model", "state_dict", "model_state_dict", "module")
_MAX_TIMES = 2
"""Bytes of tensors relative to those of their files: some tensors share values."""
_MAX_TENSORS, _MAX_SHARDS, _MAX_NAMED = 20_000, 1024, 5
_MAX_JSON = 8 << 20
"""Bytes of a file beside the weights; the names of 22,000 classes take two million."""
_LONGEST_NAME = 255  # of a file, as file systems allow
_FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_SAFETENSORS_HEADER = 8  # bytes of its length, before the brace
_EXPECTED = "expected safetensors or a file of torch.save"


@dataclass(frozen=True, kw_only=True)
class ExternalWeights:
    """The contents of an untrusted file or folder.

    Attributes:
        path: of the file or folder.
        tensors: by name, as stored.
        options: the command-line options that the official code saves with its weights; empty if none.
        config: `config.json` beside the weights, as Hugging Face and timm write it; empty if none.
        preprocessing: `preprocessor_config.json` likewise.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)


def read_external(path: Path) -> ExternalWeights:
    """The tensors of a weights file, or of a folder that `save_pretrained` or timm wrote, on the CPU.

    Raises:
        UsageError: no such file, or not a weights file.
        MAEError: damaged, holds Python objects, or more than any model needs.
    """
    if path.is_dir():
        files, folder = _files_of(path), path
    elif path.is_file():
        files, folder = (path,), path.parent
    else:
        problem = "is not a file or folder" if path.exists() else "does not exist"
        raise UsageError(f"{path} {problem}; expected a weights file, or a folder with {' or '.join(WEIGHTS)}")
    tensors: dict[str, Tensor] = {}
    options: Mapping[str, Any] = {}
    for file in files:
        found, options = _read(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise MAEError(f"{path}: tensor {records.shown(twice[0])} is in two of its files; download them again")
        tensors |= found
        _check_number(path, tensors)
    return ExternalWeights(
        path=path,
        tensors=_checked(path, tensors, room=_MAX_TIMES * sum(file.stat().st_size for file in files)),
        options=options,
        config=_json_beside(folder / CONFIG),
        preprocessing=_json_beside(folder / PREPROCESSING),
    )


def _files_of(folder: Path) -> tuple[Path, ...]:
    """The weights file of a folder, or its shards."""
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
    if len(parts) > _MAX_SHARDS or not all(map(_is_plain_name, parts)):
        raise MAEError(f"{index} names files outside its folder, or too many of them; download it again")
    for name in parts:
        if not (index.parent / name).is_file():
            raise MAEError(
                f"{index} names {records.shown(name)}, which is not a file beside it; download the model again"
            )
    return tuple(index.parent / name for name in parts)


def _is_plain_name(name: str) -> bool:
    return Path(name).name == name and "\0" not in name and len(name.encode(errors="replace")) <= _LONGEST_NAME


def _json_beside(path: Path) -> Mapping[str, Any]:
    return records.read_json(path, max_bytes=_MAX_JSON) if path.is_file() else {}


def _read(path: Path) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """The tensors of one file, and the options saved with them."""
    with path.open("rb") as file:
        start = file.read(_SAFETENSORS_HEADER + 1)
    if start[_SAFETENSORS_HEADER:] == b"{":
        return _read_safetensors(path), {}
    if not start.startswith((b"PK", b"\x80")):
        raise UsageError(f"{path} begins with {start[:4]!r} and is not a weights file; {_EXPECTED}")
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
    """The options that are a single value."""
    values = state if isinstance(state, dict) else {}
    return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}


def _check_number(path: Path, tensors: Collection[str]) -> None:
    if len(tensors) > _MAX_TENSORS:
        raise MAEError(f"{path} holds {len(tensors):,} tensors; at most {_MAX_TENSORS:,} are read")


def _without_values(path: Path, name: str) -> str:
    return f"{path}: tensor {records.shown(name)} is sparse, quantised or empty; save it as a plain tensor"


def _tensors_in(path: Path, found: Any) -> dict[str, Any]:
    """The tensors of a file, which may hold them under one of the usual names, beside other things.

    Returns:
        `StoredTensor` or `ODD_TENSOR` by name, at least one.
    """
    for name in (*_CONTAINERS, None):  # beside a container there may be single tensors, such as the best accuracy
        held = found if name is None else found.get(name) if isinstance(found, dict) else None
        if isinstance(held, dict):
            tensors = {key: value for key, value in held.items() if _is_tensor(value)}
            if tensors:
                return tensors
    names = islice(found, _MAX_NAMED) if isinstance(found, dict) else ()
    content = ", ".join(map(records.shown, names)) or ("one tensor" if _is_tensor(found) else type(found).__name__)
    raise UsageError(
        f"{path} holds no recognisable weights ({content}); expected tensors by name, at the top level or under "
        f"{' or '.join(map(repr, _CONTAINERS))}"
    )


def _is_tensor(value: Any) -> bool:
    return value is ODD_TENSOR or isinstance(value, StoredTensor)


def _checked(path: Path, tensors: Mapping[str, Tensor], *, room: int) -> dict[str, Tensor]:
    """The floating-point tensors, checked to be plain, finite and of at most `room` bytes together."""
    floats = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name, tensor in floats.items():
        if tensor.dtype not in _FLOATS:
            raise MAEError(f"{path}: tensor {records.shown(name)} has dtype {tensor.dtype}; expected floating point")
        if tensor.numel() == 0:
            raise MAEError(_without_values(path, name))
    # A view may claim any size over a few bytes.
    if (claimed := sum(tensor.numel() * tensor.element_size() for tensor in floats.values())) > room:
        raise MAEError(f"{path} claims {claimed:,} bytes of tensors, far more than its size; download it again")
    for name, tensor in floats.items():
        if not bool(tensor.float().isfinite().all()):  # as converted
            raise MAEError(f"{path}: tensor {records.shown(name)} holds values that are not finite; get another file")
    return floats
