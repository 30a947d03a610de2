"""Classes of pixels from frozen patch tokens, by the nearest training patches (CAPI: Darcet et al. 2025)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult, SegmentationProtocol

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.task import SegmentationTask
    from mae.evaluation.extractors.extractor import Extractor

_NAMES = {"knn": "k-NN", "logistic": "logistic"}


@dataclass(frozen=True, kw_only=True)
class SegmentationKnn(SegmentationProtocol):
    """CAPI's protocol: the nearest training patches vote on each pixel; a logistic regression of patches beside it.

    Raises:
        UsageError: values out of range.
    """

    name = "segmentation_knn"
    title = "Segmentation by k-NN of frozen patches"
    summary = "the nearest training patches vote on the class of each pixel"
    own_page = True

    ks: tuple[int, ...] = (1, 3, 10, 30)
    """Numbers of neighbours that may vote; the best on a tenth of the training images is taken."""
    metrics: tuple[Literal["cosine", "l2"], ...] = ("cosine", "l2")
    """How near patches are; the best on a tenth of the training images is taken."""
    logistic: bool = True
    """Evaluate a logistic regression of patches too, of the best penalty likewise."""
    baselines: bool = True
    """Evaluate random weights and raw pixels too."""
    pictures: int = 6
    """Test images that are drawn with their masks and what is predicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ks or min(self.ks) < 1 or len(set(self.ks)) < len(self.ks):
            raise UsageError(f"ks is {list(self.ks)}; expected different numbers of 1 or more")
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise UsageError(f"metrics is {list(self.metrics)}; expected cosine, l2 or both")
        if self.pictures < 0:
            raise UsageError(f"pictures is {self.pictures}; expected 0 or more")

    def run(self, task: "SegmentationTask") -> ProtocolResult:
        """Evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.dense import class_counts, dense_scores
        from mae.evaluation.common.dense_baselines import dense_baselines
        from mae.evaluation.common.verdict import compare_maps
        from mae.evaluation.pictures.segmentation import draw_segmentation, spread

        others = dense_baselines(task.extractor, task.grid) if self.baselines else []
        truth = task.maps("test")
        train = task.maps("train")
        numbers: dict[str, Any] = {}
        rows: list[tuple[str, ...]] = []
        counts: dict[str, Tensor] = {}
        drawn: dict[str, Tensor] = {}
        for extractor in [task.extractor, *others]:
            who = THIS_MODEL if extractor is task.extractor else extractor.name
            numbers[who] = {}
            for head, (predicted, chosen) in self._predicted(task, extractor, train).items():
                of_each = class_counts(predicted, truth, num_classes=task.num_classes)
                scores = dense_scores(of_each.sum(dim=0))
                iou = dict(zip(task.class_names, scores.iou, strict=True))
                numbers[who][head] = {**asdict(scores), "iou": iou, "chosen": chosen}
                shares = (f"{share:.1%}" for share in (scores.mean_iou, scores.mean_accuracy, scores.accuracy))
                rows.append((f"{who}, {_NAMES[head]}", *shares, ", ".join(map(str, chosen.values()))))
                if head == "knn":
                    counts[who], drawn[who] = of_each, predicted
        some = spread(len(truth), self.pictures)
        shown = partial(
            draw_segmentation,
            task.images("test"),  # asked here: all processes ask together, and only the main one draws
            task.extractor.preprocessing,
            some,
            truth[some],
            {who: maps[some] for who, maps in drawn.items()},
            class_names=task.class_names,
            title=self.title,
        )
        return ProtocolResult(
            numbers=numbers,
            header=("features", "mean IoU", "mean accuracy", "pixel accuracy", "chosen"),
            rows=(*rows, *_class_rows(numbers[THIS_MODEL]["knn"]["iou"])),
            note=self._note(task),
            verdict=compare_maps(counts) if others else None,
            pictures={"pictures": shown} if self.pictures else {},
        )

    def _note(self, task: "SegmentationTask") -> str:
        height, width = task.extractor.preprocessing.img_size
        return (
            f"{task.data.note}. Whole images and masks are resized to {height} x {width}, whatever their shape, and "
            "pixels are counted there. Intersections and unions are summed over all test images."
        )

    def _predicted(
        self, task: "SegmentationTask", extractor: "Extractor", labels: "Tensor"
    ) -> "Mapping[str, tuple[Tensor, Mapping[str, Any]]]":
        """The maps of the test images by each head, and what was chosen for it."""
        from mae.evaluation.common.dense_heads import DenseSplit, by_logistic, by_neighbours

        split = DenseSplit(
            train=task.patches("train", extractor),
            test=task.patches("test", extractor),
            labels=labels,
            grid=task.grid,
            num_classes=task.num_classes,
            seed=task.seed,
            device=task.device,
        )
        found = {"knn": by_neighbours(split, ks=self.ks, metrics=self.metrics)}
        return {**found, "logistic": by_logistic(split)} if self.logistic else found


def _class_rows(iou: Mapping[str, float | None]) -> list[tuple[str, ...]]:
    """A row a class with its intersection over union."""
    shares = {name: "not there" if share is None else f"{share:.1%}" for name, share in iou.items()}
    return [(f"  {name}, IoU", share, "", "", "") for name, share in shares.items()]
