"""Batches for training and evaluation.

What a training step sees is a pure function of the seed and the step: the order is keyed (`mae.data.loading.sampler`),
crops are drawn from each sample's key, and nothing depends on the number of worker processes, on the number of ranks
or on where a run was interrupted. Images travel as uint8 and are normalised on the device.
"""

import atexit
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from traceback import walk_tb
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mae.contention import num_cores
from mae.data.dataset.images import ImageSet
from mae.data.loading.sampler import AllBut, Numbers, RankOrder, make_shuffle
from mae.data.loading.worker import CropDataset, Piece, none_readable
from mae.errors import MAEError, UsageError
from mae.modalities.images.crop import Augmentation, central_crop
from mae.text import listed

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and std of ImageNet's red, green and blue, for values in [0, 1]."""

_TIMEOUT_SECONDS = 120
_KILL_SECONDS = 5
_WATCH_SECONDS = 1
_PIECE, _PIECE_BYTES = 64, 1 << 29
"""Samples a worker loads at a time, and bytes that it decodes for them: a piece arrives well within the timeout, and
only some are ever on their way. A slow format takes ten seconds for so many bytes."""

_BY_VALUE = 1 << 18
"""Bytes up to which a worker sends a tensor's values; those of a larger one stay where they are, in shared memory."""

_WORKER_FAILURES = ("DataLoader worker (pid", "DataLoader timed out")
_TOO_MANY_FILES = "Too many open files"
_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, eq=False)
class RawBatch:
    """A rank's micro-batch as it comes from the loader.

    Attributes:
        images: crops, uint8 0..255, or float32 (see `ImageSet.get`), not normalised.
        keys: each sample's key in this epoch, for its mask.
        ids: each sample's number in the image set; an unreadable one keeps its number though another image is used.
        shown: the number of the image that is used, which is the one to look a label up by.
        unreadable: what is wrong with unreadable files in this batch.
    """

    images: UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]
    keys: Int64[Tensor, " B"]
    ids: Int64[Tensor, " B"]
    shown: Int64[Tensor, " B"]
    unreadable: tuple[str, ...]


