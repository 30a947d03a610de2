"""What a run would cost on this machine: some real steps and some real loading, timed before it begins."""

import copy
import ctypes
import gc
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from math import floor
from statistics import fmean, median
from time import perf_counter
from typing import Literal

import psutil
import torch
from torch import Tensor, nn

from mae.data.loading.device_loader import DeviceLoader
from mae.data.loading.loader import normalise
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.build import num_workers, some_images
from mae.pretraining.resolve import RunContext
from mae.training.device import autocast, keep_freed_memory, synchronise
from mae.training.optimizer import make_optimizer
from mae.training.sharding import autocast_if_sharded

LONG_WAIT = 0.15
"""Share of the time waiting for images from which it is worth a remedy."""

_CROPS = 64
"""Real crops that are loaded for the steps; a larger part holds some of them again, which costs a model the same."""
_WARM_UP = 2
"""Steps that are not timed: the first makes the optimizer's averages, so only the second reaches the peak memory."""
_RATIOS = 200
"""Steps of the run whose mask ratio is asked for, spread evenly over it."""
_SECONDS_BETWEEN_LOOKS = 0.002
_SETTLING = 0.25
"""Share of the time for loading that is not counted: worker processes start, and then all deliver at once."""


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a training step of some images takes.

    Attributes:
        part_size: images that are computed at once.
        seconds: of a step, forward, backward and AdamW; images are there already.
        peak_bytes: the most memory that weights, averages, gradients and activations took together; see
            `measure_steps`.
    """

    part_size: int
    seconds: float
    peak_bytes: int


def measure_steps(
    prepared: RunContext, *, part_sizes: Sequence[int], seconds: float, model: MaskedAutoencoder | None = None
) -> list[StepCost]:
    """Time some steps of a fresh model on real crops, as the run would do them; nothing of the run is touched.

    Time is the median of the steps after two of warm-up, under masks of the run's mean ratio. The warm-up hides as
    little as the run ever does, for that takes the most memory. The model is not compiled.

    On CUDA the memory is that of the tensors, exact but for the gaps between them. Elsewhere it is by how much the
    memory of this process grew, looked at every 2 ms: pages that were there before and shorter peaks do not show, and
    it is good to some ten MB or a tenth, whichever is more. On MPS it was never tried.

    On a CPU glibc keeps freed memory from now on, as in a run: see `keep_freed_memory`.

    Args:
        prepared: the run.
        part_sizes: how many images to compute at once, one cost each; multiples of the run's `compared_views`.
        seconds: to spend in all; two steps of each size are done however long they take, and the second may then be
            what is timed.
        model: copies of it take the steps; None: fresh ones, which for a large one takes seconds to fill.

    Raises:
        MAEError: images that cannot be read.
    """
    if prepared.device.type == "cpu":
        keep_freed_memory()
    crops, keys = first_crops(prepared, _CROPS)
    costs = []
    gc.collect()
    gc.freeze()  # what is there now stays: looking through all of it for each size takes longer than the steps
    try:
        for size in part_sizes:
            chosen = torch.arange(size) % len(crops)
            costs.append(_measure(prepared, crops[chosen], keys[chosen], seconds / len(part_sizes), model))
            give_back(prepared.device)
    finally:
        gc.unfreeze()
    return costs


def _measure(
    prepared: RunContext, crops: Tensor, keys: Tensor, seconds: float, model: MaskedAutoencoder | None
) -> StepCost:
    """The cost of a step of these crops `[B, C, H, W]`, as they come from the loader."""
    lowest, mean = lowest_and_mean_ratio(prepared)
    began = perf_counter()
    times: list[float] = []
    with PeakMemory(prepared.device) as memory:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            checkpointing = prepared.config.machine.activation_checkpointing
            made = None if model is not None else build_model(prepared.method, activation_checkpointing=checkpointing)
        own = copy.deepcopy(model) if made is None else made
        assert own is not None
        own = own.to(prepared.device)
        own.hand_in(prepared.network)
        step = TrialStep(prepared, own, crops, keys)
        for _ in range(_WARM_UP):
            second = perf_counter()
            step.run(lowest)
        times.append(perf_counter() - second)
    if perf_counter() - began < seconds or lowest != mean:
        times.clear()  # there is time for others, or this one hid less than the run usually does
    while not times or perf_counter() - began < seconds:
        started = perf_counter()
        step.run(mean)
        times.append(perf_counter() - started)
    return StepCost(part_size=len(crops), seconds=median(times), peak_bytes=memory.peak_bytes)


class TrialStep:
    """A training step, done again and again on the same images.

    Args:
        prepared: the run.
        model: on the run's device.
        crops: as they come from the loader, `[B, C, H, W]`.
        keys: of their masks, `[B]`.
    """

    def __init__(self, prepared: RunContext, model: MaskedAutoencoder, crops: Tensor, keys: Tensor) -> None:
        config = prepared.config
        self._prepared, self._model, self._crops, self._keys = prepared, model, crops, keys
        self._statistics = prepared.statistics()
        self._optimizer = make_optimizer(
            model, weight_decay=config.optim.weight_decay, betas=config.optim.betas, kind=config.optim.optimizer
        )
        self._scaler = torch.amp.GradScaler(prepared.device.type, enabled=config.optim.precision == "fp16")

    def run(self, ratio: float) -> None:
        """One step with this share of patches masked; comes back when the device has done it."""
        config, model = self._prepared.config, self._model
        self.backward(ratio)
        self._scaler.unscale_(self._optimizer)
        if config.optim.clip_grad is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_grad)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        synchronise(self._prepared.device)

    def backward(self, ratio: float) -> None:
        """The gradients of a step with this share of patches masked, added to those that are there."""
        device, config, model = self._prepared.device, self._prepared.config, self._model
        images = normalise(self._crops.to(device), *self._statistics)
        with autocast_if_sharded(model, config.optim.precision, device):
            plan = model.plan(images, keys=self._keys, ratio=ratio)
        with autocast(config.optim.precision, device):
            loss = model(images, plan=plan, keys=self._keys, views=self._prepared.compared_views).loss
        self._scaler.scale(loss).backward()


def first_crops(prepared: RunContext, count: int) -> tuple[Tensor, Tensor]:
    """About so many crops of the run `[B, C, H, W]`, not normalised, and their keys `[B]`."""
    views = prepared.compared_views
    batch_size = max(count // views, 1) * views
    with closing(some_images(prepared, count, batch_size=batch_size, views=views).iterate(0)) as batches:
        raw = next(batches)
    return raw.images, raw.keys.to(prepared.device)


def lowest_and_mean_ratio(prepared: RunContext) -> tuple[float, float]:
    """The lowest and the mean share of patches that the run masks."""
    total, schedule = prepared.total_steps, prepared.mask_schedule
    looks = min(_RATIOS, total)
    steps = (look * total // looks for look in range(looks))
    ratios = [schedule.ratio(step, steps_per_epoch=prepared.steps_per_epoch) for step in steps]
    return min(ratios), fmean(ratios)


class PeakMemory:
    """The most memory that was taken while entered, over what was taken before."""

    def __init__(self, device: torch.device) -> None:
        self.peak_bytes = 0
        self._device = device
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        give_back(self._device)  # what is lying about would be used first, and no growth be seen
        self._before = self._taken()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._watcher.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self._stop.set()
            self._watcher.join()

    def _taken(self) -> int:
        on_cuda = self._device.type == "cuda"
        return torch.cuda.memory_allocated(self._device) if on_cuda else self._process.memory_info().rss

    def _watch(self) -> None:
        while not self._stop.wait(_SECONDS_BETWEEN_LOOKS):
            self.peak_bytes = max(self.peak_bytes, self._taken() - self._before)


def give_back(device: torch.device) -> None:
    """Return to the system what is freed but still held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # musl has none
        libc.malloc_trim(0)


