"""The parts of fine-tuning: the classifier, what of it is trained, its batches, its file."""

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.evaluation.common.classified_images import LabelledBatch
from mae.evaluation.common.supervised import Task
from mae.evaluation.common.task import LabelledTask
from mae.evaluation.extractors.batches import computed_batches
from mae.layers.lora import merge_lora
from mae.modalities.images.mixup import erase, mix
from mae.models.classifier import (
    Classifier,
    ImageClassifier,
    build_classifier,
    train_biases,
    train_last_blocks,
    train_lora,
)
from mae.models.file import model_metadata, save_model
from mae.models.fingerprint import output_fingerprint
from mae.models.inference import undisturbed
from mae.models.pretrained import PretrainedEncoder
from mae.randomness import Stream, seeds
from mae.training.optimizer import AdamW, layered_groups

CLASSIFIER_FILE, SEGMENTER_FILE, DETECTOR_FILE = (
    f"{kind}.safetensors" for kind in ("classifier", "segmenter", "detector")
)
"""The trained model, in the folder of its training."""


def make_classifier(
    task: LabelledTask, *, drop_path: float, label_smoothing: float, from_scratch: bool
) -> ImageClassifier:
    """The task's encoder, or a fresh one like it, under a fresh head; on the task's device, drawn by its seed."""
    model = task.extractor.model
    assert model is not None and model.config is not None
    torch.manual_seed(task.seed)
    return build_classifier(
        model.config,
        num_classes=task.num_classes,
        drop_path=drop_path,
        label_smoothing=label_smoothing,
        pretrained=None if from_scratch else model,
        class_names=task.class_names,
        rank=task.world.rank,
        world=task.world.size,
    ).to(task.device)


def freeze(classifier: ImageClassifier, *, blocks: int | None, lora: int | None, bitfit: bool) -> None:
    """Leave only a part to be trained: the last blocks, LoRA of a rank, or biases; all of it where none is given."""
    if blocks is not None:
        train_last_blocks(classifier, blocks)
    elif lora is not None:
        train_lora(classifier, lora)
    elif bitfit:
        train_biases(classifier)


def make_optimizer(model: PretrainedEncoder, layer_decay: float, *, weight_decay: float) -> AdamW:
    """AdamW whose learning rate falls from each block to the one below it by `layer_decay`."""
    groups = layered_groups(
        model,
        layer_of=model.layer_of,
        num_layers=model.num_layers,
        decay=layer_decay,
        weight_decay=weight_decay,
        undecayed=model.undecayed,
    )
    return AdamW(groups, lr=0.0, fused=True)


def prepare(batch: LabelledBatch, task: LabelledTask, *, erasing: bool, mixing: bool) -> Mapping[str, Any]:
    """What the classifier's forward takes: the batch, erased and mixed as asked."""
    images = erase(batch.images, batch.keys) if erasing else batch.images
    if not mixing:
        return {"images": images, "target": batch.labels}
    before = None
    if task.world.size > 1:
        last, last_label = (task.world.whole_batch(rows[-1:]) for rows in (images, batch.labels))
        before = (last[task.world.rank - 1], last_label[task.world.rank - 1])
    seed = seeds(batch.first_key, Stream.MIX)[0]
    images, target = mix(images, batch.labels, num_classes=task.num_classes, seed=seed, before=before)
    return {"images": images, "target": target}


def save(file: Path, model: PretrainedEncoder, task: Task, *, from_scratch: bool = False) -> None:
    """Write what was trained as a model file: LoRA is merged into the weights, and the licence goes along."""
    plain = deepcopy(model)
    if isinstance(plain, ImageClassifier):
        merge_lora(plain)
    metadata = model_metadata(
        plain,
        licence=None if from_scratch else task.extractor.licence,
        origin={
            "init_from": None if from_scratch else Path(task.extractor.name).name,
            "data_source": Path(task.data.train.source.name).name,
        },
        probe=output_fingerprint(plain),
    )
    save_model(plain, file, metadata)


def rank(task: LabelledTask, classifier: Classifier, *, top: int) -> Int64[Tensor, "m top"]:
    """The classes of each readable test image by falling score, at most as many as there are."""
    top = min(top, task.num_classes)
    batches = computed_batches(
        task.images("test"),
        task.extractor.preprocessing,
        lambda images, _: {"ranked": classifier(images).topk(top, dim=1).indices.cpu()},
        device=task.device,
        world=task.world,
    )
    with undisturbed(classifier):
        return torch.cat([batch["ranked"] for batch in batches])
