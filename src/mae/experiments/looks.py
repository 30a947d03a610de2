"""How good a run was on its way: checkpoints it kept are judged beside the time and arithmetic they had cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import fmean
from typing import Any

from mae.config import PretrainConfig
from mae.errors import MAEError
from mae.models.config import ModelConfig
from mae.models.summary import summarise
from mae.pretraining.run import load
from mae.pretraining.settle import ratio_schedule, steps_per_epoch
from mae.training.checkpoint import good_checkpoints
from mae.training.log import loss_rows, read_rows
from mae.training.muon import Muon
from mae.training.optimizer import make_optimizer
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts

_RATIOS = 200
"""Steps whose mask ratio is asked for, spread evenly over those before a look."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run as it stood after some steps.

    Attributes:
        step: optimizer steps done.
        samples: images seen.
        seconds: that the steps took, pictures and checkpoints left out.
        operations: floating-point operations of matrix products in them; a multiply-add counts as 2.
        numbers: what was measured, by metric.
    """

    step: int
    samples: int
    seconds: float
    operations: float
    numbers: Mapping[str, float]


def steps_between(total_steps: int, looks: int) -> int:
    """Steps between checkpoints that are kept for so many looks, the last at the end of the run."""
    return ceil(total_steps / looks)


def look_through(
    folder: RunFolder,
    *,
    every: int,
    done: Sequence[Mapping[str, Any]],
    judge: Callable[[str], Mapping[str, float]],
    keep: Callable[[list[dict[str, Any]]], None],
) -> list[dict[str, Any]]:
    """Judge each checkpoint that was kept, and the last one.

    Args:
        folder: of the finished run.
        every: steps between two looks.
        done: looks that were taken before this process began; they are not taken again.
        judge: from a checkpoint's folder to what is measured of it.
        keep: is given all looks after each new one.

    Raises:
        MAEError: a checkpoint that was kept is not there any more.
    """
    found = good_checkpoints(folder.checkpoints)
    last = max(found, default=0)
    steps = [*range(every, last, every), last]
    looks = list(map(dict, done))
    left = steps[len(looks) :]
    costs = costs_until(folder, left) if left else {}
    for step in left:
        if step not in found:
            raise MAEError(f"{folder.checkpoints} lacks step {step}, which was kept; delete the run to do it again")
        look = Look(step=step, numbers=judge(str(found[step])), **costs[step])
        looks.append(asdict(look))
        keep(looks)
    return looks


def costs_until(folder: RunFolder, steps: Sequence[int]) -> dict[int, dict[str, Any]]:
    """By number of steps the images, seconds and operations of a run's first so many, as in `Look`."""
    config, model = PretrainConfig.read(folder.config), load(folder.root)
    assert config.batch_size is not None and model.config is not None
    optimizer = make_optimizer(model, weight_decay=config.weight_decay, betas=config.betas, kind=config.optimizer)
    its_own = optimizer.step_flops if isinstance(optimizer, Muon) else 0
    rows = loss_rows(read_rows(folder.metrics))
    an_epoch = steps_per_epoch(config, read_image_facts(folder.data, needed=("images",))["images"])
    schedule, costs = ratio_schedule(config), {}
    for step in steps:
        asked = min(_RATIOS, step)
        ratios = [schedule.ratio(number * step // asked, steps_per_epoch=an_epoch) for number in range(asked)]
        samples = step * config.batch_size
        operations = samples * _mean_operations(model.config, ratios) + step * its_own
        costs[step] = {"samples": samples, "seconds": _seconds(rows, step), "operations": operations}
    return costs


def _seconds(rows: Sequence[Mapping[str, Any]], step: int) -> float:
    """That the first steps took, by the rates which the log has of them."""
    seconds, seen = 0.0, 0
    for row in rows:
        if row["step"] <= step:
            seconds, seen = seconds + (row["samples"] - seen) / row["images_per_second"], row["samples"]
    return seconds


def _mean_operations(model: ModelConfig, ratios: Sequence[float]) -> float:
    """Of a training step, an image."""
    by_ratio = {ratio: summarise(replace(model, mask_ratio=ratio)).step_flops for ratio in set(ratios)}
    return fmean(by_ratio[ratio] for ratio in ratios)
