"""Fine-tuning the encoder end to end or in part (He et al. 2021, A.1 and section 5, "Partial fine-tuning")."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from mae.data.augmentation import Augmentation
from mae.data.mixing import erase, mix
from mae.errors import UsageError
from mae.evaluation.bench import Bench, Outcome
from mae.evaluation.features import computed_batches
from mae.evaluation.scores import top_k_accuracy
from mae.evaluation.supervised import (
    LabelledBatch,
    SupervisedPlan,
    SupervisedTraining,
    largest_batch,
    train_with_labels,
)
from mae.layers.lora import merge_lora
from mae.models.classifier import (
    ImageClassifier,
    build_classifier,
    train_biases,
    train_last_blocks,
    train_lora,
)
from mae.models.config import ModelConfig
from mae.models.probe import probe_of
from mae.models.storage import model_metadata, save_model
from mae.options import shown
from mae.randomness import Stream, seeds
from mae.report.console import duration
from mae.report.inference import undisturbed
from mae.training.device import choose_precision
from mae.training.optimizer import AdamW, layered_groups

CLASSIFIER_FILE = "classifier.safetensors"
"""The trained classifier, in the folder of its training."""

_TOP = 5


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """The official recipe; what is None follows the size of the model, as there.

    Mean pooling with a new norm, a head that starts near zero, trained positions, layer-wise decay of the rate,
    stochastic depth, RandAugment, mixup or cutmix on every batch, random erasing, label smoothing.

    Raises:
        UsageError: values out of range, or more than one way to train a part.
    """

    epochs: Annotated[float | None, shown("100; 50 for large and huge models", "E")] = None
    """Passes over the training images."""
    batch_size: Annotated[int | None, shown("1024; less where an epoch had fewer than 32 steps", "B")] = None
    """Images per optimizer step."""
    accumulate: int = 1
    """Parts a batch is computed in, to save memory; mixup and cutmix then mix within a part."""
    base_lr: Annotated[float | None, shown("5e-4; 1e-3 for large and huge models", "RATE")] = None
    """Peak rate for a batch of 256."""
    min_lr: float = 1e-6
    """Rate at the end of the cosine."""
    warmup_epochs: Annotated[float | None, shown("5, at most a tenth of the run", "E")] = None
    """Passes over which the rate rises from 0."""
    weight_decay: float = 0.05
    """AdamW's weight decay, not on biases, norms, positions and class token."""
    layer_decay: Annotated[
        float | None, shown("0.65; large and huge models 0.75; 1 from scratch, for LoRA and BitFit", "SHARE")
    ] = None
    """Share of the rate from each block to the one below it."""
    drop_path: Annotated[float | None, shown("0.1; large models 0.2, huge 0.3", "SHARE")] = None
    """Share of residual branches dropped in the last block."""
    augment: bool = True
    """RandAugment and random erasing; off for images of other than 1 or 3 channels of 8 bits."""
    mixing: bool = True
    """Mixup 0.8 or cutmix 1.0 on every batch."""
    label_smoothing: float = 0.1
    """Share of each target spread evenly over all classes."""
    blocks: Annotated[int | None, shown("all of them", "K")] = None
    """Train the last so many blocks alone, with norm and head; 0: these two alone."""
    lora: Annotated[int | None, shown("none", "RANK")] = None
    """Train low-rank products of this rank in the attention alone, with norm and head."""
    bitfit: bool = False
    """Train biases and the head alone."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, fp32 elsewhere; bf16 is faster on some processors too."""
    from_scratch: bool = False
    """Start from fresh weights, without layer decay: what the pre-training is worth shows beside it."""

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
        for name in ("layer_decay", "label_smoothing"):
            value = getattr(self, name)
            if value is not None and value > 1:
                raise UsageError(f"{name} is {value}; expected a share up to 1")
        if self.drop_path is not None and self.drop_path >= 1:
            raise UsageError(f"drop_path is {self.drop_path}; expected a share below 1")

    @property
    def variant(self) -> str:
        """What is trained, in a word; empty for everything."""
        if self.blocks is not None:
            return f"blocks{self.blocks}"
        if self.lora is not None:
            return f"lora{self.lora}"
        return "bitfit" if self.bitfit else "from-scratch" if self.from_scratch else ""

    def run(self, bench: Bench) -> Outcome:
        """Train and judge; see `EvaluationProtocol`."""
        model = bench.extractor.model
        if model is None or model.config is None:
            raise UsageError(f"{bench.extractor.name} cannot be fine-tuned: that needs a model of this package")
        images = bench.images("train")
        if self.augment and (images.channels not in (1, 3) or images.dtype != np.uint8):
            raise UsageError(
                f"{images.name} has images of {images.channels} channels and type {images.dtype}; RandAugment is made "
                "for uint8 images of 1 or 3 channels: give --no-augment"
            )
        settled = self._settled(model.config, images=len(images.readable))
        torch.manual_seed(bench.seed)
        classifier = build_classifier(
            model.config,
            num_classes=bench.num_classes,
            drop_path=settled["drop_path"],
            label_smoothing=self.label_smoothing,
            pretrained=None if self.from_scratch else model,
            class_names=bench.class_names,
        ).to(bench.device)
        self._freeze(classifier)
        optimizer = AdamW(
            layered_groups(
                classifier,
                layer_of=classifier.layer_of,
                num_layers=classifier.num_layers,
                decay=settled["layer_decay"],
                weight_decay=self.weight_decay,
                undecayed=classifier.undecayed,
            ),
            lr=0.0,
            fused=True,
        )
        plan = SupervisedPlan(
            name="finetune",
            epochs=settled["epochs"],
            batch_size=settled["batch_size"],
            accumulate=self.accumulate,
            rate=settled["base_lr"] * settled["batch_size"] / 256,
            min_rate=self.min_lr,
            warmup_epochs=settled["warmup_epochs"],
            augmentation=Augmentation(scale=(0.08, 1.0), rand_augment=self.augment),
            precision=choose_precision(self.precision, bench.device),
            identity={**asdict(self), **settled},
        )
        training = train_with_labels(
            bench,
            plan,
            classifier.train(),
            optimizer,
            prepare=lambda batch: self._prepare(batch, bench),
            look=lambda: {"test": top_k_accuracy(rank(bench, classifier, top=1), bench.labels("test"))},
        )
        file = training.folder / CLASSIFIER_FILE
        bench.world.from_main(lambda: _write(file, classifier, bench, from_scratch=self.from_scratch))
        return self._outcome(bench, classifier, settled, training)

    def _settled(self, config: ModelConfig, *, images: int) -> dict[str, Any]:
        """What is left to the size of the model and the number of images."""
        large, huge = config.embed_dim >= 1024, config.embed_dim >= 1280
        epochs = self.epochs if self.epochs is not None else 50.0 if large else 100.0
        # What is added or is small learns everywhere alike: the papers of LoRA and BitFit know no decay.
        alike = self.from_scratch or self.lora is not None or self.bitfit
        layer_decay = 1.0 if alike else 0.75 if large else 0.65
        return {
            "epochs": epochs,
            "batch_size": largest_batch(self.batch_size, 1024, images=images, steps_an_epoch=32),
            "base_lr": self.base_lr if self.base_lr is not None else 1e-3 if large else 5e-4,
            "warmup_epochs": min(5.0, epochs / 10) if self.warmup_epochs is None else self.warmup_epochs,
            "layer_decay": layer_decay if self.layer_decay is None else self.layer_decay,
            "drop_path": self.drop_path if self.drop_path is not None else 0.3 if huge else 0.2 if large else 0.1,
        }

    def _freeze(self, classifier: ImageClassifier) -> None:
        if self.blocks is not None:
            train_last_blocks(classifier, self.blocks)
        elif self.lora is not None:
            train_lora(classifier, self.lora)
        elif self.bitfit:
            train_biases(classifier)

    def _prepare(self, batch: LabelledBatch, bench: Bench) -> Mapping[str, Any]:
        images = erase(batch.images, batch.keys) if self.augment else batch.images
        if not self.mixing:
            return {"images": images, "target": batch.labels}
        before = None
        if bench.world.size > 1:
            last, last_label = (bench.world.whole_batch(rows[-1:]) for rows in (images, batch.labels))
            before = (last[bench.world.rank - 1], last_label[bench.world.rank - 1])
        seed = seeds(batch.first_key, Stream.MIX)[0]
        images, target = mix(images, batch.labels, num_classes=bench.num_classes, seed=seed, before=before)
        return {"images": images, "target": target}

    def _outcome(
        self, bench: Bench, classifier: ImageClassifier, settled: Mapping[str, Any], training: SupervisedTraining
    ) -> Outcome:
        labels = bench.labels("test")
        ranking = rank(bench, classifier, top=_TOP)
        top1, top5 = top_k_accuracy(ranking[:, :1], labels), top_k_accuracy(ranking, labels)
        trained = sum(p.numel() for p in classifier.parameters() if p.requires_grad)
        everything = sum(p.numel() for p in classifier.parameters())
        name = self.variant.replace("-", " ") or "all of the encoder"
        return Outcome(
            result={
                "top1": top1,
                "top5": top5,
                "trained_parameters": trained,
                "settled": dict(settled),
                "training": {"folder": str(training.folder), "seconds": training.seconds, "curve": training.curve},
            },
            header=("trained", "top-1", f"top-{ranking.shape[1]}", "parameters"),
            rows=((name, f"{top1:.1%}", f"{top5:.1%}", f"{trained:,} of {everything:,}"),),
            note=f"After {settled['epochs']:g} epochs in batches of {settled['batch_size']}, "
            f"{duration(training.seconds)} of training. The last weights are judged, not the best; they are in "
            f"{training.folder / CLASSIFIER_FILE}.",
            ranking=ranking,
            curve=training.curve,
            variant=self.variant,
        )


def _write(file: Path, classifier: ImageClassifier, bench: Bench, *, from_scratch: bool) -> None:
    """The classifier as a model's file: what LoRA learned is added to the weights, and the licence goes along."""
    plain = deepcopy(classifier)
    merge_lora(plain)
    metadata = model_metadata(
        plain,
        licence=None if from_scratch else bench.extractor.licence,
        origin={
            "init_from": None if from_scratch else Path(bench.extractor.name).name,
            "data_source": Path(bench.data.train.source.name).name,
        },
        probe=probe_of(plain),
    )
    save_model(plain, file, metadata)


def rank(bench: Bench, classifier: ImageClassifier, *, top: int) -> Tensor:
    """The classes of each readable test image by falling score, `[m, top]`."""
    top = min(top, bench.num_classes)
    batches = computed_batches(
        bench.images("test"),
        bench.extractor.preprocessing,
        lambda images, _: {"ranked": classifier.logits(images).topk(top, dim=1).indices.cpu()},
        device=bench.device,
        world=bench.world,
    )
    with undisturbed(classifier):
        return torch.cat([batch["ranked"] for batch in batches])
