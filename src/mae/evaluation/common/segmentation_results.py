"""What maps of classes were worth: the table and the verdict of protocols that train on masks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any

from jaxtyping import Int64
from torch import Tensor

from mae.evaluation.common.dense import dense_scores
from mae.evaluation.common.task import SegmentationTask
from mae.evaluation.common.verdict import COMMONEST, Verdict, compare_maps
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult


def mean_iou(counts: Int64[Tensor, "m 3 K"]) -> float:
    """Of all test images together."""
    return dense_scores(counts.sum(dim=0)).mean_iou


def segmentation_result(
    task: SegmentationTask,
    counts: Mapping[str, Int64[Tensor, "m 3 K"]],
    pictures: Mapping[str, Callable[..., None]],
    *,
    numbers: Mapping[str, Any],
    note: str,
    curve: tuple[Mapping[str, float], ...],
    variant: str,
    more: tuple[tuple[str, ...], ...] = (),
    others: Collection[str] = (),
    over_seeds: Verdict | None = None,
) -> ProtocolResult:
    """The result of a protocol.

    Args:
        task: of the evaluated model.
        counts: `class_counts` of the test images, by `THIS_MODEL`, by each baseline and by each of `others`.
        pictures: see `ProtocolResult`.
        numbers: what else was measured.
        note: what a reader must know.
        curve: of the evaluated model's training.
        variant: see `ProtocolResult`.
        more: further rows of four columns, before those of the classes.
        others: other trained weights: who is behind them need not have learned nothing.
        over_seeds: of several trainings, in the place of that over the test images of one.
    """
    measured: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    for who, of_each in counts.items():
        scores = dense_scores(of_each.sum(dim=0))
        measured[who] = {**asdict(scores), "iou": dict(zip(task.class_names, scores.iou, strict=True))}
        shares = (scores.mean_iou, scores.mean_accuracy, scores.accuracy)
        rows.append((who, *(f"{share:.1%}" for share in shares)))
    # Any guess at several classes has a higher mean IoU than a map of one: to beat that says nothing.
    rivals = {who: of_each for who, of_each in counts.items() if who not in (COMMONEST, *others)}
    return ProtocolResult(
        numbers={**measured, **numbers},
        header=("model", "mean IoU", "mean accuracy", "pixel accuracy"),
        rows=(*rows, *more, *_class_rows(measured[THIS_MODEL]["iou"])),
        note=f"{note} Pixels are counted in the images' own size; intersections and unions are summed over all test "
        "images.",
        verdict=over_seeds or (compare_maps(rivals) if len(rivals) > 1 else None),
        pictures=pictures,
        curve=curve,
        variant=variant,
    )


def _class_rows(iou: Mapping[str, float | None]) -> list[tuple[str, ...]]:
    """A row a class with its intersection over union."""
    shares = {name: "not there" if share is None else f"{share:.1%}" for name, share in iou.items()}
    return [(f"  {name}, IoU", share, "", "") for name, share in shares.items()]