def check_micro_batches(batch_size: int, *, accumulate: int, world: int, views: int) -> None:
    """Refuse a batch that has no equal micro-batches of whole images.

    Raises:
        UsageError: it does not divide.
    """
    if batch_size % (accumulate * world * views):
        of_each = "" if views == 1 else f" of whole images with --repeated-aug {views}"
        raise UsageError(
            f"--batch-size {batch_size} cannot be divided into {accumulate} micro-batches on {world} "
            f"processes{of_each}; expected a multiple of {accumulate * world * views}"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingLoader:
    """Endless training batches of an image set.

    The order is a `FullShuffle`, or a `BlockShuffle` where the images lie in blocks; of an epoch, what is left when no
    whole batch can be made is dropped. A step is divided into `accumulate` micro-batches, each into `world` slices in
    order.

    Attributes:
        images: what to draw from.
        batch_size: images a step, over all ranks and micro-batches.
        accumulate: micro-batches a step.
        views: crops of each image, one after another in a batch; it is decoded once for all of them.
        img_size: height and width of the crops in pixels.
        seed: the run's seed.
        workers: processes that load; 0 loads in this one.
        augmentation: how images are cropped and changed.
        numbers: the images to draw from, each once, by their numbers in the set; None takes all.
        pin_memory: put the images into page-locked memory, which a CUDA device copies from meanwhile.
        rank: this process's number.
        world: number of processes that train together.
    """

    images: ImageSet
    batch_size: int
    accumulate: int
    img_size: tuple[int, int]
    seed: int
    workers: int
    augmentation: Augmentation = Augmentation()
    numbers: Numbers | None = None
    pin_memory: bool = False
    rank: int = 0
    world: int = 1
    views: int = 1

    def __post_init__(self) -> None:
        """Refuses settings that cannot work.

        Raises:
            UsageError: the batch is larger than the set or does not divide, or the images are none that RandAugment,
                other colours or reduced decoding are made for.
        """
        if self.batch_size // self.views > len(self._chosen()):
            raise UsageError(
                f"--batch-size {self.batch_size} is more than the {len(self._chosen())} images of {self.images.name}; "
                f"lower it"
            )
        check_micro_batches(self.batch_size, accumulate=self.accumulate, world=self.world, views=self.views)
        images, how = self.images, self.augmentation
        if (how.rand_augment or how.reduced_decoding) and (images.channels not in (1, 3) or images.dtype != np.uint8):
            option = "RandAugment" if how.rand_augment else "--reduced-decoding"
            raise UsageError(
                f"{images.name} has images of {images.channels} channels and type {images.dtype}; {option} is made "
                f"for uint8 images of 1 or 3 channels: "
                f"{'turn rand_augment off' if how.rand_augment else 'leave it out'}"
            )
        if how.changes_colours and (found := _unlike_rgb(images)):
            raise UsageError(
                f"--color-jitter and --grayscale change the colours of 8-bit images in red, green and blue; those of "
                f"{images.name} have {found}: leave both options out"
            )

    def _chosen(self) -> Numbers:
        return AllBut(len(self.images)) if self.numbers is None else self.numbers

    def order(self) -> RankOrder:
        """The samples this process takes step by step, and their blocks."""
        sizes = self.images.block_sizes
        shuffle = make_shuffle(self._chosen(), sizes, batch_size=self.batch_size // self.views, seed=self.seed)
        return RankOrder(
            shuffle=shuffle, accumulate=self.accumulate, rank=self.rank, world=self.world, views=self.views
        )

    def crops(self) -> CropDataset:
        """What makes pieces of micro-batches."""
        return CropDataset(
            images=self.images, numbers=self._chosen(), img_size=self.img_size, augmentation=self.augmentation
        )

    def iterate(self, start_step: int) -> Generator[RawBatch, None, None]:
        """Micro-batches from a step on, endlessly; closing the iterator stops the worker processes.

        Raises:
            MAEError: more unreadable files than allowed, or a worker process that died or hangs.
        """
        num_pieces = math.ceil(self.batch_size // (self.accumulate * self.world) / self._piece)
        order = InPieces(self.order(), start_step, self.images, self._piece)
        with closing(loaded_pieces(self.crops(), order, workers=self.workers)) as pieces:
            while True:
                yield self._joined([next(pieces) for _ in range(num_pieces)])

    @property
    def _piece(self) -> int:
        """Samples of a piece: all views of an image are in one."""
        decoded = _PIECE_BYTES // max(self.images.most_bytes, 1)
        return max(min(_PIECE // self.views, decoded), 1) * self.views

    def _joined(self, pieces: list[Piece]) -> RawBatch:
        unreadable = tuple(message for piece in pieces for message in piece.unreadable)
        self.images.report_unreadable(unreadable)
        crops = [piece.images for piece in pieces if piece.images is not None]
        if len(crops) < len(pieces):
            raise none_readable(self.images.name, next(piece.unreadable for piece in pieces if piece.images is None))
        shape = sum(len(crop) for crop in crops), *crops[0].shape[1:]
        # Pinned here and not by the DataLoader, since joining its pinned pieces would give ordinary memory again.
        whole = torch.empty(shape, dtype=crops[0].dtype, pin_memory=self.pin_memory)
        return RawBatch(
            images=torch.cat(crops, out=whole),
            keys=torch.cat([piece.keys for piece in pieces]),
            ids=torch.cat([piece.ids for piece in pieces]),
            shown=torch.cat([piece.shown for piece in pieces]),
            unreadable=unreadable,
        )


def loaded_pieces(dataset: Dataset[_Item], order: Sampler[Any], *, workers: int) -> Generator[_Item, None, None]:
    """What a dataset gives for each element of an order; closing the iterator stops the worker processes.

    Args:
        dataset: makes the pieces.
        order: what it is asked for, endlessly.
        workers: processes that load; 0 loads in this one.

    Raises:
        MAEError: a worker process that cannot be started, died or hangs.
    """
    pieces, processes = _started(dataset, order, workers)
    stop = partial(_kill, processes)
    # An iterator that is never closed must not keep the process from ending either.
    if processes:
        atexit.register(stop)
    try:
        while True:
            with explained_worker_failure():
                piece = next(pieces)
            yield piece
    finally:
        # PyTorch would first wait for a hanging worker, and then ask it to end by a signal that it ignores.
        # An iterator that is open when Python ends comes here too late to do anything; `atexit` was in time.
        if processes:
            stop()
            atexit.unregister(stop)
        del pieces


def _started(dataset: Dataset[_Item], order: Sampler[Any], workers: int) -> tuple[Iterator[_Item], set[BaseProcess]]:
    """The pieces in order, and the processes that load them."""
    others = set(multiprocessing.active_children())
    try:
        return iter(_loader(dataset, order, workers)), set(multiprocessing.active_children()) - others
    except BaseException as error:
        # Those that had started would be waited for when Python ends, and never end.
        _kill(set(multiprocessing.active_children()) - others)
        for frame, _ in walk_tb(error.__traceback__):
            if isinstance(half_made := frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
                half_made._shutdown = True  # its destructor would look for what was not made yet
        if not isinstance(error, OSError):
            raise
        raise MAEError(
            f"not all of {workers} data worker processes could be started ({error.strerror}): use fewer "
            "--workers, or 0 to load in the main process, or allow this process more ('ulimit -a' shows its limits)"
        ) from error


def _loader(dataset: Dataset[_Item], order: Sampler[Any], workers: int) -> DataLoader[_Item]:
    # Forked workers share the decoded images; elsewhere (macOS, Windows) forking is unsafe or impossible.
    forked = workers > 0 and sys.platform == "linux"
    return DataLoader(
        dataset,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        timeout=_TIMEOUT_SECONDS if workers else 0,
        # It draws a seed for its workers, which need none; the caller's generator must not move.
        generator=torch.Generator(),
        multiprocessing_context=multiprocessing.get_context("fork") if forked else None,
        collate_fn=_unchanged,
        worker_init_fn=_prepare_worker,
    )


def _unlike_rgb(images: ImageSet) -> str:
    """What images have instead of red, green and blue of 8 bits each; empty: they have these."""
    names = images.channel_names
    if images.channels != 3:
        return "1 channel" if images.channels == 1 else f"{images.channels} channels"
    if images.dtype != np.uint8:
        return f"values of type {images.dtype}"
    named_so = names is None or [name[:1].casefold() for name in names] == ["r", "g", "b"]
    return "" if named_so else f"channels called {listed(names or ())}"


def _unchanged(piece: Any) -> Any:
    """Keeps the DataLoader from turning tuples into lists."""
    return piece


def _kill(workers: set[BaseProcess]) -> None:
    """Kills worker processes at once; they hold nothing worth saving."""
    # PyTorch's handler would raise an error for each worker that ends by a signal.
    handled = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handled else None
    try:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_SECONDS)
        workers.clear()
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _prepare_worker(worker: int) -> None:
    """Ignores Ctrl-C and hang-ups, which a terminal sends to every process: the main one decides."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    ForkingPickler.register(Tensor, _sent)


def _sent(tensor: Tensor) -> Any:
    """How a worker sends a tensor: shared memory takes a conversation of two processes for each, however small."""
    if tensor.nbytes <= _BY_VALUE:
        return torch.from_numpy, (tensor.numpy(),)
    return reduce_tensor(tensor)


def _end_with_parent() -> None:
    """Ends a worker whose main process was killed; PyTorch checks for that only between two pieces."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


class InPieces(Sampler[tuple[list[int], list[int]]]):
    """The order from a step on, each micro-batch in pieces, in the form a DataLoader takes."""

    def __init__(self, order: RankOrder, start_step: int, images: ImageSet, piece: int) -> None:
        self._order, self._start_step, self._images, self._piece = order, start_step, images, piece

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        stretches = self._order.stretches(self._start_step)
        upcoming = next(stretches, None)
        for number, (ids, keys) in enumerate(self._order.from_step(self._start_step)):
            if upcoming is not None and self._start_step + number // self._order.accumulate == upcoming.step:
                # Here and not in the workers: a worker that is silent for two minutes counts as hanging.
                needed, upcoming = upcoming, next(stretches)
                self._images.prefetch(needed.blocks, then=upcoming.blocks)
            for start in range(0, len(ids), self._piece):
                yield ids[start : start + self._piece], keys[start : start + self._piece]


@contextmanager
def explained_worker_failure() -> Iterator[None]:
    """Turns PyTorch's error for a dead or hanging loader process into one that says what to do.

    PyTorch raises it by a signal handler, so it can also surface while the main process computes: a training loop
    should run under this too.

    Raises:
        MAEError: a worker process died, gave nothing for 120 s, or could not hand anything over.
    """
    try:
        yield
    # A worker that dies while it hands over a batch shows as a broken connection.
    except (RuntimeError, EOFError, ConnectionError) as error:
        if str(error).startswith(_TOO_MANY_FILES):  # each tensor on its way from a worker is an open file
            raise MAEError(
                "too many files are open for data worker processes: allow more ('ulimit -n'), or use fewer --workers"
            ) from error
        if isinstance(error, RuntimeError) and not str(error).startswith(_WORKER_FAILURES):
            raise
        raise MAEError(
            f"a data worker process died or hung ({error or type(error).__name__}), perhaps out of memory: use fewer "
            "--workers, or 0 to load in the main process; where images are very large, store them smaller ('mae pack')"
        ) from error


def evaluation_batches(
    images: ImageSet,
    *,
    img_size: tuple[int, int],
    batch_size: int,
    numbers: Int64[Tensor, " n"] | None = None,
    crop_share: float | None = 0.875,
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",
) -> Iterator[UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]]:
    """Central crops of some images in order, not normalised; the last batch may be smaller.

    Args:
        images: where images are read from.
        img_size: height and width of the crops in pixels.
        batch_size: images a batch.
        numbers: which images; None takes `images.readable`.
        crop_share: see `central_crop`.
        interpolation: see `central_crop`.

    Raises:
        MAEError: an image that cannot be read, since leaving it out would shift the labels.
    """
    for part in (images.readable if numbers is None else numbers).split(batch_size):
        whole = (images.get(number) for number in part.tolist())
        yield torch.stack([central_crop(image, img_size, crop_share, interpolation=interpolation) for image in whole])


def normalise(
    images: UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"],
    mean: Float32[Tensor, " C"],
    std: Float32[Tensor, " C"],
) -> Float32[Tensor, "B C H W"]:
    """`(x - mean) / std` for each channel, on the images' device; uint8 is first scaled to [0, 1]."""
    values = images.float().div_(255) if images.dtype == torch.uint8 else images
    return (values - mean.to(images.device)[:, None, None]).div_(std.to(images.device)[:, None, None])


def default_workers(device_type: str, in_memory: bool, *, processes: int) -> int:
    """How many loading processes suit each of some processes that train together on this machine.

    A GPU leaves the cores free to load. A model on the CPU wants them itself: on two cores training was fastest
    without workers (459 images/s against 448 with one for images in memory, 293 against 279 for files). Where
    processes are not forked (macOS, Windows), each worker would get a copy of all images in memory.
    """
    cores = num_cores() // processes
    if in_memory and sys.platform != "linux":
        return 0
    if device_type == "cuda":
        return max(min(cores - 2, 4 if in_memory else 16), 1)
    return 0 if in_memory else min(cores // 4, 4)
