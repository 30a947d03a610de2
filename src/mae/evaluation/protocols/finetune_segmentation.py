"""Fine-tuning to segmentation: the encoder under UPerNet or a linear head (He et al. 2021, A.4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from mae.errors import UsageError
from mae.evaluation.common.dense_finetuning import SCRATCH, DenseFinetuning
from mae.evaluation.common.share_of_labels import read_share
from mae.evaluation.protocol import THIS_MODEL, ProtocolResult, SegmentationProtocol
from mae.options import shown

if TYPE_CHECKING:
    from torch import Tensor

    from mae.core.method import MethodConfig
    from mae.evaluation.common.supervised import PreparedTraining, SupervisedTraining
    from mae.evaluation.common.task import SegmentationTask
    from mae.models.segmenter import MapHead, Segmenter

_MOST_CHANNELS = 768


@dataclass(frozen=True, kw_only=True)
class FinetuneSegmentation(DenseFinetuning, SegmentationProtocol):
    """The published recipe of MAE at a laptop's length, and the same training of other weights beside it.

    Layer-wise learning-rate decay, stochastic depth, a rate that falls straight to 0; random size, crop and mirroring.
    Colours are left as they are, since nobody knows what channels mean.

    Raises:
        UsageError: see `DenseFinetuning` and `SegmentationProtocol`; a number of channels below 1.
    """

    name = "finetune_segmentation"
    title = "Fine-tuning to segmentation"
    summary = "train the encoder under a head that tells the class of each pixel, beside other weights"
    usual_warmup = 1500
    schedule = "linear"

    head: Literal["upernet", "linear"] = "upernet"
    """upernet: a pyramid of four blocks' maps. linear: one layer on the last block's, as in segmentation_linear."""
    channels: Annotated[int | None, shown("the encoder's width, at most 768", "C")] = None
    """Channels of UPerNet's pyramid; 768 in the published recipe."""

    def __post_init__(self) -> None:
        DenseFinetuning.__post_init__(self)
        SegmentationProtocol.__post_init__(self)
        if self.channels is not None and self.channels < 1:
            raise UsageError(f"channels is {self.channels}; expected 1 or more")

    @property
    def variant(self) -> str:
        """The head where it is not UPerNet, and the share of the labels where it is not all of them."""
        return "-".join(filter(None, ["" if self.head == "upernet" else self.head, super().variant]))

    def run(self, task: "SegmentationTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.beside import each_seed, seed_numbers, seed_rows, used_images
        from mae.evaluation.common.finetuning import SEGMENTER_FILE
        from mae.evaluation.common.segmentation_results import segmentation_result
        from mae.evaluation.common.segmentation_training import commonest_class, counts_of, of_one_class
        from mae.evaluation.common.verdict import COMMONEST, compare_seeds
        from mae.evaluation.pictures.segmentation import DrawnMaps
        from mae.models.inference import undisturbed

        numbers = used_images(task, read_share(self.labels_used))
        commonest = commonest_class(task, numbers)
        drawn = DrawnMaps(task, self.pictures, title=self.title)
        counts: dict[str, Tensor] = {}
        first: dict[str, SupervisedTraining] = {}
        scores: dict[str, list[float]] = {}
        for who, seeded in each_seed(task, self.beside, self.seeds):
            training, segmenter = self.trained(seeded, scratch=who == SCRATCH, file=SEGMENTER_FILE)
            scores.setdefault(who, []).append(training.curve[-1]["mean_iou"])
            if who not in first:  # the first seed stands for its weights where test images are compared
                first[who] = training
                with undisturbed(segmenter):
                    drawn.add(who, seeded, segmenter)
                    counts[who] = counts_of(seeded, segmenter)
        counts[COMMONEST] = of_one_class(counts[THIS_MODEL], commonest)
        ours = first[THIS_MODEL]
        return segmentation_result(
            task,
            counts,
            drawn.pictures(),
            numbers={
                "seeds": seed_numbers(scores),
                "training": {"folder": str(ours.folder), "seconds": ours.seconds, "curve": ours.curve},
            },
            note=f"{task.data.note}. {self.told(len(numbers), ours.seconds)} The "
            f"last weights are evaluated, not the best; they are in {ours.folder / SEGMENTER_FILE}.",
            curve=ours.curve,
            variant=self.variant,
            more=tuple(seed_rows(scores, columns=4)),
            others=[who for who in self.beside if who != SCRATCH],
            over_seeds=compare_seeds(scores, baseline=SCRATCH, measure="mean IoU", test_images=len(counts[THIS_MODEL])),
        )

    def prepared(self, task: "SegmentationTask", *, scratch: bool = False) -> "PreparedTraining":
        """See `DenseFinetuning`."""
        from mae.evaluation.common import finetuning
        from mae.evaluation.common.beside import used_images
        from mae.evaluation.common.segmentation_results import mean_iou
        from mae.evaluation.common.segmentation_training import (
            batch_of,
            counts_of,
            masked_images,
        )
        from mae.evaluation.common.supervised import PreparedTraining
        from mae.models.inference import undisturbed

        numbers = used_images(task, read_share(self.labels_used))
        batch = batch_of(self.batch_size, self.accumulate, len(numbers))
        segmenter = self._segmenter(task, scratch=scratch)
        fed = masked_images(task, batch_size=batch, accumulate=self.accumulate, numbers=numbers)

        def evaluate() -> Mapping[str, float]:
            with undisturbed(segmenter):
                return {"mean_iou": mean_iou(counts_of(task, segmenter))}

        return PreparedTraining(
            task=task,
            plan=self.plan(task, batch, steps_per_epoch=fed.steps_per_epoch, scratch=scratch),
            module=segmenter.train(),
            optimizer=finetuning.make_optimizer(
                segmenter, 1.0 if scratch else self.layer_decay, weight_decay=self.weight_decay
            ),
            batches=fed,
            evaluate=evaluate,
        )

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
