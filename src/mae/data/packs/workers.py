"""The shards of a pack, several at a time in processes of their own."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from mae.data.packs.shard import Job, Record, read_record, write_shard
from mae.errors import MAEError

Progress = Callable[[int, int], None]
"""Called now and then with the number of processed images and their total."""

_WATCH_SECONDS = 0.5
_SHOWN_SECONDS = 0.2


class _Stopped(Exception):
    """Packing was stopped."""


def pack_shards(job: Job, *, workers: int, check: Callable[[list[Record]], None], progress: Progress) -> list[Record]:
    """Writes the unfinished shards of a pack; returns all, in order.

    Args:
        job: the pack.
        workers: processes; 1 packs in this one.
        check: called after each shard with all finished ones; may raise.
        progress: see `Progress`.

    Raises:
        UsageError: an image that cannot be encoded so.
        MAEError: a shard that cannot be written, or a process that died; finished shards are kept.
    """
    done = {number: record for number in range(job.num_shards) if (record := read_record(job, number)) is not None}
    check(list(done.values()))
    todo = [number for number in range(job.num_shards) if number not in done]
    before = sum(len(job.numbers(number)) for number in done)

    def report(count: int) -> None:
        progress(before + count, len(job.order))

    if min(workers, len(todo)) > 1:
        _in_processes(job, todo, done, workers=workers, check=check, progress=report)
    else:
        _here(job, todo, done, check=check, progress=report)
    return [done[number] for number in range(job.num_shards)]


def _here(
    job: Job,
    todo: list[int],
    done: dict[int, Record],
    *,
    check: Callable[[list[Record]], None],
    progress: Callable[[int], None],
) -> None:
    count, shown = 0, 0.0

    def on_image() -> None:
        nonlocal count, shown
        count += 1
        if time.monotonic() - shown > _SHOWN_SECONDS:
            shown = time.monotonic()
            progress(count)

    for number in todo:
        done[number] = write_shard(job, number, on_image=on_image)
        check(list(done.values()))
    progress(count)


def _in_processes(
    job: Job,
    todo: list[int],
    done: dict[int, Record],
    *,
    workers: int,
    check: Callable[[list[Record]], None],
    progress: Callable[[int], None],
) -> None:
    # Forked processes share the names of all images; elsewhere (macOS, Windows) forking is unsafe or impossible.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    # Without locks, which a killed process might hold forever.
    counts, stop = context.RawArray("q", job.num_shards), context.RawValue("b", 0)
    executor = ProcessPoolExecutor(
        min(workers, len(todo)), mp_context=context, initializer=_prepare, initargs=(job, counts, stop)
    )
    try:
        waiting = {executor.submit(_write, number): number for number in todo}
        while waiting:
            finished, _ = wait(waiting, timeout=_SHOWN_SECONDS, return_when=FIRST_COMPLETED)
            for future in finished:
                done[waiting.pop(future)] = future.result()
            if finished:
                check(list(done.values()))
            progress(sum(counts))
    except BrokenProcessPool as error:
        raise MAEError(
            "a packing process died, perhaps out of memory: use fewer --workers. Finished shards are kept: rerun the "
            "same command to resume"
        ) from error
    finally:
        stop.value = 1
        executor.shutdown(cancel_futures=True)


_given: tuple[Job, Any, Any]


def _prepare(job: Job, counts: Any, stop: Any) -> None:
    global _given
    _given = job, counts, stop
    for name in ("SIGINT", "SIGHUP"):  # a terminal sends them to all; the main process decides
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def _write(number: int) -> Record:
    job, counts, stop = _given

    def on_image() -> None:
        counts[number] += 1
        if stop.value:
            raise _Stopped

    return write_shard(job, number, on_image=on_image)
