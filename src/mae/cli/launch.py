"""`--gpus N`: the same command in N processes of this machine, started by PyTorch's launcher."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from mae.cli import code_of_signal
from mae.contention import num_cores
from mae.credentials import handed_on
from mae.errors import MAEError, UsageError
from mae.training.device import choose_device

_PASSED_ON = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1") if hasattr(signal, name)]

_GRACE_SECONDS = 600
"""Time for the processes to save after a signal, before they are killed."""

_MOST_ON_CPU = 16
"""Processes allowed on any machine, to try things out; more than its cores are useless, and many take all memory."""


def launch(gpus: int, *, device: str, command: Sequence[str]) -> int:
    """Start the processes and wait for them.

    Args:
        gpus: how many.
        device: where they compute, as `--device` has it.
        command: the arguments of `mae`, `--gpus` among them.

    Returns:
        Their exit code.

    Raises:
        UsageError: there are fewer GPUs, or this is already one of several processes.
        MAEError: a process was killed.
    """
    check_number(gpus, device)
    os.environ.update(handed_on())
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_GRACE_SECONDS))
    # An ignored signal stays ignored: `nohup` lets a command outlive its terminal.
    names = [name for name in _PASSED_ON if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", ",".join(names))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // gpus)))  # else each takes all cores
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=gpus,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=str(os.getpid()),
        max_restarts=0,
        signals_to_handle=os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"],
    )
    # A process that fails says why itself, and of one that was killed it is said below.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, sys.executable)("-P", "-m", "mae", *without_gpus(command))
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if first.exitcode > 0:
            return first.exitcode
        # It could say nothing itself, and the others end by signals that they were sent because of it.
        raise MAEError(
            f"rank {rank} of {gpus} processes was killed by {first.signal_name()}, and the others were ended with it; "
            "perhaps memory ran out: use fewer --workers or --gpus, or --accumulate; a run resumes where it was saved"
        ) from error
    except SignalException as error:  # passed on to the processes, which saved
        return code_of_signal(error.sigval)
    return 0


def check_number(gpus: int, device: str) -> None:
    """Refuse an impossible number of processes.

    Raises:
        UsageError: there are fewer GPUs, or this is already one of several processes.
    """
    if torch.distributed.is_torchelastic_launched():
        raise UsageError("--gpus starts the processes itself; leave it out under torchrun")
    if gpus < 1:
        raise UsageError(f"--gpus is {gpus}; expected 1 or more")
    kind = choose_device(device).type
    if kind == "cuda" and gpus > torch.cuda.device_count():
        raise UsageError(f"--gpus is {gpus}, and this machine has {torch.cuda.device_count()}; give that many at most")
    if kind != "cuda" and device != "cpu":
        raise UsageError(f"--gpus is {gpus}, and PyTorch finds no GPU; give --device cpu for that many processes")
    most = max(_MOST_ON_CPU, os.cpu_count() or 1)
    if kind != "cuda" and gpus > most:
        raise UsageError(f"--gpus is {gpus}; expected {most} processes at most on this machine's CPU")


def without_gpus(command: Sequence[str]) -> list[str]:
    """The arguments of a command without `--gpus N`."""
    kept, words = [], iter(command)
    for word in words:
        if word == "--gpus":
            next(words, None)
        elif not word.startswith("--gpus="):
            kept.append(word)
    return kept
