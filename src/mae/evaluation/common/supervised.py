"""Training with labels, for the protocols that train on images: the one engine, whatever the labels are.

A training lives in a folder named after everything that decides it. The same request again therefore resumes it, and
one that was finished is not trained twice.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from mae.data.loading.loader import explained_worker_failure
from mae.errors import Stopped, UsageError
from mae.evaluation.common.task import DetectionTask, LabelledTask, SegmentationTask
from mae.evaluation.extractors.extractor import preprocessing_text
from mae.randomness import Stream, seeds
from mae.records import read_json, write_json
from mae.report.terminal.console import ProgressDisplay
from mae.text import visible
from mae.training.checkpoint import check_room, find_checkpoint, remove_leftovers, state_bytes, usable_checkpoint
from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.lock import only_writer
from mae.training.log import Callback, JsonLines, read_rows
from mae.training.optimizer import average_bytes
from mae.training.schedule import Warmup, WarmupCosine, WarmupLinear, WarmupSteps
from mae.training.settings import CheckpointSpec, PeriodicTask, TrainingSettings
from mae.training.trackers.tensorboard import TensorBoard

_SCHEDULES: Mapping[str, type[Warmup]] = {"cosine": WarmupCosine, "linear": WarmupLinear, "steps": WarmupSteps}


class TrainingBatches(ABC):
    """What a training is fed with, see `ClassifiedImages`."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int:
        """Optimizer steps over the training part."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """All that decides the batches beside the plan, the task and its seed, as JSON values."""

    @abstractmethod
    def batches(self, step: int) -> Generator[Mapping[str, Any], None, None]:
        """What the module's forward takes from a step on, a process's share of a micro-batch at a time."""


Task = LabelledTask | SegmentationTask | DetectionTask
"""What has images to train on and others to be evaluated on."""


@dataclass(frozen=True, kw_only=True)
class SupervisedPlan:
    """How a training with labels goes.

    Attributes:
        name: of the protocol.
        epochs: over the training part.
        batch_size: images of an optimizer step.
        accumulate: micro-batches per step.
        rate: peak learning rate.
        min_rate: the learning rate at the end of the schedule.
        warmup_epochs: epochs over which the learning rate rises from 0.
        precision: of the forward pass: `fp32`, `bf16` or `fp16`.
        identity: all else that decides the training, as JSON values.
        schedule: how the rate falls behind the warm-up: as a `cosine`, `linear`, or in `steps`.
        evaluations: how often the test part is evaluated during training; the last time gives the result.
    """

    name: str
    epochs: float
    batch_size: int
    accumulate: int
    rate: float
    min_rate: float
    warmup_epochs: float
    precision: str
    identity: Mapping[str, Any]
    schedule: Literal["cosine", "linear", "steps"] = "cosine"
    evaluations: int = 10

    def __post_init__(self) -> None:
        """Refuses a rate that would rise after its peak, or never reach it.

        Raises:
            UsageError: that.
        """
        if self.min_rate > self.rate:
            raise UsageError(f"min_lr is {self.min_rate:g}, above the peak rate of {self.rate:.3g}; give a lower one")
        if self.warmup_epochs >= self.epochs:
            raise UsageError(
                f"the warm-up (warmup_epochs) is {self.warmup_epochs:g} epochs, but the whole training has "
                f"{self.epochs:g}; give a shorter one"
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole training."""
        return max(1, round(self.epochs * steps_per_epoch))

    def evaluated_every(self, steps_per_epoch: int) -> int:
        """Steps between evaluations, of which the first comes before any step and another after the last."""
        return max(steps_per_epoch, self.total_steps(steps_per_epoch) // self.evaluations, 1)


@dataclass(frozen=True, kw_only=True)
class SupervisedTraining:
    """A finished training.

    Attributes:
        folder: holds its checkpoints and numbers.
        seconds: it took, over all resumptions.
        curve: the numbers of each evaluation, with the `epoch` after which it was made.
    """

    folder: Path
    seconds: float
    curve: tuple[dict[str, float], ...]


def train_with_labels(
    task: Task,
    plan: SupervisedPlan,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    batches: TrainingBatches,
    evaluate: Callable[[], Mapping[str, float]],
) -> SupervisedTraining:
    """Train a module to the end, or resume a training that was stopped.

    Every process of the task's world calls this, with modules of the same weights.

    Args:
        task: whose images are trained on.
        plan: how.
        module: on the task's device, in the mode it trains in; its output has `.loss` and `.terms`.
        optimizer: over its parameters.
        batches: what it is fed with.
        evaluate: the numbers of the test part, in [0, 1]; every process is asked at the same steps.

    Returns:
        What `evaluate` returned on the way, and where the training is.

    Raises:
        Stopped: a signal stopped it; everything is saved.
        MAEError: it failed on the way, or every checkpoint it could resume from is damaged.
    """
    with ExitStack() as held:
        total_steps = plan.total_steps(batches.steps_per_epoch)
        folder = Path(task.world.from_main(lambda: str(_folder(task, plan, batches, held, total_steps))))
        trainer = _trainer(folder, task, plan, module, optimizer, batches, total_steps)
        _resume(trainer, folder, task)
        every = plan.evaluated_every(batches.steps_per_epoch)
        periodic = PeriodicTask(every=every, run=lambda step: evaluate(), everywhere=True)
        if trainer.step < total_steps:
            task.world.from_main(lambda: _check_room(folder / "checkpoints", module))
            if not _train(task, folder, trainer, periodic):
                text = f"stopped and saved in {folder}; resumes when you rerun the same command"
                raise Stopped(text, by=trainer.stopped_by)
        rows = task.world.from_main(lambda: read_rows(folder / "metrics.jsonl"))
    evaluated = [row for row in rows if "evaluation" in row]
    curve = tuple({"epoch": row["step"] / batches.steps_per_epoch, **row["evaluation"]} for row in evaluated)
    return SupervisedTraining(folder=folder, seconds=trainer.seconds, curve=curve)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedTraining:
    """A training before its first step: what `train_with_labels` takes. Nothing is written yet."""

    task: Task
    plan: SupervisedPlan
    module: nn.Module
    optimizer: Optimizer
    batches: TrainingBatches
    evaluate: Callable[[], Mapping[str, float]]

    def train(self) -> SupervisedTraining:
        """See `train_with_labels`."""
        return train_with_labels(
            self.task, self.plan, self.module, self.optimizer, batches=self.batches, evaluate=self.evaluate
        )


def _trainer(
    folder: Path,
    task: Task,
    plan: SupervisedPlan,
    module: nn.Module,
    optimizer: Optimizer,
    batches: TrainingBatches,
    total_steps: int,
) -> Trainer:
    return Trainer(
        module=module,
        optimizer=optimizer,
        batches=batches.batches,
        settings=_settings(plan, total_steps, batches.steps_per_epoch),
        checkpoints=CheckpointSpec(
            folder=folder / "checkpoints", identity={"total_steps": total_steps}, metadata=lambda module: {}
        ),
        device=task.device,
        world=task.world,
    )


def _check_room(folder: Path, module: nn.Module) -> None:
    """Refuse to train where nothing could be saved: two checkpoints fit at first, then one beside the newest."""
    num_bytes = state_bytes(module) + average_bytes(module)
    check_room(folder, count=1 if find_checkpoint(folder) else 2, num_bytes=num_bytes)


def _resume(trainer: Trainer, folder: Path, task: Task) -> None:
    """Load the newest usable checkpoint, if there is one."""
    newest, note = task.world.from_main(lambda: [str(each or "") for each in usable_checkpoint(folder / "checkpoints")])
    if note:
        task.console.print(visible(note), style="yellow", highlight=False, soft_wrap=True, markup=False)
    if newest:
        trainer.resume(Path(newest))


def _folder(task: Task, plan: SupervisedPlan, batches: TrainingBatches, held: ExitStack, total_steps: int) -> Path:
    """The folder of this very training, described in `training.json`; locked until `held` is closed."""
    decided = {
        **vars(plan),
        **batches.identity,
        # A function whose weights are unknown cannot be resumed.
        "model": task.extractor.identity or uuid4().hex,
        "preprocessing": preprocessing_text(task.extractor.preprocessing),
        "seed": task.seed,
        "total_steps": total_steps,
        **(facts := task.facts()),  # of the test part too: its numbers on the way are the training's result
    }
    text = json.dumps(decided, sort_keys=True)
    folder = task.folder / "evaluation" / plan.name / hashlib.sha256(text.encode()).hexdigest()[:8]
    if not folder.exists() and (told := _told_of_others(folder.parent, json.loads(text), facts)):
        task.console.print(visible(told), style="yellow", highlight=False, soft_wrap=True, markup=False)
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_writer(folder))
    write_json(folder / "training.json", decided)
    remove_leftovers(folder / "checkpoints")
    return folder


