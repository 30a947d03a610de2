"""The blocks of a model compiled by torch.compile, one by one: all of a kind share their code (`--compile`)."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import torch
from torch import nn

from mae.layers.transformer import Blocks, apply_block

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""PyTorch's variable for the folder in which it keeps what it compiled."""

_LOGGER = logging.getLogger("torch._dynamo.convert_frame")
"""Which is told of each error that PyTorch suppresses, with its pages."""

_SUPPRESSED = "suppressed"
"""The attribute of a record that has such an error's first line."""

_MOST_CODES = 64
"""Of one function: two kinds of blocks and the decoder's last, each with the lengths and settings that a run meets."""


def compile_blocks(model: nn.Module, on: bool = True, *, dynamic: bool = False) -> None:
    """Have each of a model's blocks compiled when gradients are next recorded through it, or no longer so.

    Without gradients, as in evaluations, blocks are never compiled: there they meet many shapes.

    Args:
        model: its `Blocks` are told.
        on: whether blocks are compiled.
        dynamic: one code for all lengths of a sequence, which is a little slower; otherwise one for each length.
    """
    for each in model.modules():
        if isinstance(each, Blocks):
            each.apply_block = _compiled(dynamic) if on else apply_block


@contextmanager
def compiling(folder: Path | None) -> Iterator[None]:
    """Where `compile_blocks` is used: a block that cannot be compiled for a new shape is computed as it is.

    A line of PyTorch's log tells so. Backward passes are compiled with the forward pass, before anything is computed:
    in the backward pass itself there would be no way back.

    Args:
        folder: what is compiled is kept there for other processes and runs, unless the environment names another; None:
            where PyTorch keeps it, which may be gone when the machine is started again.
    """
    import torch._dynamo
    import torch._functorch.config
    from torch._C._dynamo.eval_frame import reset_code

    before = os.environ.get(CACHE)
    if folder is not None and not _is_chosen(before):
        os.environ[CACHE] = str(folder)
    try:
        with (
            torch._dynamo.config.patch(suppress_errors=True, recompile_limit=_MOST_CODES),
            torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
            _filtered(_in_a_line),
        ):
            yield
    finally:
        reset_code(apply_block.__code__)  # a process may have many runs, and the limit is one for all
        os.environ.pop(CACHE, None)
        if before is not None:
            os.environ[CACHE] = before


@contextmanager
def suppressed_errors() -> Iterator[list[str]]:
    """Inside `compiling`: what could not be compiled, each in a line, told to the caller instead of the log."""
    found: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        if not hasattr(record, _SUPPRESSED):
            return True
        found.append(getattr(record, _SUPPRESSED))
        return False

    with _filtered(kept):
        yield found


def first_line(error: BaseException) -> str:
    """What a compiler says, without the pages behind it."""
    inner = getattr(error, "inner_exception", error)  # of what PyTorch wraps around it
    lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
    return ": ".join([type(inner).__name__, *lines[:1]])


@contextmanager
def _filtered(by: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    _LOGGER.addFilter(by)
    try:
        yield
    finally:
        _LOGGER.removeFilter(by)


def _in_a_line(record: logging.LogRecord) -> bool:
    """Shorten the record of a suppressed error to a line."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and record.levelno >= logging.WARNING:
        setattr(record, _SUPPRESSED, said := first_line(error))
        record.msg, record.args = "a block cannot be compiled for a new shape, and is computed as it is (%s)", (said,)
        record.exc_info = None
    return True


def _is_chosen(folder: str | None) -> bool:
    """Whether the user named the folder: parts of PyTorch write their own, which lies among temporary files, there."""
    if folder is None:
        return False
    path = Path(folder)
    return not (path.parent == Path(gettempdir()) and path.name.startswith("torchinductor_"))


@cache
def _compiled(dynamic: bool) -> Any:
    # Deterministic: which code is fastest is not tried out, for two processes could find, and round, differently.
    return torch.compile(apply_block, dynamic=dynamic, options={"deterministic": True})
