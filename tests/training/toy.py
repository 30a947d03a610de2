"""A module, batches and settings small enough to train in a blink; the engine needs no more than this."""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mae.training.distributed import World
from mae.training.engine import Trainer, TrainingSettings
from mae.training.lars import LARS
from mae.training.optimizer import make_optimizer
from mae.training.schedule import WarmupCosine

SETTINGS = TrainingSettings(
    total_steps=12,
    batch_size=8,
    accumulate=1,
    schedule=WarmupCosine(peak=0.05, floor=0.0, warmup_samples=16, total_samples=96),
    clip_grad=1.0,
    precision="fp32",
    log_every=1,
    save_every=4,
)


@dataclass
class Output:
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


def batches(
    step: int, *, accumulate: int = 1, broken_at: Collection[int] = ()
) -> Generator[dict[str, Tensor], None, None]:
    """The parts of each step's eight samples: functions of the step alone."""
    while True:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 4, generator=generator)
        y = x.sum(dim=1, keepdim=True) + 1
        if step in broken_at:
            y[0] = torch.nan
        for part in range(accumulate):
            yield {"x": x.chunk(accumulate)[part], "y": y.chunk(accumulate)[part]}
        step += 1


class Recorder:
    """Keeps every row it is told."""

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
    **changes: Any,
) -> Trainer:
    """A trainer of a freshly seeded module, a line where none is given."""
    settings = replace(SETTINGS, **changes)
    torch.manual_seed(0)
    made = module()
    return Trainer(
        module=made,
        optimizer=optimizer(made),
        batches=lambda step: batches(step, accumulate=settings.accumulate, broken_at=broken_at),
        settings=settings,
        folder=folder,
        identity={"name": identity},
        metadata=lambda module: {"kind": "line"},
        device=torch.device("cpu"),
        world=World(),
        capture=capture,
    )
