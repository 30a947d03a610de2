"""Fine-tuning the encoder end to end or in part (He et al. 2021, A.1 and section 5, "Partial fine-tuning")."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mae.errors import UsageError
from mae.evaluation.protocol import EvaluationProtocol, ProtocolResult
from mae.options import shown

if TYPE_CHECKING:
    from mae.core.method import MethodConfig
    from mae.data.dataset.images import ImageSet
    from mae.evaluation.common.supervised import PreparedTraining, SupervisedPlan, SupervisedTraining
    from mae.evaluation.common.task import LabelledTask
    from mae.evaluation.extractors.extractor import Extractor
    from mae.models.classifier import ImageClassifier

_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Finetune(EvaluationProtocol):
    """The official recipe; what is None follows the size of the model, as there.

    Mean pooling with a new norm, a head initialised near zero, trained positions, layer-wise learning-rate decay,
    stochastic depth, RandAugment, mixup or cutmix on every batch, random erasing, label smoothing.

    Raises:
        UsageError: values out of range, or more than one way to train a part.
    """

    name = "finetune"
    title = "Fine-tuning"
    summary = "train the encoder itself: all of it, its last blocks, LoRA or biases; or from scratch"

    epochs: Annotated[float | None, shown("100; 50 for large and huge models", "E")] = None
    """Epochs over the training images."""
    batch_size: Annotated[int | None, shown("1024; less where an epoch had fewer than 32 steps", "B")] = None
    """Images per optimizer step."""
    accumulate: int = 1
    """Micro-batches per step, to save memory; mixup and cutmix then mix within each."""
    base_lr: Annotated[float | None, shown("5e-4; 1e-3 for large and huge models", "RATE")] = None
    """Peak learning rate for a batch of 256."""
    min_lr: float = 1e-6
    """Learning rate at the end of the cosine schedule."""
    warmup_epochs: Annotated[float | None, shown("5, at most a tenth of the run", "E")] = None
    """Epochs over which the learning rate rises from 0."""
    weight_decay: float = 0.05
    """AdamW's weight decay, not on biases, norms, positions and class token."""
    layer_decay: Annotated[
        float | None, shown("0.65; large and huge models 0.75; 1 from scratch, for LoRA and BitFit", "SHARE")
    ] = None
    """Ratio of the learning rate of each block to that of the one above it."""
    drop_path: Annotated[float | None, shown("0.1; large models 0.2, huge 0.3", "SHARE")] = None
    """Share of residual branches dropped in the last block."""
    augment: bool = True
    """RandAugment and random erasing; for images of 1 or 3 channels of 8 bits: others need --no-augment."""
    mixing: bool = True
    """Mixup 0.8 or cutmix 1.0 on every batch."""
    label_smoothing: float = 0.1
    """Share of each target spread evenly over all classes."""
    blocks: Annotated[int | None, shown("all of them", "K")] = None
    """Train only the last K blocks, with norm and head; 0: only these two."""
    lora: Annotated[int | None, shown("none", "RANK")] = None
    """Train only low-rank products of this rank in the attention, with norm and head."""
    bitfit: bool = False
    """Train only biases and the head."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere; bf16 is faster on some processors too."""
    from_scratch: bool = False
    """Start from random weights, without layer decay: the baseline that shows what pre-training is worth."""

    def __post_init__(self) -> None:
        ways = {"blocks": self.blocks is not None, "lora": self.lora is not None, "bitfit": self.bitfit}
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1 or (chosen and self.from_scratch):
            given = [*chosen, *(["from_scratch"] if self.from_scratch else [])]
            raise UsageError(f"{' and '.join(given)} are given; one way to train can be chosen")
        for name in ("epochs", "batch_size", "accumulate", "base_lr", "layer_decay", "lora"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise UsageError(f"{name} is {value}; expected a finite number above 0")
        for name in ("min_lr", "warmup_epochs", "weight_decay", "drop_path", "label_smoothing", "blocks"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise UsageError(f"{name} is {value}; expected 0 or more")
        if self.layer_decay is not None and self.layer_decay > 1:
            raise UsageError(f"layer_decay is {self.layer_decay}; expected a share up to 1")
        for name in ("drop_path", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and value >= 1:
                raise UsageError(f"{name} is {value}; expected a share below 1")

    @property
    def variant(self) -> str:
        """What is trained, in a word; empty for all of it."""
        if self.blocks is not None:
            return f"blocks{self.blocks}"
        if self.lora is not None:
            return f"lora{self.lora}"
        return "bitfit" if self.bitfit else "from-scratch" if self.from_scratch else ""

    def why_not(self, extractor: "Extractor") -> str | None:
        """See `EvaluationProtocol`."""
        from mae.training.device import why_no_precision

        if extractor.model is None or extractor.model.config is None:
            return f"{extractor.name} cannot be fine-tuned; that needs a model of this package"
        return why_no_precision(self.precision, next(extractor.model.parameters()).device)

    def run(self, task: "LabelledTask") -> ProtocolResult:
        """Train and evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common import finetuning
        from mae.models.classifier import ImageClassifier

        prepared = self.prepared(task)
        training, classifier = prepared.train(), prepared.module
        assert isinstance(classifier, ImageClassifier)
        file = training.folder / finetuning.CLASSIFIER_FILE
        task.world.from_main(lambda: finetuning.save(file, classifier, task, from_scratch=self.from_scratch))
        return self._result(task, classifier, self._resolved_for(task), training)

    def prepared(self, task: "LabelledTask") -> "PreparedTraining":
        """The training that `run` does.

        Raises:
            UsageError: images that RandAugment is not made for, or a batch of more images than there are.
        """
        from mae.evaluation.common import finetuning
        from mae.evaluation.common.classified_images import ClassifiedImages
        from mae.evaluation.common.metrics import top_k_accuracy
        from mae.evaluation.common.supervised import PreparedTraining
        from mae.modalities.images.crop import Augmentation

        self._check_images(task)
        resolved = self._resolved_for(task)
        classifier = finetuning.make_classifier(
            task, drop_path=resolved["drop_path"], label_smoothing=self.label_smoothing, from_scratch=self.from_scratch
        )
        finetuning.freeze(classifier, blocks=self.blocks, lora=self.lora, bitfit=self.bitfit)
        plan = self._plan(task, resolved)
        return PreparedTraining(
            task=task,
            plan=plan,
            module=classifier.train(),
            optimizer=finetuning.make_optimizer(classifier, resolved["layer_decay"], weight_decay=self.weight_decay),
            batches=ClassifiedImages(
                task=task,
                batch_size=plan.batch_size,
                accumulate=plan.accumulate,
                augmentation=Augmentation(scale=(0.08, 1.0), rand_augment=self.augment),
                prepare=lambda batch: finetuning.prepare(batch, task, erasing=self.augment, mixing=self.mixing),
            ),
            evaluate=lambda: {"test": top_k_accuracy(finetuning.rank(task, classifier, top=1), task.labels("test"))},
        )

    def _check_images(self, task: "LabelledTask") -> None:
        images = task.images("train")
        if self.augment and not takes_augmentation(images):
            raise UsageError(
                f"{images.name} has images of {images.channels} channels and type {images.dtype}; RandAugment is made "
                "for uint8 images of 1 or 3 channels: give --no-augment"
            )

    def _resolved_for(self, task: "LabelledTask") -> dict[str, Any]:
        assert task.extractor.model is not None and task.extractor.model.config is not None
        return self._resolved(task.extractor.model.config, images=len(task.images("train").readable))

    def _resolved(self, config: "MethodConfig", *, images: int) -> dict[str, Any]:
        """Options that follow the size of the model and the number of images where they are None."""
        from mae.evaluation.common.supervised import largest_batch

        large, huge = config.encoder.embed_dim >= 1024, config.encoder.embed_dim >= 1280
        epochs = self.epochs if self.epochs is not None else 50.0 if large else 100.0
        # What is added or is small learns at one rate: the papers of LoRA and BitFit have no layer decay.
        alike = self.from_scratch or self.lora is not None or self.bitfit
        layer_decay = 1.0 if alike else 0.75 if large else 0.65
        return {
            "epochs": epochs,
            "batch_size": largest_batch(self.batch_size, 1024, images=images, steps_per_epoch=32),
            "base_lr": self.base_lr if self.base_lr is not None else 1e-3 if large else 5e-4,
            "warmup_epochs": min(5.0, epochs / 10) if self.warmup_epochs is None else self.warmup_epochs,
            "layer_decay": layer_decay if self.layer_decay is None else self.layer_decay,
            "drop_path": self.drop_path if self.drop_path is not None else 0.3 if huge else 0.2 if large else 0.1,
        }

    def _plan(self, task: "LabelledTask", resolved: Mapping[str, Any]) -> "SupervisedPlan":
        from mae.evaluation.common.supervised import SupervisedPlan
        from mae.training.device import choose_precision

        return SupervisedPlan(
            name=self.name,
            epochs=resolved["epochs"],
            batch_size=resolved["batch_size"],
            accumulate=self.accumulate,
            rate=resolved["base_lr"] * resolved["batch_size"] / 256,
            min_rate=self.min_lr,
            warmup_epochs=resolved["warmup_epochs"],
            precision=choose_precision(self.precision, task.device),
            identity={**asdict(self), **resolved},
        )

    def _result(
        self,
        task: "LabelledTask",
        classifier: "ImageClassifier",
        resolved: Mapping[str, Any],
        training: "SupervisedTraining",
    ) -> ProtocolResult:
        from mae.evaluation.common import finetuning
        from mae.evaluation.common.metrics import top_k_accuracy
        from mae.report.terminal.console import duration

        labels, ranking = task.labels("test"), finetuning.rank(task, classifier, top=_TOP)
        top1, top5 = top_k_accuracy(ranking[:, :1], labels), top_k_accuracy(ranking, labels)
        trained = sum(p.numel() for p in classifier.parameters() if p.requires_grad)
        everything = sum(p.numel() for p in classifier.parameters())
        name = self.variant.replace("-", " ") or "all of the encoder"
        return ProtocolResult(
            numbers={
                "top1": top1,
                "top5": top5,
                "trained_parameters": trained,
                "resolved": dict(resolved),
                "training": {"folder": str(training.folder), "seconds": training.seconds, "curve": training.curve},
            },
            header=("trained", "top-1", f"top-{ranking.shape[1]}", "parameters"),
            rows=((name, f"{top1:.1%}", f"{top5:.1%}", f"{trained:,} of {everything:,}"),),
            note=f"After {resolved['epochs']:g} epochs in batches of {resolved['batch_size']}, "
            f"{duration(training.seconds)} of training. The last weights are evaluated, not the best; they are in "
            f"{training.folder / finetuning.CLASSIFIER_FILE}.",
            ranking=ranking,
            curve=training.curve,
            variant=self.variant,
        )


def takes_augmentation(images: "ImageSet") -> bool:
    """Whether RandAugment is made for these images."""
    return images.channels in (1, 3) and images.dtype == "uint8"
