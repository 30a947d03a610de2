"""Named arrays in a folder of `.npy` files: written a few rows at a time, read memory-mapped."""

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any

import numpy as np
import psutil
import torch
from numpy.lib.format import dtype_to_descr, write_array_header_2_0
from torch import Tensor

from mae.errors import MAEError
from mae.records import read_json, write_json

_ASIDE = ".writing-"


def write_arrays(
    folder: Path, key: Mapping[str, Any], count: int | None, parts: Iterable[Mapping[str, np.ndarray]]
) -> None:
    """Write arrays part by part; the folder is there whole, under its name, or not at all.

    Args:
        folder: where they go; one that another process wrote meanwhile is left as it is.
        key: all that decides the arrays, kept beside them in `key.json`.
        count: their rows; None: the first part has all of them.
        parts: rows of each array, in order.

    Raises:
        MAEError: they cannot be written, as on a full disk.
    """
    aside = folder.parent / f"{_ASIDE}{folder.name}-{os.getpid()}"  # another process may be writing the same
    try:
        for leftover in folder.parent.glob(f"{_ASIDE}{folder.name}-*"):
            if leftover == aside or not psutil.pid_exists(int(leftover.name.rpartition("-")[2])):
                shutil.rmtree(leftover)
        aside.mkdir(parents=True)
        _write_parts(aside, count, parts)
        arrays = sorted(path.stem for path in aside.glob("*.npy"))
        write_json(aside / "key.json", {**key, "arrays": arrays})
        if read_arrays(folder) is not None:  # another process was faster
            return
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        raise MAEError(f"could not store features in {folder}: {error}; free space there") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_parts(aside: Path, count: int | None, parts: Iterable[Mapping[str, np.ndarray]]) -> None:
    # Written row by row, since a mapped file that meets a full disk ends the process without a word.
    files: dict[str, IO[bytes]] = {}
    with ExitStack() as stack:
        for part in parts:
            for name, values in part.items():
                if name not in files:
                    files[name] = stack.enter_context((aside / f"{name}.npy").open("wb"))
                    shape = (len(values) if count is None else count, *values.shape[1:])
                    write_header(files[name], values.dtype, shape)
                files[name].write(values.data)


def write_header(file: IO[bytes], dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Begin a `.npy` file whose rows are written after it, for arrays that memory cannot hold."""
    write_array_header_2_0(file, {"descr": dtype_to_descr(dtype), "fortran_order": False, "shape": shape})


def read_arrays(folder: Path) -> dict[str, Tensor] | None:
    """The arrays of a stored folder, memory-mapped; None where there is none, or a file is damaged."""
    if not (folder / "key.json").is_file():
        return None
    try:
        names = read_json(folder / "key.json")["arrays"]
        if any(Path(name).name != name for name in names):  # leads out of the folder
            return None
        # "c": what is written to the tensor stays in memory
        return {
            name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False)) for name in names
        }
    # numpy reads a header as Python's own literals, and its tokenizer has errors of its own.
    except (OSError, ValueError, TypeError, EOFError, KeyError, SyntaxError, TokenError):
        return None
