"""Read a pickle of `torch.save` without building any Python object of its choosing.

A pickle is a program for a small stack machine. This is that machine without imports and calls: it knows the few
instructions that `torch.save` writes, and only the names of a fixed table, none of which does more than record what a
tensor is. Only text is hashed, nothing is traversed twice, and every instruction takes bounded time, so a pickle takes
time and memory in proportion to its length.
"""

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NoReturn

import torch

from mae import records
from mae.errors import MAEError

MAX_BYTES = 64 << 20
"""Bytes of a pickle."""
_MAX_INSTRUCTIONS = 1_000_000
"""A tensor takes about thirty."""
_MAX_AXES, _MAX_BITS, _MAX_ARGUMENTS, _MAX_SHOWN = 64, 128, 32, 200
_MAX_LETTERS = 4096
"""Of a key: equal keys are compared letter by letter each time they meet."""

UNREAD = object()
"""Stands for a value that weights do not need: a set, a device, an object of a class known to be harmless."""
ODD_TENSOR = object()
"""Stands for a tensor without plain storage: sparse, quantised, on the meta device."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A contiguous array of the file.

    Attributes:
        key: its name in the file.
        dtype: of its values.
        numel: number of values.
    """

    key: str
    dtype: torch.dtype
    numel: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a view of a storage, not yet checked against the file.

    Attributes:
        storage: its data.
        dtype: of the tensor, which may differ from the storage's.
        offset: of its first value in the storage, in values.
        shape: of the tensor, at least 0 each.
        strides: steps between neighbours along each axis, in values, at least 0 each.
    """

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(slots=True)
class Options:
    """An `argparse.Namespace`, in which the official code saves its command line.

    Attributes:
        state: its attributes; any value in a hostile file.
    """

    state: Any = None


def read_pickle(stream: BytesIO) -> tuple[Any, dict[str, torch.dtype]]:
    """The value that a pickle describes, and its storages; the stream is left at its end.

    Args:
        stream: at the beginning of a pickle.

    Returns:
        Text, numbers, None, lists, tuples and dictionaries as they are, of the latter only entries whose key is text;
        `StoredTensor`, `Storage`, `Options`, and `UNREAD` or `ODD_TENSOR` for what is skipped. Containers may hold
        themselves. Then the dtype of each storage, by key.

    Raises:
        MAEError: damaged, not as `torch.save` writes it, too long, or a name that is not in the table; the message
            does not name the file.
    """
    machine = _Machine()
    try:
        for count, (instruction, argument, _) in enumerate(pickletools.genops(stream)):
            if count >= _MAX_INSTRUCTIONS:
                raise MAEError(f"its pickle has over {_MAX_INSTRUCTIONS:,} steps, more than any checkpoint needs")
            if instruction.name == "STOP":
                return machine.stack.pop(), machine.storages
            _STEPS.get(instruction.name, _refuse)(machine, argument)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        reason = str(error)[:_MAX_SHOWN] if isinstance(error, ValueError) else "its steps do not fit each other"
        raise MAEError(f"its pickle is damaged, or not of torch.save: {reason}") from error
    raise AssertionError("pickletools ends with STOP or an error")


@dataclass(slots=True)
class _Machine:
    """The stack, the stacks below open marks, the memo, and the storages so far."""

    stack: list[Any] = field(default_factory=list)
    below: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, torch.dtype] = field(default_factory=dict)

    def mark(self, _: Any) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        found, self.stack = self.stack, self.below.pop()
        return found

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_number(self, value: int) -> None:
        self.stack.append(value if value.bit_length() <= _MAX_BITS else UNREAD)

    def push_tuple(self, length: int) -> None:
        start = len(self.stack) - length
        if start < 0:
            raise ValueError("a tuple of more values than the stack holds")
        self.stack[start:] = [tuple(self.stack[start:])]

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a key without a value")
        if (target := self.stack[-1]) is UNREAD:
            return
        if not isinstance(target, dict):
            raise ValueError("items of something that is not a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is str:  # others name no tensor, and hashing them may take for ever
                target[_key(key)] = value

    def extend(self, values: list[Any]) -> None:
        if (target := self.stack[-1]) is UNREAD:
            return
        if not isinstance(target, list):
            raise ValueError("values of something that is not a list")
        target.extend(values)

    def name(self, text: str) -> None:
        module, _, name = text.partition(" ")
        self._look_up(module, name)

    def name_of_stack(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is not text")
        self._look_up(module, name)

    def _look_up(self, module: str, name: str) -> None:
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full not in _NAMES:
            shown = full if full.isprintable() and len(full) <= 100 else records.shown(full)
            raise MAEError(
                f"it holds Python objects besides its tensors ({shown}), which could run code and are not read; if "
                "you trust it, save its tensors alone: torch.save(checkpoint['state_dict'], ...)"
            )
        self.stack.append(_NAMES[full])

    def call(self, _: Any) -> None:
        arguments, called = self.stack.pop(), self.stack.pop()
        if not isinstance(called, _Named) or type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
            raise ValueError("a call of something that cannot be called")
        self.stack.append(called.make(*arguments))

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(target := self.stack[-1], Options):
            target.state = state  # others, such as a state_dict's _metadata, are not needed

    def look_up_storage(self, _: Any) -> None:
        parts = self.stack.pop()
        if type(parts) is not tuple or len(parts) not in (5, 6):
            raise ValueError("a storage that torch.save does not write")
        kind, dtype, key, _, numel, *view = parts
        if kind != "storage" or type(key) is not str or not isinstance(dtype, torch.dtype) or view not in ([], [None]):
            raise ValueError("a storage that torch.save does not write")
        self.storages.setdefault(_key(key), dtype)
        (count,) = _counts((numel,))
        self.stack.append(Storage(key, dtype, count))


def _refuse(_: _Machine, __: Any) -> NoReturn:
    raise ValueError("an instruction that torch.save does not write")


def _ignore(_: _Machine, __: Any) -> None:
    pass


Step = Callable[[_Machine, Any], Any]
_STEPS: dict[str, Step] = {
    "PROTO": _ignore,
    "FRAME": _ignore,
    "MARK": _Machine.mark,
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_of_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.look_up_storage,
    "NONE": lambda machine, _: machine.push(None),
    "NEWTRUE": lambda machine, _: machine.push(True),
    "NEWFALSE": lambda machine, _: machine.push(False),
    "EMPTY_DICT": lambda machine, _: machine.push({}),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_SET": lambda machine, _: machine.push(UNREAD),
    "EMPTY_TUPLE": lambda machine, _: machine.push(()),
    "TUPLE": lambda machine, _: machine.push(tuple(machine.since_mark())),
    "APPEND": lambda machine, _: machine.extend([machine.stack.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.since_mark()),
    "ADDITEMS": lambda machine, _: machine.since_mark(),
    "FROZENSET": lambda machine, _: machine.push((machine.since_mark(), UNREAD)[1]),
    "SETITEM": lambda machine, _: machine.set_items([machine.stack.pop(), machine.stack.pop()][::-1]),
    "SETITEMS": lambda machine, _: machine.set_items(machine.since_mark()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine.push_number),
    **dict.fromkeys(("BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"), _Machine.push),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"), _Machine.push),
}
"""The instructions of binary pickles of plain values, by their names in `pickletools`."""


@dataclass(frozen=True, slots=True)
class _Named:
    """The stand-in for a class or function that a pickle may name."""

    make: Callable[..., Any]


def _key(text: str) -> str:
    if len(text) > _MAX_LETTERS:
        raise ValueError(f"a name of {len(text):,} characters; expected at most {_MAX_LETTERS:,}")
    return text


def _counts(values: Any) -> tuple[int, ...]:
    """Non-negative integers that are sizes or strides."""
    if type(values) is not tuple or len(values) > _MAX_AXES:
        raise ValueError("sizes that are not a tuple")
    if not all(type(value) is int and 0 <= value < 1 << 62 for value in values):
        raise ValueError("a size that is not a non-negative integer")
    return values


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any, dtype: Any = None) -> StoredTensor:
    """`_rebuild_tensor` and `_rebuild_tensor_v2`, whose last argument marks conjugated and negated views."""
    if not isinstance(storage, Storage) or not isinstance(dtype or storage.dtype, torch.dtype) or any(rest[2:]):
        raise ValueError("a tensor without a storage")
    if len(_counts(shape)) != len(_counts(strides)):
        raise ValueError("a tensor whose shape and strides differ in length")
    (first,) = _counts((offset,))
    return StoredTensor(storage, dtype or storage.dtype, first, shape, strides)


def _tensor_of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> StoredTensor:
    """`_rebuild_tensor_v3`, for dtypes without a storage class."""
    return _tensor(storage, offset, shape, strides, grad, hooks, *rest, dtype=dtype)


def _tensor_with_attributes(rebuild: Any, _: Any, arguments: Any, __: Any) -> Any:
    if rebuild not in (_NAMES["torch._utils._rebuild_tensor_v2"], _NAMES["torch._utils._rebuild_tensor_v3"]):
        return ODD_TENSOR
    return rebuild.make(*arguments)


def _dtypes() -> dict[str, torch.dtype]:
    """PyTorch's dtypes and storage classes by name."""
    types = {f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    classes = {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
        "QInt8": torch.qint8, "QUInt8": torch.quint8, "QInt32": torch.qint32, "Untyped": torch.uint8,
    }  # fmt: skip
    storages = {f"torch.{where}{name}Storage": classes[name] for name in classes for where in ("", "cuda.", "storage.")}
    return types | storages


_SKIPPED = (
    "builtins.bytearray", "builtins.complex", "builtins.set", "_codecs.encode", "collections.Counter", "torch.Size",
    "torch.Tensor", "torch.device", "torch.nn.parameter.Parameter", "torch.serialization._get_layout",
    "torch.per_tensor_affine", "torch.per_tensor_symmetric", "torch.per_channel_affine",
    "torch.per_channel_symmetric", "torch.per_channel_affine_float_qparams",
)  # fmt: skip
_ODD = (
    "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_meta_tensor_no_storage", "_rebuild_nested_tensor",
    "_rebuild_wrapper_subclass", "_rebuild_device_tensor_from_numpy", "_rebuild_device_tensor_from_cpu_tensor",
)  # fmt: skip
_NAMES: dict[str, _Named | torch.dtype] = {
    **_dtypes(),
    **dict.fromkeys(_SKIPPED, _Named(lambda *_: UNREAD)),
    **dict.fromkeys((f"torch._utils.{name}" for name in _ODD), _Named(lambda *_: ODD_TENSOR)),
    "argparse.Namespace": _Named(Options),
    "collections.OrderedDict": _Named(lambda: {}),
    "torch._utils._rebuild_tensor": _Named(_tensor),
    "torch._utils._rebuild_tensor_v2": _Named(_tensor),
    "torch._utils._rebuild_tensor_v3": _Named(_tensor_of_dtype),
    "torch._utils._rebuild_parameter": _Named(lambda data, *_: data),
    "torch._utils._rebuild_parameter_with_state": _Named(lambda data, *_: data),
    "torch._tensor._rebuild_from_type_v2": _Named(_tensor_with_attributes),
}
"""Every name that a pickle may use; none of them is ever imported or called."""
