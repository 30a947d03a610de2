"""Batches for training and evaluation.

What a training step sees is a pure function of the seed and the step: the order is a keyed permutation of each
epoch, crops are drawn from each sample's key, and nothing depends on the number of worker processes, on the number
of ranks or on where a run was interrupted. Images travel as uint8 and are normalised on the device.
"""

import atexit
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from mae.data.augmentation import central_crop, random_crop_boxes, resized_crop
from mae.data.images import ImageSet
from mae.data.limits import UnreadableImage
from mae.errors import MAEError, UsageError
from mae.randomness import Stream, permutation, sample_keys, uniform

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's red, green and blue, for values in [0, 1]."""

_TIMEOUT_SECONDS = 120
_KILL_SECONDS = 5
_WATCH_SECONDS = 1
_PIECE = 64
"""Samples a worker loads at a time: a piece arrives within the timeout, and only some are ever on their way."""

_REPLACEMENTS = 16
_WORKER_FAILURES = ("DataLoader worker (pid", "DataLoader timed out")
_Fetched = tuple[Tensor | None, Tensor, Tensor, list[str]]


@dataclass(frozen=True, kw_only=True, eq=False)
class RawBatch:
    """A rank's micro-batch as it comes from the loader.

    Attributes:
        images: crops, uint8 0..255, or float32 (see `ImageSet.get`), not normalised.
        keys: each sample's key in this epoch, for its mask.
        ids: each sample's number in the image set; an unreadable one keeps its number though another is shown.
        unreadable: what was wrong with files met in this batch.
    """

    images: UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]
    keys: Int64[Tensor, " B"]
    ids: Int64[Tensor, " B"]
    unreadable: tuple[str, ...]


