"""The blocks of a model compiled by torch.compile, one by one: all of a kind share their code (`--compile`)."""

import os
from collections.abc import Iterator
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
    """Where `compile_blocks` is used: a block that cannot be compiled forward for a new shape is computed as it is.

    Args:
        folder: what is compiled is kept there for other processes and runs, unless the environment names another; None:
            where PyTorch keeps it, which may be gone when the machine is started again.
    """
    import torch._dynamo
    from torch._C._dynamo.eval_frame import reset_code

    before = os.environ.get(CACHE)
    if folder is not None and not _is_chosen(before):
        os.environ[CACHE] = str(folder)
    try:
        with torch._dynamo.config.patch(suppress_errors=True, recompile_limit=_MOST_CODES):
            yield
    finally:
        reset_code(apply_block.__code__)  # a process may have many runs, and the limit is one for all
        os.environ.pop(CACHE, None)
        if before is not None:
            os.environ[CACHE] = before


@contextmanager
def failing_aloud() -> Iterator[None]:
    """Inside `compiling`: what cannot be compiled raises the compiler's own error."""
    with torch._dynamo.config.patch(suppress_errors=False):
        yield


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
