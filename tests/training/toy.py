"""A module, batches and settings that train in a blink."""

from collections.abc import Callable, Collection, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mae.training.distributed import World
from mae.training.engine import Trainer
from mae.training.lars import LARS
from mae.training.optimizer import make_optimizer
from mae.training.schedule import WarmupCosine
from mae.training.settings import CheckpointSpec, PeriodicTask, TrainingSettings

SETTINGS = TrainingSettings(
    total_steps=12,
    batch_size=8,
    accumulate=1,
    schedule=WarmupCosine(peak=0.05, floor=0.0, warmup_samples=16, total_samples=96),
    clip_grad=1.0,
    precision="fp32",
    log_every=1,
    checkpoint_every=4,
)


class Output(NamedTuple):
    """A tuple, as FSDP of torch 2.11 finds no tensors in a dataclass; models have blocks, which it finds by theirs."""

    loss: Tensor
    terms: dict[str, Tensor]


class Line(nn.Module):
    """Fits `y = x w + b`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        loss = (self.linear(x) - y).square().mean()
        return Output(loss=loss, terms={"square": loss})


class Follower(nn.Module):
    """A teacher: the mean of the line's weights, and what `tell` is told of each step.

    Its weights start apart from the line's, so that a restored one cannot be mistaken for a fresh one.
    """

    def __init__(self, tell: Callable[[nn.Module, float], None] = lambda module, progress: None) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1, 4), requires_grad=False)
        self.tell = tell

    def after_step(self, student: nn.Module, progress: float) -> None:
        weight: Any = student.get_parameter("linear.weight")
        self.mean.lerp_(weight.detach(), 0.25)
        self.tell(student, progress)


def batches(
    step: int, *, accumulate: int = 1, broken_at: Collection[int] = ()
) -> Generator[dict[str, Tensor], None, None]:
    """The micro-batches of each step's eight samples: functions of the step alone."""
    while True:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)
        y = x.sum(dim=1, keepdim=True) + 1
        if step in broken_at:
            y[0] = torch.nan
        for number in range(accumulate):
            yield {"x": x.chunk(accumulate)[number], "y": y.chunk(accumulate)[number]}
        step += 1


class Recorder:
    """Keeps every row of the log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, row: Any) -> None:
        self.rows.append(dict(row))

    def close(self) -> None:
        pass


def adamw(module: nn.Module) -> Optimizer:
    return make_optimizer(module, weight_decay=0.1, betas=(0.9, 0.95))


def lars(module: nn.Module) -> Optimizer:
    return LARS(module.named_parameters(), weight_decay=0.1, trust=0.1)


def make_trainer(
    folder: Path,
    *,
    broken_at: Collection[int] = (),
    identity: str = "toy",
    module: Callable[[], nn.Module] = Line,
    optimizer: Callable[[nn.Module], Optimizer] = adamw,
    capture: Callable[[int], Path] | None = None,
    teacher: nn.Module | None = None,
    **changes: Any,
) -> Trainer:
    """A trainer of a freshly seeded module, by default a line."""
    settings = replace(SETTINGS, **changes)
    torch.manual_seed(0)
    made = module()
    made.__dict__["teacher"] = teacher
    return Trainer(
        module=made,
        optimizer=optimizer(made),
        batches=lambda step: batches(step, accumulate=settings.accumulate, broken_at=broken_at),
        settings=settings,
        checkpoints=CheckpointSpec(
            folder=folder, identity={"name": identity}, metadata=lambda module: {"kind": "line"}
        ),
        device=torch.device("cpu"),
        world=World(),
        capture=capture,
    )


def weights_after_each_step(trainer: Trainer, recorder: Recorder) -> list[list[float]]:
    seen: list[list[float]] = []

    def keep(step: int) -> None:
        seen.append(torch.cat([p.detach().flatten() for p in trainer.module.parameters()]).tolist())

    trainer.run(observers=[recorder], tasks=[PeriodicTask(every=1, run=keep)])
    return seen