def measure_loading(prepared: RunContext, *, seconds: float) -> float:
    """Images a second that the run's loader gives, with its number of processes, while nothing else is computed.

    The images are the first of the run. Those that the system has read before come from its memory, and so do those of
    later epochs if they fit there.

    Args:
        prepared: the run.
        seconds: to spend; at least two batches of up to 64 images are loaded however long they take.

    Raises:
        MAEError: images that cannot be read, or a worker process that died or hung.
    """
    views = prepared.config.data.repeated_aug
    batch_size = min(max(_CROPS // views, 1) * views, prepared.part_size)
    plain = some_images(prepared, _CROPS, batch_size=batch_size, workers=num_workers(prepared), views=views)
    loader = DeviceLoader(loader=plain, device=prepared.device) if prepared.config.machine.cache_on_device else plain
    with closing(loader.iterate(0)) as batches:
        began = perf_counter()
        next(batches)
        while perf_counter() - began < _SETTLING * seconds:
            next(batches)
        began, loaded = perf_counter(), 0
        while not loaded or perf_counter() - began < (1 - _SETTLING) * seconds:
            loaded += len(next(batches).images)
        return loaded / (perf_counter() - began)


def fitting_part_size(costs: Sequence[StepCost], available: int) -> int:
    """How many images can be computed at once, by a straight line through the smallest and the largest part measured.

    Where the memory did not grow from one to the other, as where both are lost in the noise, all of it is laid to
    the images: too few are then said to fit rather than too many.

    Args:
        costs: of two part sizes or more.
        available: bytes there are.

    Returns:
        The number of images, 0 if not even one fits.
    """
    small, large = _ends(costs)
    per_image = (large.peak_bytes - small.peak_bytes) / (large.part_size - small.part_size)
    if per_image <= 0:
        return floor(available * large.part_size / max(large.peak_bytes, 1))
    fixed = small.peak_bytes - per_image * small.part_size
    return max(0, floor((available - fixed) / per_image))


def cost_of(costs: Sequence[StepCost], part_size: int) -> StepCost:
    """The cost of a step of so many images: as measured, else by a line through the smallest and the largest part.

    Args:
        costs: of two part sizes or more.
        part_size: images computed at once.
    """
    for cost in costs:
        if cost.part_size == part_size:
            return cost
    small, large = _ends(costs)

    def extended(first: float, last: float) -> float:
        per_image = (last - first) / (large.part_size - small.part_size)
        if per_image <= 0:  # a device that was waiting for its orders does not with many more images
            return last * part_size / large.part_size
        return max(first + per_image * (part_size - small.part_size), first * min(1, part_size / small.part_size))

    return StepCost(
        part_size=part_size,
        seconds=extended(small.seconds, large.seconds),
        peak_bytes=round(extended(small.peak_bytes, large.peak_bytes)),
    )


def _ends(costs: Sequence[StepCost]) -> tuple[StepCost, StepCost]:
    ordered = sorted(costs, key=lambda cost: cost.part_size)
    return ordered[0], ordered[-1]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast model and loader are together.

    Attributes:
        images_per_second: of the run.
        data_wait: share of the time in which the model waits for images, 0 to 1.
        limit: which of the two is the slower.
    """

    images_per_second: float
    data_wait: float
    limit: Literal["data", "compute"]


def pace_of(model_rate: float, loader_rate: float, workers: int) -> Pace:
    """Model and loader together: one after the other without worker processes, beside each other with them.

    On a CPU workers take time from the model that is not counted here.

    Args:
        model_rate: images a second of the model alone.
        loader_rate: images a second of the loader alone.
        workers: processes that load.
    """
    computing, loading = 1 / model_rate, 1 / loader_rate  # seconds an image
    waiting = loading if workers == 0 else max(0.0, loading - computing)
    return Pace(
        images_per_second=1 / (computing + waiting),
        data_wait=waiting / (computing + waiting),
        limit="data" if loading > computing else "compute",
    )


def available_memory(device: torch.device) -> int:
    """Bytes that are free on the device; on a CPU and on MPS those that the system says can still be had."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
