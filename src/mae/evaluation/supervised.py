"""Training with labels, for the protocols that train on images: the one engine, fed with labelled batches.

A training lives in a folder named after everything that decides it. The same request again therefore goes on where
the first one was stopped, and one that was finished is not trained twice.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from jaxtyping import Float32, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from mae.data.augmentation import Augmentation
from mae.data.loaders import TrainingLoader, default_workers, explained_worker_failure, normalise
from mae.errors import Stopped, UsageError
from mae.evaluation.bench import Bench
from mae.evaluation.extractors import preprocessing_text
from mae.layers.drop_path import DropPath
from mae.randomness import Stream, seeds
from mae.records import write_json
from mae.report.canvas import visible
from mae.report.console import ProgressDisplay
from mae.training.checkpoint import remove_leftovers, usable_checkpoint
from mae.training.engine import PeriodicTask, Trainer, TrainingSettings
from mae.training.lock import only_writer
from mae.training.log import JsonLines, Observer, TensorBoard, read_rows
from mae.training.schedule import WarmupCosine

_LOOKS = 10
"""How often the test part is looked at; the last look is the result."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledBatch:
    """A process's part of a micro-batch.

    Attributes:
        images: normalised, on the bench's device.
        labels: their classes, there too.
        keys: of each sample.
        first_key: of the micro-batch's first sample, for what is drawn once for all of it.
    """

    images: Float32[Tensor, "B C H W"]
    labels: Int64[Tensor, " B"]
    keys: Int64[Tensor, " B"]
    first_key: Int64[Tensor, " 1"]


Prepare = Callable[[LabelledBatch], Mapping[str, Any]]
"""Makes what the module's forward takes."""


@dataclass(frozen=True, kw_only=True)
class SupervisedPlan:
    """How a training with labels goes.

    Attributes:
        name: of the protocol.
        epochs: passes over the training part.
        batch_size: images of an optimizer step.
        accumulate: parts a step is computed in.
        rate: highest learning rate.
        min_rate: the rate at the end of the cosine.
        warmup_epochs: passes over which the rate rises from 0.
        augmentation: how training images are cropped and changed.
        precision: in which forwards run: `fp32`, `bf16` or `fp16`.
        identity: all else that decides the training, as JSON values.
    """

    name: str
    epochs: float
    batch_size: int
    accumulate: int
    rate: float
    min_rate: float
    warmup_epochs: float
    augmentation: Augmentation
    precision: str
    identity: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SupervisedTraining:
    """A training that came to its end.

    Attributes:
        folder: holds its checkpoints and numbers.
        seconds: it took, all its parts together.
        curve: the numbers of each look, with the `epoch` after which it was taken.
    """

    folder: Path
    seconds: float
    curve: tuple[dict[str, float], ...]


def train_with_labels(
    bench: Bench,
    plan: SupervisedPlan,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    prepare: Prepare,
    look: Callable[[], Mapping[str, float]],
) -> SupervisedTraining:
    """Train a module to the end, or go on with a training that was stopped.

    Every process of the bench's world calls this, with modules of the same weights.

    Args:
        bench: the training images and their classes.
        plan: how.
        module: on the bench's device, in the mode it trains in.
        optimizer: over its parameters.
        prepare: makes the module's input; what it draws at random from PyTorch's generators depends on the batch alone.
        look: the numbers of the test part, in [0, 1]; every process is asked at the same steps.

    Returns:
        What `look` said on the way, and where the training is.

    Raises:
        Stopped: a signal stopped it; everything is saved.
        MAEError: it failed on the way, or every checkpoint it could go on from is damaged.
    """
    with ExitStack() as held:
        folder = Path(bench.world.from_main(lambda: str(_folder(bench, plan, held))))
        return _train_in(folder, bench, plan, module, optimizer, prepare=prepare, look=look)


