"""What a fine-tuning would take: time and memory, from some real steps and a look at some test images."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import floor
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from mae import records
from mae.errors import UsageError
from mae.evaluation.common.beside import tasks_beside, used_images
from mae.evaluation.common.dense_finetuning import SCRATCH, DenseFinetuning
from mae.evaluation.common.share_of_labels import read_share
from mae.evaluation.common.supervised import PreparedTraining, Task
from mae.evaluation.common.task import DetectionTask, SegmentationTask
from mae.evaluation.protocol import THIS_MODEL
from mae.evaluation.protocols.finetune import Finetune
from mae.evaluation.run import Evaluator
from mae.pretraining.estimate.profile import (
    PeakMemory,
    StepCost,
    available_memory,
    cost_of,
    fitting_part_size,
    give_back,
)
from mae.training.device import autocast, explained_memory_failure, keep_freed_memory, synchronise

_USABLE = 0.9
"""Of the free memory: gaps between tensors and other programs take some too."""
_WARM_UP = 2
"""Steps that are not timed: the first makes the optimizer's averages, so only the second reaches the peak memory."""
_STEP_SECONDS = 5.0
_TEST_IMAGES = 8
"""That are evaluated to see how long one takes."""


@dataclass(frozen=True, kw_only=True)
class FinetuningPlan:
    """What a fine-tuning would take. Times leave out pictures, checkpoints and the check of the labels.

    Attributes:
        data: what was found.
        images: that are trained on.
        test_images: that are evaluated on.
        classes: of the labels.
        weights: that are trained, the model's own first.
        seeds: trainings of each.
        parameters: trained values of the model with its head.
        device: where it would run.
        steps: optimizer steps of a training.
        epochs: that these steps are.
        batch_size: images of a step.
        accumulate: micro-batches of a step, as many as are needed to fit in memory.
        largest_part: images that could be computed at once, by the memory there is.
        step_seconds: time of a step of the model's own weights, loading included.
        evaluations: of a training, the first before its first step.
        evaluation_seconds: time of each.
        training_seconds: time of a training of the model's own weights, evaluations included.
        seconds: time of everything: all weights, all seeds, and what is shown of each weight in the end.
        peak_bytes: memory that a step takes.
        available_bytes: memory that is free.
        advice: what is worth knowing or changing, a sentence each.
    """

    data: str
    images: int
    test_images: int
    classes: int
    weights: tuple[str, ...]
    seeds: int
    parameters: int
    device: str
    steps: int
    epochs: float
    batch_size: int
    accumulate: int
    largest_part: int
    step_seconds: float
    evaluations: int
    evaluation_seconds: float
    training_seconds: float
    seconds: float
    peak_bytes: int
    available_bytes: int
    advice: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, one key a field."""
        return records.to_json(self)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What training and evaluation of some weights cost.

    Attributes:
        steps: of two numbers of images where the batch allows it.
        test_image: seconds of evaluation for each.
    """

    steps: Sequence[StepCost]
    test_image: float

    def largest_part(self, usable: int) -> int:
        """Images that can be computed at once; 0 if not even the fewest that were tried."""
        if len(self.steps) > 1:
            return fitting_part_size(self.steps, usable)
        return self.steps[0].part_size if self.steps[0].peak_bytes <= usable else 0


def plan_finetuning(evaluator: Evaluator, protocol: Finetune | DenseFinetuning) -> FinetuningPlan:
    """Measure a few steps of every weight that is trained, and work out what all of it takes.

    Where the batch does not fit in memory it is divided into more micro-batches. Weights from scratch cost what the
    model's own do.

    Args:
        evaluator: of the model and the labels; in its folder the contents of images are noted.
        protocol: the fine-tuning.

    Raises:
        UsageError: a request that the fine-tuning itself would refuse, or not even the fewest images fit.
        MAEError: labels that cannot be read, or too little memory for the fewest images.
    """
    task: Any = evaluator.task_of(protocol)  # of the kind that the protocol is for
    begun = protocol.prepared(task)  # refuses what cannot be trained, before any time is spent on it
    tasks: dict[str, Any] = {THIS_MODEL: task}
    images, seeds = task.images("train").readable, 1
    if isinstance(protocol, DenseFinetuning):
        tasks, seeds = tasks_beside(task, protocol.beside), protocol.seeds
        images = used_images(task, read_share(protocol.labels_used))
    available = available_memory(evaluator.device)
    usable = floor(_USABLE * available)
    measured = {who: _measure(protocol, of, begun, usable) for who, of in tasks.items() if who != SCRATCH}
    if SCRATCH in tasks:
        measured[SCRATCH] = measured[THIS_MODEL]
    largest = min(of.largest_part(usable) for of in measured.values())
    accumulate = _fitting_accumulate(begun, largest, least=_probes(task)[0])
    part = begun.plan.batch_size // accumulate

    steps_per_epoch = begun.batches.steps_per_epoch
    steps = begun.plan.total_steps(steps_per_epoch)
    evaluations = 2 + (steps - 1) // begun.plan.evaluated_every(steps_per_epoch)
    test_images = len(task.images("test").readable)
    costs = {who: cost_of(of.steps, part) for who, of in measured.items()}
    evaluation = {who: test_images * of.test_image for who, of in measured.items()}
    training = {who: steps * accumulate * costs[who].seconds + evaluations * evaluation[who] for who in tasks}
    whole = sum(seeds * training[who] + evaluation[who] for who in tasks)
    return FinetuningPlan(
        data=task.data.note,
        images=len(images),
        test_images=test_images,
        classes=task.num_classes,
        weights=tuple(tasks),
        seeds=seeds,
        parameters=sum(p.numel() for p in begun.module.parameters() if p.requires_grad),
        device=str(evaluator.device),
        steps=steps,
        epochs=steps / steps_per_epoch,
        batch_size=begun.plan.batch_size,
        accumulate=accumulate,
        largest_part=largest,
        step_seconds=accumulate * costs[THIS_MODEL].seconds,
        evaluations=evaluations,
        evaluation_seconds=evaluation[THIS_MODEL],
        training_seconds=training[THIS_MODEL],
        seconds=whole,
        peak_bytes=max(cost.peak_bytes for cost in costs.values()),
        available_bytes=available,
        advice=tuple(_advice(begun, accumulate, seeds=seeds, beside=len(tasks) > 1)),
    )


