"""Where and in which precision to compute."""

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from mae.errors import MAEError, UsageError

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _NEVER = -1, -4, -1  # of glibc's malloc.h
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` takes CUDA, else Apple's MPS, else the CPU.

    Raises:
        UsageError: the device is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, found in there.items() if found))
    if not there.get(name, False):
        found = ", ".join(kind for kind, is_there in there.items() if is_there)
        raise UsageError(f"--device is {name}, which PyTorch does not find here; there is: {found}")
    return torch.device(name)


def choose_precision(name: str, device: torch.device) -> str:
    """The precision of a name; `auto` takes bf16 where the hardware computes in it, else fp32.

    Raises:
        UsageError: fp16 on a CPU, which has no use for it.
    """
    if reason := why_no_precision(name, device):
        raise UsageError(reason)
    if name != "auto":
        return name
    return "bf16" if computes_in_bf16(device) else "fp32"


def why_no_precision(name: str, device: torch.device) -> str | None:
    """Why a device is not trained on in a precision; None where it is."""
    if name == "fp16" and device.type == "cpu":
        return "--precision fp16 needs a GPU; use fp32 or bf16 on a CPU"
    return None


def computes_in_bf16(device: torch.device) -> bool:
    """Whether the hardware multiplies in bf16; where it is emulated it is slower than fp32, and MPS gains nothing."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward runs; weights and optimizer stay float32."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=DTYPES[precision])


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its queue."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextmanager
def explained_memory_failure(advice: str) -> Iterator[None]:
    """Turns PyTorch's out-of-memory error into one that says what to do.

    Args:
        advice: what that is.

    Raises:
        MAEError: the device ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        # CUDA has a class of its own for it, the CPU and MPS only these words; the last are those of oneDNN.
        words = "out of memory|allocate memory|could not create a (primitive|memory)"
        if not isinstance(error, torch.OutOfMemoryError) and not re.search(words, str(error)):
            raise
        raise MAEError(f"the device ran out of memory: {str(error).splitlines()[0]}; {advice}") from error


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it, in this process from now on; elsewhere do nothing.

    By default it hands large blocks back to the system at once, and every training step on a CPU begins by asking for
    the same ones again, page by page. What the process holds is held until the end, and its peak may be higher by some
    per cent, up to a sixth where blocks of many sizes come and go.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # musl has none
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        libc.mallopt(_M_MMAP_MAX, 0)
