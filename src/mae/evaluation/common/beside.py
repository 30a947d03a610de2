"""One training of several weights, over several seeds: which weights, which images, and what came out."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from jaxtyping import Int64
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.common.dense_finetuning import SCRATCH, not_ours
from mae.evaluation.common.over_seeds import over_seeds, paired_difference
from mae.evaluation.common.task import DetectionTask, SegmentationTask, of_whole_images
from mae.evaluation.extractors.open import open_extractor
from mae.evaluation.protocol import THIS_MODEL
from mae.randomness import permutation
from mae.text import visible

_Task = TypeVar("_Task", SegmentationTask, DetectionTask)


def used_images(task: SegmentationTask | DetectionTask, share: float) -> Int64[Tensor, " n"]:
    """Numbers of so large a share of the training images; those of a smaller share are among those of a larger one."""
    readable = task.images("train").readable
    count = max(1, round(share * len(readable)))
    return readable[permutation(task.seed, 0, len(readable))[:count].sort().values]


def tasks_beside(task: _Task, others: Sequence[str]) -> dict[str, _Task]:
    """The task of the evaluated model and of each of the other weights, by name.

    Raises:
        UsageError: weights that the encoder of this package cannot hold.
    """
    found = {THIS_MODEL: task}
    for name in others:
        if name == SCRATCH:
            found[name] = task
            continue
        with task.world.main_first():
            other = open_extractor(name, device=task.device)
        if other.model is None or other.model.config is None:
            raise UsageError(not_ours(name))
        found[name] = task.with_model(of_whole_images(other))
    return found


def each_seed(task: _Task, others: Sequence[str], seeds: int) -> Iterator[tuple[str, _Task]]:
    """The task of each weight with each seed, by the weight's name, which is told when its turn comes.

    Raises:
        UsageError: see `tasks_beside`; before the first is given.
    """
    for who, of in tasks_beside(task, others).items():
        for seed in range(task.seed, task.seed + seeds):
            task.console.print(visible(f"{who}, seed {seed}"), highlight=False, markup=False, soft_wrap=True)
            yield who, of.with_model(of.extractor, seed=seed)


def seed_numbers(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Means over seeds, and by how much the evaluated model lies above each other one, as JSON values."""
    numbers = {who: asdict(over_seeds(values)) for who, values in scores.items()}
    for who, values in scores.items():
        if who != THIS_MODEL:
            numbers[who]["this_model_over_it"] = asdict(paired_difference(scores[THIS_MODEL], values))
    return numbers


def seed_rows(scores: Mapping[str, Sequence[float]], *, columns: int) -> list[tuple[str, ...]]:
    """The same as rows of a table; none of one seed."""
    count, rest = len(scores[THIS_MODEL]), [""] * (columns - 2)
    if count == 1:
        return []
    rows = [(f"{who}, {count} seeds", f"{over_seeds(values)}%", *rest) for who, values in scores.items()]
    gaps = {who: paired_difference(scores[THIS_MODEL], of) for who, of in scores.items() if who != THIS_MODEL}
    return rows + [(f"{THIS_MODEL} over {who}, paired", f"{gap} points", *rest) for who, gap in gaps.items()]