def _train_in(
    folder: Path,
    bench: Bench,
    plan: SupervisedPlan,
    module: nn.Module,
    optimizer: Optimizer,
    *,
    prepare: Prepare,
    look: Callable[[], Mapping[str, float]],
) -> SupervisedTraining:
    """`train_with_labels` in a folder of its own, in which nobody else writes."""
    world = bench.world
    for layer in module.modules():
        if isinstance(layer, DropPath):
            layer.rank, layer.world = world.rank, world.size
    loader = _loader(bench, plan)
    steps_per_epoch = len(bench.images("train").readable) // plan.batch_size
    total_steps = max(1, round(plan.epochs * steps_per_epoch))
    trainer = Trainer(
        module=module,
        optimizer=optimizer,
        batches=lambda step: _batches(bench, loader, prepare, step),
        settings=_settings(plan, bench, total_steps, steps_per_epoch),
        folder=folder / "checkpoints",
        identity={"total_steps": total_steps},
        metadata=lambda module: {},
        device=bench.device,
        world=world,
    )
    newest, note = world.from_main(lambda: [str(found or "") for found in usable_checkpoint(folder / "checkpoints")])
    if note:
        bench.console.print(visible(note), style="yellow", highlight=False, soft_wrap=True, markup=False)
    if newest:
        trainer.resume(Path(newest))
    task = PeriodicTask(every=max(steps_per_epoch, total_steps // _LOOKS, 1), run=lambda step: look(), everywhere=True)
    if trainer.step < total_steps and not _train(bench, folder, trainer, task):
        text = f"stopped and saved in {folder}; the same command goes on from there"
        raise Stopped(text, by=trainer.stopped_by)
    rows = world.from_main(lambda: read_rows(folder / "metrics.jsonl"))
    looks = [row for row in rows if "evaluation" in row]
    curve = tuple({"epoch": row["step"] / steps_per_epoch, **row["evaluation"]} for row in looks)
    return SupervisedTraining(folder=folder, seconds=trainer.seconds, curve=curve)


def _folder(bench: Bench, plan: SupervisedPlan, held: ExitStack) -> Path:
    """The folder of this very training, with what it is in `training.json`; nobody else's until `held` is closed."""
    decided = {
        **{name: value for name, value in vars(plan).items() if name != "augmentation"},
        "augmentation": vars(plan.augmentation),
        # Of a function that does not tell its weights nothing can be gone on with.
        "model": bench.extractor.identity or uuid4().hex,
        "preprocessing": preprocessing_text(bench.extractor.preprocessing),
        "seed": bench.seed,
        **bench.facts(),
    }
    text = json.dumps(decided, sort_keys=True)
    folder = bench.folder / "evaluation" / plan.name / hashlib.sha256(text.encode()).hexdigest()[:8]
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(only_writer(folder))
    write_json(folder / "training.json", decided)
    remove_leftovers(folder / "checkpoints")
    return folder


def _loader(bench: Bench, plan: SupervisedPlan) -> TrainingLoader:
    images = bench.images("train")
    return TrainingLoader(
        images=images,
        batch_size=plan.batch_size,
        accumulate=plan.accumulate,
        img_size=bench.extractor.preprocessing.img_size,
        seed=bench.seed,
        workers=default_workers(bench.device.type, images.in_memory, processes=bench.world.local_size),
        pin_memory=bench.device.type == "cuda",
        augmentation=plan.augmentation,
        numbers=images.readable,
        rank=bench.world.rank,
        world=bench.world.size,
    )


def _settings(plan: SupervisedPlan, bench: Bench, total_steps: int, steps_per_epoch: int) -> TrainingSettings:
    return TrainingSettings(
        total_steps=total_steps,
        batch_size=plan.batch_size,
        accumulate=plan.accumulate,
        schedule=WarmupCosine(
            peak=plan.rate,
            floor=plan.min_rate,
            warmup_samples=plan.warmup_epochs * steps_per_epoch * plan.batch_size,
            total_samples=total_steps * plan.batch_size,
        ),
        clip_grad=None,
        precision=plan.precision,
        log_every=max(1, min(50, total_steps // 100)),
        save_every=None,
    )


def _batches(
    bench: Bench, loader: TrainingLoader, prepare: Prepare, step: int
) -> Generator[Mapping[str, Any], None, None]:
    preprocessing, class_of = bench.extractor.preprocessing, bench.class_of("train")
    mean, std = (torch.tensor(values, device=bench.device) for values in (preprocessing.mean, preprocessing.std))
    with closing(loader.iterate(step)) as batches:
        for raw in batches:
            images = normalise(raw.images.to(bench.device, non_blocking=True), mean, std)
            labels = class_of[raw.shown].to(bench.device, non_blocking=True)
            first_key = raw.keys[:1].clone()
            bench.world.broadcast(first_key)
            # What the forward draws, as dropped paths, is a function of the batch: a resumed run draws the same.
            torch.manual_seed(seeds(first_key, Stream.FORWARD)[0])
            yield prepare(LabelledBatch(images=images, labels=labels, keys=raw.keys, first_key=first_key))


def _train(bench: Bench, folder: Path, trainer: Trainer, task: PeriodicTask) -> bool:
    if not bench.world.is_main:
        with explained_worker_failure():
            return trainer.run(tasks=[task])
    start = {"start_step": trainer.step}
    with ExitStack() as stack:
        observers: list[Observer] = [
            JsonLines(folder / "metrics.jsonl", **start),
            TensorBoard(folder / "tensorboard", start_samples=trainer.samples),
            ProgressDisplay(bench.console, total_steps=trainer.settings.total_steps, mean_baseline=None, **start),
        ]
        for observer in observers:
            stack.callback(observer.close)
        with explained_worker_failure():
            return trainer.run(observers=observers, tasks=[task])


def largest_batch(asked: int | None, usual: int, *, images: int, steps_an_epoch: int) -> int:
    """The batch that was asked for, or the usual one, halved until an epoch has so many steps.

    Raises:
        UsageError: more was asked for than there are images.
    """
    if asked is not None:
        if not 0 < asked <= images:
            raise UsageError(f"--batch-size is {asked}; expected 1 to {images:,}, the number of training images")
        return asked
    while usual > 1 and images // usual < steps_an_epoch:
        usual //= 2
    return usual
