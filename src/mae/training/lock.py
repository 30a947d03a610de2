"""One writing process per folder; readers are not kept out."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mae.errors import MAEError, UsageError
from mae.records import read_json, shown

LOCK, HOLDER = ".lock", ".locked-by.json"
_PATIENCE = 5.0
"""Seconds: a process that was killed may leave a data worker that holds its lock until it has noticed."""


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """While entered, no other process of this machine can enter the same folder; a killed process releases it.

    The operating system keeps the lock. Other machines that share the folder are kept out where its file system tells
    them of locks, as NFS 4 does.

    Args:
        folder: which is there.

    Raises:
        UsageError: another process is at it; says which one.
        MAEError: the folder cannot be locked.
    """
    lock, holder = FileLock(folder / LOCK, timeout=_PATIENCE), folder / HOLDER
    try:
        lock.acquire()
    except Timeout as error:
        raise UsageError(
            f"{folder} is being written by another process{_told(holder)}; wait until it has ended, or stop it"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise MAEError(f"{folder} cannot be locked against other processes: {error}") from error
    try:
        with suppress(OSError):  # a full disk must not keep a run from ending: who holds the lock is told, no more
            holder.write_text(json.dumps(_this_process()))
        yield
    finally:
        with suppress(OSError):
            holder.unlink()
        lock.release()


def was_killed(folder: Path) -> bool:
    """Whether a process of this machine that wrote there is gone without having said so; nothing is written.

    False where that cannot be known: it wrote from another machine, or the folder or the system tells of no locks.
    """
    with suppress(UsageError, OSError, ImportError):
        if read_json(folder / HOLDER).get("host") != socket.gethostname():
            return False
        from fcntl import LOCK_NB, LOCK_SH, flock  # Unix alone has it

        with (folder / LOCK).open("rb") as lock:
            flock(lock, LOCK_SH | LOCK_NB)  # an error while another process holds it; closing the file frees it
        return True
    return False


def _this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def _told(holder: Path) -> str:
    """The holder of a lock as it names itself; empty where it does not."""
    with suppress(UsageError):
        found = read_json(holder)
        if found.keys() >= {"pid", "host", "since"}:
            pid, host, since = (shown(found[name]).strip("'") for name in ("pid", "host", "since"))
            return f" (pid {pid} on {host}, since {since})"
    return ""