def _told_of_others(parent: Path, decided: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Why a training begins anew beside one of the same data set and options; empty: there is none."""
    for path in sorted(parent.glob("*/training.json")):
        with suppress(UsageError):  # what is damaged there is nothing to this training
            other = read_json(path)
            differing = {name for name in decided.keys() | other.keys() if decided.get(name) != other.get(name)}
            if differing <= facts.keys() - {"train", "train_version", "classes"}:
                return f"{path.parent} holds this training with other test images, or moved ones: begun anew"
            if differing <= {"train_version", "test_version"}:
                return (
                    f"{path.parent} holds this training on as many images that moved or changed, or whose labels did: "
                    "begun anew"
                )
    return ""


def _settings(plan: SupervisedPlan, total_steps: int, steps_per_epoch: int) -> TrainingSettings:
    return TrainingSettings(
        total_steps=total_steps,
        batch_size=plan.batch_size,
        accumulate=plan.accumulate,
        schedule=_SCHEDULES[plan.schedule](
            peak=plan.rate,
            floor=plan.min_rate,
            warmup_samples=plan.warmup_epochs * steps_per_epoch * plan.batch_size,
            total_samples=total_steps * plan.batch_size,
        ),
        clip_grad=None,
        precision=plan.precision,
        log_every=max(1, min(50, total_steps // 100)),
        checkpoint_every=None,
        calmer="Lower the learning rate, or compute in --precision fp32",
    )


def _train(task: Task, folder: Path, trainer: Trainer, periodic: PeriodicTask) -> bool:
    if not task.world.is_main:
        with explained_worker_failure():
            return trainer.run(tasks=[periodic])
    start = {"start_step": trainer.step}
    with ExitStack() as stack:
        observers: list[Callback] = [
            JsonLines(folder / "metrics.jsonl", **start),
            TensorBoard(folder / "tensorboard", start_samples=trainer.samples),
            ProgressDisplay(task.console, total_steps=trainer.settings.total_steps, mean_baseline=None, **start),
        ]
        for observer in observers:
            stack.callback(observer.close)
        with explained_worker_failure():
            return trainer.run(observers=observers, tasks=[periodic])


def seeded_forward(keys: Int64[Tensor, " B"], world: World) -> Int64[Tensor, " 1"]:
    """Let what the forward draws, as dropped paths, be a function of the batch: a resumed run draws the same.

    Args:
        keys: of this process's samples; every process must call this.
        world: the processes that train together.

    Returns:
        The key of the micro-batch's first sample.
    """
    first_key = keys[:1].clone()
    world.broadcast(first_key)
    torch.manual_seed(seeds(first_key, Stream.FORWARD)[0])
    return first_key


def largest_batch(given: int | None, usual: int, *, images: int, steps_per_epoch: int) -> int:
    """The given batch size, or the usual one, halved until an epoch has at least so many steps.

    Raises:
        UsageError: it is larger than the number of images.
    """
    if given is not None:
        if not 0 < given <= images:
            raise UsageError(f"--batch-size is {given}; expected 1 to {images:,}, the number of training images")
        return given
    while usual > 1 and images // usual < steps_per_epoch:
        usual //= 2
    return usual
