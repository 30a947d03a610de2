"""Fine-tuning to detection: the encoder under Faster or Mask R-CNN (ViTDet: Li et al. 2022)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mae.errors import UsageError
from mae.evaluation.common.dense_finetuning import SCRATCH, DenseFinetuning
from mae.evaluation.common.share_of_labels import read_share
from mae.evaluation.protocol import THIS_MODEL, DetectionProtocol, ProtocolResult
from mae.options import shown

if TYPE_CHECKING:
    from mae.core.method import MethodConfig
    from mae.evaluation.common.average_precision import AveragePrecision, FoundObjects, GroundTruth
    from mae.evaluation.common.supervised import PreparedTraining, SupervisedTraining
    from mae.evaluation.common.task import DetectionTask
    from mae.evaluation.extractors.extractor import Extractor
    from mae.models.detector import DetectionHead, Detector

_USUAL_BATCH, _MOST_CHANNELS = 8, 256
_SIZES = (256, 512)
_WINDOW, _LARGEST_WHOLE = 14, 32  # patches


@dataclass(frozen=True, kw_only=True)
class DetectorTraining(DenseFinetuning, DetectionProtocol):
    """ViTDet's recipe at a laptop's length, and the same training of other weights beside it.

    Large-scale jitter, layer-wise learning-rate decay, stochastic depth, a rate that falls to a tenth at 89 % of the
    steps and to a hundredth at 96 %. In evaluation whole images are resized to fit into the model's square.

    Raises:
        UsageError: see `DenseFinetuning`; values out of range.
    """

    usual_warmup = 250
    schedule = "steps"
    masks: ClassVar[bool]
    """Whether the pixels of each object are learnt too."""

    size: Annotated[int | None, shown("the model's, but 256 to 512", "PIXELS")] = None
    """Side of the square that images are resized to fit into; 1024 in ViTDet."""
    scales: tuple[float, float] = (0.1, 2.0)
    """Bounds of the random size in training, of that at which an image just fits."""
    window: Annotated[int | None, shown("0 up to 32 patches a side, else 14", "PATCHES")] = None
    """Side of the windows that most blocks attend within; 0: every block attends to the whole image."""
    rel_pos: bool = True
    """Learn relative positions, which begin without an effect."""
    channels: Annotated[int | None, shown("the encoder's width, at most 256", "C")] = None
    """Channels of the pyramid and the heads; 256 in ViTDet."""
    batch_size: Annotated[int | None, shown("8, halved until it fits fewer images", "B")] = None
    """Images per step; 64 in ViTDet."""
    warmup: Annotated[int | None, shown("250, at most a tenth of the steps", "STEPS")] = None
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """AdamW's weight decay, not on biases, norms and absolute positions."""
    layer_decay: float = 0.7
    """Ratio of the learning rate of each block to that of the one above it; from scratch it is 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("channels", 1), ("size", 1), ("window", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name} is {value}; expected {least} or more")
        if not 0 < self.scales[0] <= self.scales[1] < inf:
            raise UsageError(f"scales is {self.scales}; expected the smallest and the largest, above 0")

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        if reason := super().why_not(extractor):
            return reason
        assert extractor.model is not None and extractor.model.config is not None
        config = extractor.model.config
        return self._head(config).why_not(config.layout.patch)

    def run(self, task: "DetectionTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.beside import each_seed, seed_numbers, seed_rows, used_images
        from mae.evaluation.common.detection_training import find_objects, truth_of
        from mae.evaluation.common.finetuning import DETECTOR_FILE
        from mae.evaluation.common.verdict import compare_seeds

        self._check_objects(task)
        truth, numbers = truth_of(task), used_images(task, read_share(self.labels_used))
        first: dict[str, SupervisedTraining] = {}
        found: dict[str, list[FoundObjects]] = {}
        scores: dict[str, list[float]] = {}
        for who, seeded in each_seed(task, self.beside, self.seeds):
            training, detector = self.trained(seeded, scratch=who == SCRATCH, file=DETECTOR_FILE)
            scores.setdefault(who, []).append(training.curve[-1]["ap"])
            if who not in first:  # the first seed stands for its weights where objects are shown
                first[who], found[who] = training, find_objects(seeded, detector)
        ours = first[THIS_MODEL]
        precisions = {who: self._precisions(truth, objects) for who, objects in found.items()}
        rows = [
            (f"{who}, {area}" if self.masks else who, *_shares(of))
            for who, areas in precisions.items()
            for area, of in areas.items()
        ]
        rows += seed_rows(scores, columns=7)
        main = precisions[THIS_MODEL][self._area]
        rows += [(f"  {name}, AP", _share(ap), *[""] * 5) for name, ap in main.by_class.items()]
        unseeded = (
            "" if self.seeds > 1 else " One seed says nothing of chance: --seeds 3 gives intervals and a verdict."
        )
        return ProtocolResult(
            verdict=compare_seeds(
                scores,
                baseline=SCRATCH,
                measure="AP of masks" if self.masks else "AP",
                test_images=len(task.images("test").readable),
            ),
            numbers={
                **{who: {area: asdict(of) for area, of in areas.items()} for who, areas in precisions.items()},
                "seeds": seed_numbers(scores),
                "training": {"folder": str(ours.folder), "seconds": ours.seconds, "curve": ours.curve},
            },
            header=("model", "AP", "AP50", "AP75", "AP small", "medium", "large"),
            rows=tuple(rows),
            note=f"{task.data.note}. {self.told(len(numbers), ours.seconds)} "
            f"COCO's average precision in the images' own pixels; small is below 32 x 32, large above 96 x 96. "
            f"The last weights are evaluated, not the best; they are in {ours.folder / DETECTOR_FILE}.{unseeded}",
            curve=ours.curve,
            variant=self.variant,
            pictures=self._pictures(task, found),
        )

    @property
    def _area(self) -> Literal["boxes", "masks"]:
        return "masks" if self.masks else "boxes"

    def _precisions(self, truth: "GroundTruth", found: "list[FoundObjects]") -> "dict[str, AveragePrecision]":
        from mae.evaluation.common.average_precision import average_precision

        areas: tuple[Literal["boxes", "masks"], ...] = ("boxes", "masks") if self.masks else ("boxes",)
        return {area: average_precision(truth, found, area) for area in areas}

    def _check_objects(self, task: "DetectionTask") -> None:
        for part, split in (("train", task.data.train), ("test", task.data.test)):
            if not split.has_objects:
                raise UsageError(
                    f"{task.data.note}; no image of the {part} part has an object that counts, crowds and difficult "
                    "ones aside: see whether these are the right labels"
                )
        if self.masks and not task.data.train.has_masks:
            raise UsageError(f"{task.data.note}; instances need outlines: use 'mae finetune detection' for boxes")

    def prepared(self, task: "DetectionTask", *, scratch: bool = False) -> "PreparedTraining":
        """See `DenseFinetuning`."""
        from mae.evaluation.common import finetuning
        from mae.evaluation.common.beside import used_images
        from mae.evaluation.common.detection_training import (
            LargeScaleJitter,
            find_objects,
            images_with_objects,
            truth_of,
        )
        from mae.evaluation.common.supervised import PreparedTraining, largest_batch

        self._check_objects(task)
        truth, numbers = truth_of(task), used_images(task, read_share(self.labels_used))
        batch = largest_batch(self.batch_size, _USUAL_BATCH, images=len(numbers), steps_per_epoch=1)
        detector = self._detector(task, scratch=scratch)
        jitter = LargeScaleJitter(size=detector.described.size, masks=self.masks, scales=self.scales)
        fed = images_with_objects(task, jitter, batch_size=batch, accumulate=self.accumulate, numbers=numbers)

        def evaluate() -> Mapping[str, float]:
            of = self._precisions(truth, find_objects(task, detector))[self._area]
            return {"ap": of.ap or 0.0, "ap50": of.ap50 or 0.0}

        return PreparedTraining(
            task=task,
            plan=self.plan(task, batch, steps_per_epoch=fed.steps_per_epoch, scratch=scratch),
            module=detector.train(),
            optimizer=finetuning.make_optimizer(
                detector, 1.0 if scratch else self.layer_decay, weight_decay=self.weight_decay
            ),
            batches=fed,
            evaluate=evaluate,
        )

    def _detector(self, task: "DetectionTask", *, scratch: bool) -> "Detector":
        """Drawn by the task's seed, on its device."""
        import torch

        from mae.models.detector import build_detector

        model = task.extractor.model
        assert model is not None and model.config is not None
        torch.manual_seed(task.seed)
        return build_detector(
            model.config,
            self._head(model.config),
            class_names=task.class_names,
            pretrained=None if scratch else model,
            drop_path=self.drop_path,
            rank=task.world.rank,
            world=task.world.size,
        ).to(task.device)

    def _head(self, config: "MethodConfig") -> "DetectionHead":
        from mae.models.detector import DetectionHead

        patch, (smallest, largest) = config.layout.patch[0], _SIZES
        size = self.size
        if size is None:
            size = min(largest, max(smallest, *config.layout.size))
            size = max(2, round(size / (2 * patch)) * 2) * patch
        whole = size <= _LARGEST_WHOLE * patch
        return DetectionHead(
            size=size,
            window=(0 if whole else _WINDOW) if self.window is None else self.window,
            rel_pos=self.rel_pos,
            channels=self.channels or min(config.encoder.embed_dim, _MOST_CHANNELS),
            masks=self.masks,
        )

    def _pictures(self, task: "DetectionTask", found: "Mapping[str, list[FoundObjects]]") -> Mapping[str, Any]:
        from functools import partial

        from mae.evaluation.pictures.detection import draw_detections
        from mae.evaluation.pictures.segmentation import spread

        images = task.images("test")
        rows = spread(len(images.readable), self.pictures).tolist()
        if not rows:
            return {}
        numbers = images.readable[rows].tolist()
        draw = partial(
            draw_detections,
            images,  # asked here: all processes ask together, and only the main one draws
            numbers,
            [task.data.test.objects(number) for number in numbers],
            {who: [of[row] for row in rows] for who, of in found.items()},
            class_names=task.class_names,
            title=self.title,
        )
        return {"pictures": draw}


@dataclass(frozen=True, kw_only=True)
class FinetuneDetection(DetectorTraining):
    """Faster R-CNN on the encoder; see `DetectorTraining`."""

    name = "finetune_detection"
    title = "Fine-tuning to detection"
    summary = "train the encoder under a detector that finds boxes around objects, beside other weights"
    masks = False


def _shares(of: "AveragePrecision") -> tuple[str, ...]:
    return tuple(_share(value) for value in (of.ap, of.ap50, of.ap75, of.small, of.medium, of.large))


def _share(value: float | None) -> str:
    return "none there" if value is None else f"{value:.1%}"
