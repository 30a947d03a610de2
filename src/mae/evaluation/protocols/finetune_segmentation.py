"""Fine-tuning to segmentation: the encoder under UPerNet or a linear head (He et al. 2021, A.4)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult, SegmentationProtocol
from mae.evaluation.protocols.labels import read_share, shown_share
from mae.options import shown
from mae.text import visible

if TYPE_CHECKING:
    from torch import Tensor

    from mae.core.method import MethodConfig
    from mae.evaluation.common.supervised import SupervisedPlan, SupervisedTraining
    from mae.evaluation.common.task import SegmentationTask
    from mae.evaluation.extractors.extractor import Extractor
    from mae.evaluation.pictures.segmentation import DrawnMaps
    from mae.models.segmenter import MapHead, Segmenter

_SCRATCH = "scratch"
_WARMUP = 1500
_MOST_CHANNELS = 768


@dataclass(frozen=True, kw_only=True)
class FinetuneSegmentation(SegmentationProtocol):
    """The published recipe of MAE at a laptop's length, and the same training of other weights beside it.

    Layer-wise learning-rate decay, stochastic depth, a rate that falls straight to 0; random size, crop and mirroring.
    Colours are left as they are, since nobody knows what channels mean.

    Raises:
        UsageError: values out of range, or a weight named twice.
    """

    name = "finetune_segmentation"
    title = "Fine-tuning to segmentation"
    summary = "train the encoder under a head that tells the class of each pixel, beside other weights"
    own_page = True

    head: Literal["upernet", "linear"] = "upernet"
    """upernet: a pyramid of four blocks' maps. linear: one layer on the last block's, as in segmentation_linear."""
    channels: Annotated[int | None, shown("the encoder's width, at most 768", "C")] = None
    """Channels of UPerNet's pyramid; 768 in the published recipe."""
    iterations: int = 1000
    """Optimizer steps; an hour on a laptop with a small model. The published recipe has 160,000, for eight GPUs."""
    batch_size: Annotated[int | None, shown("16; all images where there are fewer", "B")] = None
    """Images per step."""
    accumulate: int = 1
    """Micro-batches per step, to save memory."""
    lr: float = 1e-4
    """Peak learning rate, of the head; it falls straight to 0."""
    warmup: Annotated[int | None, shown("1500, at most a tenth of the steps", "STEPS")] = None
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = 0.05
    """AdamW's weight decay, not on biases, norms, positions and class token."""
    layer_decay: float = 0.65
    """Ratio of the learning rate of each block to that of the one above it; from scratch it is 1."""
    drop_path: float = 0.1
    """Share of residual branches dropped in the last block."""
    labels_used: Annotated[str, tyro.conf.arg(name="labels", metavar="SHARE")] = "100%"
    """How much of the training images is used, such as 10%."""
    beside: tuple[str, ...] = (_SCRATCH,)
    """Other weights that are trained alike: scratch, a run, a .safetensors file; by mae finetune also timm:NAME."""
    seeds: int = 1
    """Trainings of each, whose weights of the head, order and crops differ; from two on there are intervals."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere."""
    pictures: int = 6
    """Test images that are drawn with their masks and what is predicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        read_share(self.labels_used)
        for name in ("iterations", "accumulate", "seeds", "channels"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} is {value}; expected 1 or more")
        for name in ("lr", "warmup", "weight_decay", "pictures"):
            if (value := getattr(self, name)) is not None and not 0 <= value < inf:
                raise UsageError(f"{name} is {value}; expected a finite number of 0 or more")
        if not 0 < self.layer_decay <= 1 or not 0 <= self.drop_path < 1:
            raise UsageError(
                f"layer_decay is {self.layer_decay} and drop_path {self.drop_path}; expected shares up to 1 and below 1"
            )
        if len(set(self.beside)) < len(self.beside) or THIS_MODEL in self.beside:
            raise UsageError(f"beside is {list(self.beside)}; expected different weights, such as scratch")

    @property
    def variant(self) -> str:
        """The head where it is not UPerNet, and the share of the labels where it is not all of them."""
        share = read_share(self.labels_used)
        parts = ["" if self.head == "upernet" else self.head, "" if share == 1 else f"{100 * share:.6g}percent"]
        return "-".join(filter(None, parts))

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        from mae.evaluation.common.beside import not_ours

        if extractor.model is None or extractor.model.config is None:
            return not_ours(extractor.name)
        return None

    def run(self, task: "SegmentationTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.beside import seed_numbers, seed_rows, tasks_beside, used_images
        from mae.evaluation.common.segmentation_results import segmentation_result
        from mae.evaluation.common.segmentation_training import SEGMENTER_FILE, commonest_class, of_one_class
        from mae.evaluation.common.verdict import COMMONEST
        from mae.evaluation.pictures.segmentation import DrawnMaps
        from mae.report.terminal.console import duration

        numbers = used_images(task, read_share(self.labels_used))
        drawn = DrawnMaps(task, self.pictures, title=self.title)
        matrices: dict[str, Tensor] = {}
        trainings: dict[str, list[SupervisedTraining]] = {}
        scores: dict[str, list[float]] = {}
        for who, of in tasks_beside(task, self.beside).items():
            trainings[who], scores[who] = [], []
            for seed in range(task.seed, task.seed + self.seeds):
                task.console.print(visible(f"{who}, seed {seed}"), highlight=False, markup=False, soft_wrap=True)
                training, found, score = self._trained(
                    of.with_model(of.extractor, seed=seed), numbers, scratch=who == _SCRATCH
                )
                trainings[who].append(training)
                scores[who].append(score)
                if seed == task.seed:  # the first stands for its weights where test images are compared
                    matrices[who] = found(drawn, who)
        matrices[COMMONEST] = of_one_class(matrices[THIS_MODEL], commonest_class(task, numbers))
        ours = trainings[THIS_MODEL][0]
        return segmentation_result(
            task,
            matrices,
            drawn.pictures(),
            numbers={
                "seeds": seed_numbers(scores),
                "training": {"folder": str(ours.folder), "seconds": ours.seconds, "curve": ours.curve},
            },
            note=f"{task.data.note}. {self.iterations:,} steps on {len(numbers):,} images "
            f"({shown_share(read_share(self.labels_used))} of the labels), {duration(ours.seconds)} of training. The "
            f"last weights are evaluated, not the best; they are in {ours.folder / SEGMENTER_FILE}.",
            curve=ours.curve,
            variant=self.variant,
            more=tuple(seed_rows(scores, columns=4)),
        )

    def _trained(self, task: "SegmentationTask", numbers: "Tensor", *, scratch: bool) -> tuple[Any, Any, float]:
        """A training, what gives its confusions and keeps its maps, and its mean IoU."""
        from mae.evaluation.common import finetuning
        from mae.evaluation.common.segmentation_results import mean_iou
        from mae.evaluation.common.segmentation_training import (
            SEGMENTER_FILE,
            batch_of,
            confusions_of,
            masked_images,
        )
        from mae.evaluation.common.supervised import train_with_labels
        from mae.models.inference import undisturbed

        batch = batch_of(self.batch_size, self.accumulate, len(numbers))
        segmenter = self._segmenter(task, scratch=scratch)
        fed = masked_images(task, batch_size=batch, accumulate=self.accumulate, numbers=numbers)

        def evaluate() -> Mapping[str, float]:
            with undisturbed(segmenter):
                return {"mean_iou": mean_iou(confusions_of(task, segmenter))}

        training = train_with_labels(
            task,
            self._plan(task, batch, steps_per_epoch=fed.steps_per_epoch, scratch=scratch),
            segmenter.train(),
            finetuning.make_optimizer(segmenter, 1.0 if scratch else self.layer_decay, weight_decay=self.weight_decay),
            batches=fed,
            evaluate=evaluate,
        )
        file = training.folder / SEGMENTER_FILE
        task.world.from_main(lambda: finetuning.save(file, segmenter, task, from_scratch=scratch))

        def found(drawn: "DrawnMaps", who: str) -> "Tensor":
            with undisturbed(segmenter):
                drawn.add(who, task, segmenter)
                return confusions_of(task, segmenter)

        return training, found, training.curve[-1]["mean_iou"]

    def _segmenter(self, task: "SegmentationTask", *, scratch: bool) -> "Segmenter":
        import torch

        from mae.models.segmenter import build_segmenter

        model = task.extractor.model
        assert model is not None and model.config is not None
        torch.manual_seed(task.seed)
        return build_segmenter(
            model.config,
            head=self._map_head(model.config),
            num_classes=task.num_classes,
            class_names=task.class_names,
            drop_path=self.drop_path,
            pretrained=None if scratch else model,
            rank=task.world.rank,
            world=task.world.size,
        ).to(task.device)

    def _map_head(self, config: "MethodConfig") -> "MapHead":
        from mae.models.segmenter import linear_head, upernet_head

        if self.head == "linear":
            return linear_head(config.encoder.depth)
        return upernet_head(config.encoder.depth, self.channels or min(config.encoder.embed_dim, _MOST_CHANNELS))

    def _plan(self, task: "SegmentationTask", batch: int, *, steps_per_epoch: int, scratch: bool) -> "SupervisedPlan":
        from mae.evaluation.common.supervised import SupervisedPlan
        from mae.training.device import choose_precision

        warmup = min(_WARMUP, self.iterations / 10) if self.warmup is None else self.warmup
        # How many seeds and what else is trained beside it decide nothing of this training.
        decides = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("beside", "seeds", "pictures", "iterations", "lr", "warmup")
        }
        return SupervisedPlan(
            name=self.name,
            epochs=self.iterations / steps_per_epoch,
            batch_size=batch,
            accumulate=self.accumulate,
            rate=self.lr,
            min_rate=0.0,
            warmup_epochs=warmup / steps_per_epoch,
            precision=choose_precision(self.precision, task.device),
            identity={**decides, "from_scratch": scratch},
            schedule="linear",
            evaluations=4,
        )
