"""What the engine is asked to do: how to train, what to save, and what to do between steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from mae.training.schedule import Warmup


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """How to train.

    Attributes:
        total_steps: optimizer steps of the whole run.
        batch_size: samples of a step, over all processes.
        accumulate: micro-batches of a step.
        schedule: the learning rate after so many samples.
        clip_grad: largest norm of the gradient; None: no clipping.
        precision: `fp32`, `bf16` or `fp16`.
        log_every: steps between rows of the log; the first step has one too.
        checkpoint_every: steps between checkpoints; None: one every ten minutes.
        checkpoint_keep_every: steps between checkpoints that are kept for good; each of these steps is saved, whatever
            `checkpoint_every` says. None: only the two newest checkpoints are kept.
        cuda_graphs: whether steps of AdamW or Muon in one process on a GPU, without micro-batches, may be replayed as
            CUDA graphs where that is faster.
        calmer: what a user can do where values are not finite, as a sentence without its end.
    """

    total_steps: int
    batch_size: int
    accumulate: int
    schedule: Warmup
    clip_grad: float | None
    precision: str
    log_every: int
    checkpoint_every: int | None
    checkpoint_keep_every: int | None = None
    cuda_graphs: bool = False
    calmer: str = "Lower the learning rate"


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Where checkpoints go and what is written into them beside the training's own state.

    Attributes:
        folder: of the checkpoints.
        identity: JSON values that identify the run; a checkpoint with others is refused.
        metadata: makes the text for the header of a weights' file from a module with the weights in it, on the CPU;
            called in another thread.
    """

    folder: Path
    identity: Mapping[str, Any]
    metadata: Callable[[nn.Module], dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class PeriodicTask:
    """Something done before the first step, every so many steps, and after the last, such as drawing pictures.

    Attributes:
        every: steps between two calls.
        run: called with the number of steps done; the numbers it returns, by name, are logged as a row.
        everywhere: whether all processes run it together, or the main one while the others wait.
        finish: waits for what `run` left to be done beside the training; called after the last step, and where a run
            stops or fails.
        about: what its numbers are of, as text by name; the engine does not read it.
    """

    every: int
    run: Callable[[int], Mapping[str, float] | None]
    everywhere: bool = False
    finish: Callable[[], None] = lambda: None
    about: Mapping[str, str] = field(default_factory=dict)