class TrainingLoader:
    """Endless training batches of an image set.

    Step s takes positions `[s * batch_size, (s + 1) * batch_size)` of its epoch's permutation; what is left at the
    end of an epoch is dropped. A step is divided into `accumulate` micro-batches, each into `world` slices in order.
    """

    def __init__(
        self,
        *,
        images: ImageSet,
        batch_size: int,
        accumulate: int,
        img_size: tuple[int, int],
        seed: int,
        workers: int,
        pin_memory: bool = False,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """Takes its settings.

        Args:
            images: what to draw from.
            batch_size: images a step, over all ranks and micro-batches.
            accumulate: micro-batches a step.
            img_size: height and width of the crops in pixels.
            seed: the run's seed.
            workers: processes that load; 0 loads in this one.
            pin_memory: put the images into page-locked memory, which a CUDA device copies from meanwhile.
            rank: this process's number.
            world: number of processes that train together.

        Raises:
            UsageError: the batch is larger than the set, or does not divide.
        """
        if batch_size > len(images):
            raise UsageError(
                f"--batch-size {batch_size} is more than the {len(images)} images of {images.name}; lower it"
            )
        if batch_size % (accumulate * world):
            raise UsageError(
                f"--batch-size {batch_size} cannot be divided into {accumulate} micro-batches on {world} processes; "
                f"expected a multiple of {accumulate * world}"
            )
        self._images = images
        self._workers = workers
        self._pin_memory = pin_memory
        self._pieces = math.ceil(batch_size // (accumulate * world) / _PIECE)
        self._dataset = _Crops(images=images, img_size=img_size)
        self._order = _Order(
            length=len(images), batch_size=batch_size, accumulate=accumulate, seed=seed, rank=rank, world=world
        )

    def iterate(self, start_step: int) -> Iterator[RawBatch]:
        """Micro-batches from a step on, without end; closing the iterator stops the worker processes.

        Raises:
            MAEError: more unreadable files than allowed, or a worker process that died or hung.
        """
        others = set(multiprocessing.active_children())
        pieces = iter(self._loader(start_step))
        workers = set(multiprocessing.active_children()) - others
        stop = partial(_kill, workers)
        # An iterator that is never closed must not keep the process from ending either.
        atexit.register(stop)
        try:
            while True:
                with explained_worker_failure():
                    fetched = [next(pieces) for _ in range(self._pieces)]
                yield self._joined(fetched)
        finally:
            # PyTorch would first wait for a hanging worker, and then ask it to end by a signal that it ignores.
            stop()
            atexit.unregister(stop)
            del pieces

    def _joined(self, pieces: list[_Fetched]) -> RawBatch:
        unreadable = tuple(message for piece in pieces for message in piece[3])
        self._images.report_unreadable(unreadable)
        crops = [piece[0] for piece in pieces if piece[0] is not None]
        if len(crops) < len(pieces):
            missing = next(piece[3] for piece in pieces if piece[0] is None)
            tried = f"{_REPLACEMENTS + 1} images in a row cannot be used"
            raise MAEError(f"{self._images.name}: {tried}: {missing[0]}")
        shape = sum(len(crop) for crop in crops), *crops[0].shape[1:]
        # Pinned here and not by the DataLoader, since joining its pinned pieces would give ordinary memory again.
        whole = torch.empty(shape, dtype=crops[0].dtype, pin_memory=self._pin_memory)
        return RawBatch(
            images=torch.cat(crops, out=whole),
            keys=torch.cat([piece[1] for piece in pieces]),
            ids=torch.cat([piece[2] for piece in pieces]),
            unreadable=unreadable,
        )

    def _loader(self, start_step: int) -> DataLoader[_Fetched]:
        # Forked workers share the decoded images; elsewhere (macOS, Windows) forking is unsafe or impossible.
        forked = self._workers > 0 and sys.platform == "linux"
        return DataLoader(
            self._dataset,
            batch_size=None,
            sampler=_From(self._order, start_step),
            num_workers=self._workers,
            timeout=_TIMEOUT_SECONDS if self._workers else 0,
            # It draws a seed for its workers, which need none; the caller's generator must not move.
            generator=torch.Generator(),
            multiprocessing_context=multiprocessing.get_context("fork") if forked else None,
            collate_fn=_unchanged,
            worker_init_fn=_prepare_worker,
        )


def _unchanged(piece: Any) -> Any:
    """Keeps the DataLoader from turning tuples into lists."""
    return piece


def _kill(workers: Iterable[BaseProcess]) -> None:
    """Ends worker processes at once, whatever they are doing; they hold nothing that is worth saving."""
    # PyTorch's handler would raise an error for each worker that ends by a signal.
    handled = hasattr(signal, "SIGCHLD") and threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if handled else None
    try:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join(_KILL_SECONDS)
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def _prepare_worker(worker: int) -> None:
    """A terminal sends Ctrl-C to every process; the main one decides what it means, and still needs its images."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends a worker whose main process was killed; PyTorch looks for that between two pieces alone."""
    parent = multiprocessing.parent_process()
    while parent is not None and os.getppid() == parent.pid:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class _Order:
    """Which samples, with which keys, make up a rank's part of each micro-batch."""

    length: int
    batch_size: int
    accumulate: int
    seed: int
    rank: int
    world: int

    def from_step(self, start_step: int) -> Iterator[tuple[list[int], list[int]]]:
        """Ids and keys of each micro-batch from a step on, without end."""
        steps_per_epoch = self.length // self.batch_size
        micro = self.batch_size // self.accumulate
        part = micro // self.world
        first_epoch, skipped = divmod(start_step, steps_per_epoch)
        for epoch in itertools.count(first_epoch):
            order = permutation(self.seed, epoch, self.length)[: steps_per_epoch * self.batch_size]
            for start in range(skipped * self.batch_size, len(order), micro):
                begin = start + self.rank * part
                ids = order[begin : begin + part]
                # Lists, because each tensor sent to a process costs a shared-memory file.
                yield ids.tolist(), sample_keys(self.seed, epoch, ids).tolist()
            skipped = 0


class _From(Sampler[tuple[list[int], list[int]]]):
    """The order from a step on, each micro-batch in pieces, in the form a DataLoader takes."""

    def __init__(self, order: _Order, start_step: int) -> None:
        self._order, self._start_step = order, start_step

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        for ids, keys in self._order.from_step(self._start_step):
            for start in range(0, len(ids), _PIECE):
                yield ids[start : start + _PIECE], keys[start : start + _PIECE]


class _Crops(Dataset[_Fetched]):
    """Pieces of micro-batches of random crops, by ids and keys."""

    def __init__(self, *, images: ImageSet, img_size: tuple[int, int]) -> None:
        self._images, self._img_size = images, img_size

    def __getitem__(self, batch: tuple[list[int], list[int]]) -> _Fetched:
        """Crops (None if no replacement could be read), keys, ids, and what was wrong with unreadable files."""
        ids, keys = torch.tensor(batch[0]), torch.tensor(batch[1])
        unreadable: list[str] = []
        with _one_thread():
            loaded = [self._readable(number, key, unreadable) for number, key in zip(batch[0], keys, strict=True)]
            whole = [image for image in loaded if image is not None]
            crops = self._cropped(whole, keys) if len(whole) == len(loaded) else None
        return crops, keys, ids, unreadable

    def _readable(self, number: int, key: Tensor, unreadable: list[str]) -> Tensor | None:
        """The image, or where it cannot be read the first readable one of those its key names."""
        for candidate in itertools.chain([number], self._replacements(key)):
            try:
                return self._images.get(candidate)
            except UnreadableImage as error:
                unreadable.append(str(error))
        return None

    def _replacements(self, key: Tensor) -> Iterator[int]:
        # A generator, so that nothing is drawn for an image that can be read.
        drawn = uniform(key.reshape(1), _REPLACEMENTS, Stream.REPLACEMENT).squeeze(0).double()
        yield from (drawn * len(self._images)).long().tolist()

    def _cropped(self, loaded: list[Tensor], keys: Tensor) -> Tensor:
        sizes = torch.tensor([image.shape[-2:] for image in loaded])
        boxes, flips = random_crop_boxes(keys, sizes[:, 0], sizes[:, 1])
        pieces = [
            resized_crop(image, tuple(box), flip, self._img_size)
            for image, box, flip in zip(loaded, boxes.tolist(), flips.tolist(), strict=True)
        ]
        return torch.stack(pieces)


@contextmanager
def _one_thread() -> Iterator[None]:
    """One image is too little work to share: with two threads on two busy cores crops took up to 30 times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def explained_worker_failure() -> Iterator[None]:
    """Turns PyTorch's error for a dead or hanging loader process into one that says what to do.

    PyTorch raises it by a signal handler, so it can also surface while the main process computes: a training loop
    should run under this too.

    Raises:
        MAEError: a worker process died, or gave nothing for 120 s.
    """
    try:
        yield
    # A worker that dies while it hands over a batch shows as a broken connection.
    except (RuntimeError, EOFError, ConnectionError) as error:
        if isinstance(error, RuntimeError) and not str(error).startswith(_WORKER_FAILURES):
            raise
        raise MAEError(
            f"a data worker process died or hung ({error or type(error).__name__}); it may have run out of memory: "
            f"use fewer --workers, or 0 to load in the main process"
        ) from error


def evaluation_batches(
    images: ImageSet, *, img_size: tuple[int, int], batch_size: int
) -> Iterator[UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"]]:
    """Central crops of the images numbered `images.readable`, in order, not normalised; the last batch may be smaller.

    Raises:
        MAEError: another image that cannot be read, since leaving it out would shift the labels.
    """
    for numbers in images.readable.split(batch_size):
        yield torch.stack([central_crop(images.get(number), img_size) for number in numbers.tolist()])


def normalise(
    images: UInt8[Tensor, "B C H W"] | Float32[Tensor, "B C H W"],
    mean: Float32[Tensor, " C"],
    std: Float32[Tensor, " C"],
) -> Float32[Tensor, "B C H W"]:
    """`(x - mean) / std` for each channel, on the images' device; uint8 is first scaled to [0, 1]."""
    values = images.float() / 255 if images.dtype == torch.uint8 else images
    return (values - mean.to(images.device)[:, None, None]) / std.to(images.device)[:, None, None]


def default_workers(device_type: str, in_memory: bool) -> int:
    """How many loading processes suit this machine.

    A GPU leaves the cores free to load. A model on the CPU wants them itself: on two cores training was fastest
    without workers (459 images/s against 448 with one for images in memory, 293 against 279 for files). Where
    processes are not forked (macOS, Windows), each worker would get a copy of all images in memory.
    """
    cores = os.cpu_count() or 1
    if in_memory and sys.platform != "linux":
        return 0
    if device_type == "cuda":
        return max(min(cores - 2, 4 if in_memory else 16), 1)
    return 0 if in_memory else min(cores // 4, 4)
