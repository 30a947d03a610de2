"""How good a run was on its way: its checkpoints evaluated, with the time and arithmetic that each had cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from statistics import fmean
from typing import Any

from mae.config import RunConfig
from mae.core.method import MethodConfig
from mae.errors import MAEError
from mae.experiments.core.results import CheckpointMetrics
from mae.models.summary import summarise
from mae.pretraining.derived import ratio_schedule, steps_per_epoch
from mae.pretraining.run import load
from mae.training.checkpoint import good_checkpoints
from mae.training.log import loss_rows, read_rows
from mae.training.muon import Muon
from mae.training.optimizer import make_optimizer
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts

_MAX_RATIOS = 200
"""Steps whose mask ratio is averaged, evenly spaced over those before a checkpoint."""


def checkpoint_interval(total_steps: int, checkpoints: int) -> int:
    """Steps between so many evenly spaced checkpoints, the last at the end of the run."""
    return ceil(total_steps / checkpoints)


def evaluate_checkpoints(
    folder: RunFolder,
    *,
    every: int,
    done: Sequence[Mapping[str, Any]],
    evaluate: Callable[[str], Mapping[str, float]],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Evaluate each checkpoint that was kept, and the last one.

    Args:
        folder: of the finished run.
        every: steps between two checkpoints.
        done: metrics of the first checkpoints, as JSON; these are not evaluated again.
        evaluate: from a checkpoint's folder to its numbers.
        keep: called with the metrics of all checkpoints after each new one.

    Raises:
        MAEError: a checkpoint is missing.
    """
    found = good_checkpoints(folder.checkpoints)
    last = max(found, default=0)
    steps = [*range(every, last, every), last]
    evaluated = list(map(dict, done))
    left = steps[len(evaluated) :]
    costs = costs_up_to(folder, left) if left else {}
    for step in left:
        if step not in found:
            raise MAEError(f"{folder.checkpoints} lacks the checkpoint of step {step}; delete the run to repeat it")
        metrics = CheckpointMetrics(step=step, numbers=evaluate(str(found[step])), **costs[step])
        evaluated.append(asdict(metrics))
        keep(evaluated)
    return evaluated


def costs_up_to(folder: RunFolder, steps: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By step the images, seconds and operations of a run up to that step, as in `CheckpointMetrics`."""
    config, model = RunConfig.read(folder.config), load(folder.root)
    assert config.optim.batch_size is not None and model.config is not None
    optimizer = make_optimizer(
        model, weight_decay=config.optim.weight_decay, betas=config.optim.betas, kind=config.optim.optimizer
    )
    of_optimizer = optimizer.step_flops if isinstance(optimizer, Muon) else 0
    rows = loss_rows(read_rows(folder.metrics))
    an_epoch = steps_per_epoch(config, read_image_facts(folder.data, needed=("images",))["images"])
    schedule, costs = ratio_schedule(config), {}
    for step in steps:
        count = min(_MAX_RATIOS, step)
        ratios = [schedule.ratio(number * step // count, steps_per_epoch=an_epoch) for number in range(count)]
        samples = step * config.optim.batch_size
        operations = samples * _mean_operations(model.config, ratios) + step * of_optimizer
        costs[step] = {"samples": samples, "seconds": _seconds(rows, step), "operations": operations}
    return costs


def _seconds(rows: Sequence[Mapping[str, Any]], step: int) -> float:
    """Duration of the first steps, from the rates in the log."""
    seconds, seen = 0.0, 0
    for row in rows:
        if row["step"] <= step:
            seconds, seen = seconds + (row["samples"] - seen) / row["images_per_second"], row["samples"]
    return seconds


def _mean_operations(model: MethodConfig, ratios: Sequence[float]) -> float:
    """Floating-point operations of a training step, per image."""
    by_ratio = {ratio: summarise(model.override({"mask_ratio": ratio})).step_flops for ratio in set(ratios)}
    return fmean(by_ratio[ratio] for ratio in ratios)