def _probes(task: Task) -> tuple[int, int]:
    """The fewest images that are computed at once, and some more; a norm over a batch needs two."""
    return (2, 4) if isinstance(task, SegmentationTask) else (1, 2)


def _measure(protocol: Finetune | DenseFinetuning, task: Any, begun: PreparedTraining, usable: int) -> _Measured:
    """Of few images, then of a micro-batch or what of it fits in memory and does not take long."""
    if task.device.type == "cpu":
        keep_freed_memory()
    few, asked = task.with_few_test_images(_TEST_IMAGES), begun.plan.batch_size // begun.plan.accumulate
    sizes = sorted({min(size, asked) for size in _probes(task)})
    costs, test_image = [], 0.0
    with explained_memory_failure("take a smaller model, smaller images, or another machine"):
        for size in sizes:
            cost, test_image = _cost(protocol, few, size)
            costs.append(cost)
        if asked > sizes[-1]:
            size = min(asked, fitting_part_size(costs, usable))
            while size > sizes[-1] and cost_of(costs, size).seconds > _STEP_SECONDS:
                size //= 2
            if size > sizes[-1]:
                cost, test_image = _cost(protocol, few, size)
                costs.append(cost)
    return _Measured(steps=costs, test_image=test_image)


def _cost(protocol: Finetune | DenseFinetuning, task: Any, size: int) -> tuple[StepCost, float]:
    """What a step of so many images takes, and the seconds that each of the task's test images does."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), PeakMemory(task.device) as memory:
        training = replace(protocol, batch_size=size, accumulate=1).prepared(task)
        times = _times(training)
    began = perf_counter()
    training.evaluate()
    synchronise(task.device)
    test_image = (perf_counter() - began) / len(task.images("test").readable)
    del training
    give_back(task.device)
    return StepCost(part_size=size, seconds=fmean(times), peak_bytes=memory.peak_bytes), test_image


def _times(training: PreparedTraining) -> list[float]:
    """Seconds of some steps behind those of warm-up; of the last of these where they were slow."""
    device, module, optimizer = training.task.device, training.module, training.optimizer
    scaler = torch.amp.GradScaler(device.type, enabled=training.plan.precision == "fp16")
    times: list[float] = []
    with closing(training.batches.batches(0)) as batches:
        began = perf_counter()
        while len(times) < _WARM_UP or perf_counter() - began < _STEP_SECONDS:
            started = perf_counter()
            batch = next(batches)
            with autocast(training.plan.precision, device):
                loss = module(**batch).loss
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            synchronise(device)
            times.append(perf_counter() - started)
    return times[_WARM_UP:] or times[-1:]


def _fitting_accumulate(begun: PreparedTraining, largest: int, *, least: int) -> int:
    """The fewest equal micro-batches, no fewer than asked for, that each fit in memory.

    Raises:
        UsageError: none do.
    """
    batch = begun.plan.batch_size
    for accumulate in range(begun.plan.accumulate, batch + 1):
        part, left = divmod(batch, accumulate)
        if not left and min(least, batch) <= part <= largest:
            return accumulate
    remedy = "a smaller --size" if isinstance(begun.task, DetectionTask) else "a model of smaller images"
    raise UsageError(
        f"--batch-size {batch} cannot be divided into --accumulate {begun.plan.accumulate} or more equal parts that "
        f"fit in memory, where {largest} image(s) fit at once; take a smaller model or {remedy}"
    )


def _advice(begun: PreparedTraining, accumulate: int, *, seeds: int, beside: bool) -> list[str]:
    advice = []
    asked = begun.plan.accumulate
    if accumulate != asked:
        advice.append(f"--accumulate {accumulate}, for {asked} part(s) of the batch do not fit in memory")
    if begun.plan.epochs < 1:
        advice.append("not every training image is seen once; more steps or a larger batch would")
    if beside and seeds == 1:
        advice.append("--seeds 3 takes three times as long and tells whether a difference is more than chance")
    return advice
