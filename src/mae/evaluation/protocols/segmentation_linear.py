"""Classes of pixels by a linear layer on frozen maps of patch tokens (DINOv3: Siméoni et al. 2025)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult, SegmentationProtocol
from mae.options import shown

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.segmentation_training import FrozenSegmenter
    from mae.evaluation.common.supervised import SupervisedPlan, SupervisedTraining
    from mae.evaluation.common.task import SegmentationTask

_WARMUP = 1500 / 40_000
_PIXELS = "raw pixels"


@dataclass(frozen=True, kw_only=True)
class SegmentationLinear(SegmentationProtocol):
    """DINOv3's linear head and settings: dropout, batch norm, a linear layer of each patch; windows in evaluation.

    Raises:
        UsageError: values out of range.
    """

    name = "segmentation_linear"
    title = "Segmentation by a linear layer on frozen patches"
    summary = "a linear layer tells the class of each patch; windows, averaged, that of each pixel"
    own_page = True

    iterations: int = 500
    """Optimizer steps; some minutes on a laptop with a small model. The paper has 40,000, for a GPU."""
    batch_size: Annotated[int | None, shown("16, halved until it fits fewer images", "B")] = None
    """Images per step."""
    accumulate: int = 1
    """Micro-batches per step, to save memory."""
    lr: float = 1e-3
    """Peak learning rate; it rises over a 27th of the steps and falls to 0 by a cosine schedule."""
    weight_decay: float = 1e-3
    """AdamW's weight decay."""
    layers: int = 1
    """Last blocks whose maps are put side by side: 1, or 4 as in DINOv2's second head."""
    baselines: bool = True
    """Evaluate random weights and raw pixels too."""
    pictures: int = 6
    """Test images that are drawn with their masks and what is predicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("iterations", "accumulate", "layers"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; expected 1 or more")
        for name in ("lr", "weight_decay", "pictures"):
            if not 0 <= getattr(self, name) < inf:
                raise UsageError(f"{name} is {getattr(self, name)}; expected a finite number of 0 or more")

    def run(self, task: "SegmentationTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.dense_baselines import dense_baselines
        from mae.evaluation.common.segmentation_results import segmentation_result
        from mae.evaluation.common.segmentation_training import (
            commonest_class,
            counts_of,
            grid_of_patches,
            of_one_class,
        )
        from mae.evaluation.common.verdict import COMMONEST
        from mae.evaluation.pictures.segmentation import DrawnMaps
        from mae.models.inference import undisturbed

        grid = grid_of_patches(task.extractor, task.device)
        others = dense_baselines(task.extractor, grid) if self.baselines else []
        numbers = task.images("train").readable
        commonest = commonest_class(task, numbers)
        counts: dict[str, Tensor] = {}
        drawn = DrawnMaps(task, self.pictures, title=self.title)
        trainings: dict[str, SupervisedTraining] = {}
        for extractor in [task.extractor, *others]:
            who = THIS_MODEL if extractor is task.extractor else extractor.name
            of = task.with_model(extractor)
            head = self._head(of, grid)
            trainings[who] = self._trained(of, head)
            with undisturbed(head):
                counts[who] = counts_of(of, head)
                drawn.add(who, of, head)
            if extractor is task.extractor:
                self._save(of, head, trainings[who])
        counts[COMMONEST] = of_one_class(counts[THIS_MODEL], commonest)
        ours = trainings[THIS_MODEL]
        return segmentation_result(
            task,
            counts,
            drawn.pictures(),
            numbers={"training": {"folder": str(ours.folder), "seconds": ours.seconds, "curve": ours.curve}},
            note=self._note(task, ours, numbers=len(numbers)),
            curve=ours.curve,
            variant="" if self.layers == 1 else f"layers{self.layers}",
        )

    def _head(self, task: "SegmentationTask", grid: tuple[int, int]) -> "FrozenSegmenter":
        """A fresh head, drawn by the task's seed; of pixels, which have no blocks, on what there is."""
        import torch

        from mae.evaluation.common.segmentation_training import FrozenSegmenter

        layers = 1 if task.extractor.name == _PIXELS else self.layers
        torch.manual_seed(task.seed)
        return FrozenSegmenter(
            task.extractor, grid=grid, layers=layers, num_classes=task.num_classes, device=task.device
        )

    def _trained(self, task: "SegmentationTask", head: "FrozenSegmenter") -> "SupervisedTraining":
        from torch.optim import AdamW

        from mae.evaluation.common.segmentation_results import mean_iou
        from mae.evaluation.common.segmentation_training import batch_of, counts_of, masked_images
        from mae.evaluation.common.supervised import train_with_labels
        from mae.models.inference import undisturbed

        numbers = task.images("train").readable
        batch = batch_of(self.batch_size, self.accumulate, len(numbers))
        fed = masked_images(task, batch_size=batch, accumulate=self.accumulate, numbers=numbers)

        def evaluate() -> Mapping[str, float]:
            with undisturbed(head):
                return {"mean_iou": mean_iou(counts_of(task, head))}

        optimizer = AdamW(head.parameters(), lr=0.0, betas=(0.9, 0.999), weight_decay=self.weight_decay, fused=True)
        plan = self._plan(batch, steps_per_epoch=fed.steps_per_epoch)
        return train_with_labels(task, plan, head.train(), optimizer, batches=fed, evaluate=evaluate)

    def _plan(self, batch: int, *, steps_per_epoch: int) -> "SupervisedPlan":
        from mae.evaluation.common.supervised import SupervisedPlan

        epochs = self.iterations / steps_per_epoch
        return SupervisedPlan(
            name=self.name,
            epochs=epochs,
            batch_size=batch,
            accumulate=self.accumulate,
            rate=self.lr,
            min_rate=0.0,
            warmup_epochs=_WARMUP * epochs,
            precision="fp32",
            identity={"layers": self.layers, "weight_decay": self.weight_decay},
            evaluations=4,
        )

    def _save(self, task: "SegmentationTask", head: "FrozenSegmenter", training: "SupervisedTraining") -> None:
        """The model of this package with its head, beside its training."""
        from copy import deepcopy

        from mae.evaluation.common import finetuning
        from mae.evaluation.common.finetuning import SEGMENTER_FILE
        from mae.models.segmenter import Segmenter, linear_head

        model = task.extractor.model
        if model is None or model.config is None:
            return
        whole = Segmenter(
            encoder=deepcopy(model.encoder),
            head=linear_head(len(model.encoder.blocks), self.layers),
            num_classes=task.num_classes,
            class_names=task.class_names,
            config=model.config,
        )
        whole.head.load_state_dict(head.head.state_dict())
        task.world.from_main(lambda: finetuning.save(training.folder / SEGMENTER_FILE, whole.eval(), task))

    def _note(self, task: "SegmentationTask", training: "SupervisedTraining", *, numbers: int) -> str:
        from mae.evaluation.common.finetuning import SEGMENTER_FILE
        from mae.report.terminal.console import duration

        file = training.folder / SEGMENTER_FILE
        where = "" if task.extractor.model is None else f" The model with its head is {file}."
        return (
            f"{task.data.note}. {self.iterations:,} steps on {numbers:,} images, {duration(training.seconds)} of "
            f"training; the paper has 40,000 steps. The last weights are evaluated, not the best.{where}"
        )
