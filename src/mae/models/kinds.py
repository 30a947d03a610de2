"""The kinds of model that a file may hold: what is said of each, and how it is built from that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.models.build import build_encoder, build_model, build_pretrained_encoder
from mae.models.classifier import (
    AttentiveProbe,
    Classifier,
    ImageClassifier,
    LinearProbe,
    PooledProbe,
    build_classifier,
)
from mae.models.detector import DetectionHead, Detector, build_detector
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.pretrained import PretrainedEncoder
from mae.models.segmenter import MapHead, Segmenter
from mae.randomness import drawing_from

MASKED_AUTOENCODER, ENCODER = "masked_autoencoder", "encoder"
CLASSIFIER, LINEAR_PROBE, ATTENTIVE_PROBE, POOLED_PROBE = (
    "classifier",
    "linear_probe",
    "attentive_probe",
    "pooled_probe",
)
CLASSIFIERS: Mapping[str, type[Classifier]] = {
    CLASSIFIER: ImageClassifier,
    LINEAR_PROBE: LinearProbe,
    ATTENTIVE_PROBE: AttentiveProbe,
    POOLED_PROBE: PooledProbe,
}
SEGMENTER, DETECTOR = "segmenter", "detector"
WITH_CLASSES = (*CLASSIFIERS, SEGMENTER)
KINDS = (MASKED_AUTOENCODER, ENCODER, *WITH_CLASSES, DETECTOR)
"""Kinds of model that a file may hold."""
_MAX_CLASSES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Classes:
    """What a head tells apart.

    Attributes:
        count: how many.
        names: in the order of the logits; empty: not known.
        feature: what a linear probe is given; empty for the head of a fine-tuned encoder.
        head: of a segmenter.

    Raises:
        UsageError: a count that no head has.
    """

    count: int
    names: tuple[str, ...] = ()
    feature: str = ""
    head: MapHead | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.count <= _MAX_CLASSES:
            raise UsageError(f"count of classes is {self.count}; expected 2 to {_MAX_CLASSES:,}")


@dataclass(frozen=True, kw_only=True)
class ObjectsFound:
    """What a detector finds.

    Attributes:
        names: of the classes of objects.
        head: of the detector.
    """

    names: tuple[str, ...]
    head: DetectionHead


def build(
    kind: str, config: MethodConfig, classes: Classes | None = None, found: ObjectsFound | None = None
) -> PretrainedEncoder:
    """A model of a kind that a file may hold, with fresh weights from PyTorch's global generator.

    Args:
        kind: one of the kinds.
        config: of the model.
        classes: of a classifier or a segmenter.
        found: what a detector finds, and how.

    Raises:
        UsageError: values that do not fit each other.
    """
    if kind == DETECTOR:
        if found is None:
            raise UsageError("a detector's head is not described; expected what it finds, and how")
        return build_detector(config, found.head, class_names=found.names, pretrained=None)
    if kind in (LINEAR_PROBE, ATTENTIVE_PROBE, POOLED_PROBE):
        assert classes is not None
        head: dict[str, Any] = {"num_classes": classes.count, "class_names": classes.names, "config": config}
        if kind == LINEAR_PROBE:
            return LinearProbe(encoder=build_encoder(config), feature=classes.feature, **head)
        return (PooledProbe if kind == POOLED_PROBE else AttentiveProbe)(encoder=build_encoder(config), **head)
    if kind == CLASSIFIER:
        assert classes is not None
        return build_classifier(
            config,
            num_classes=classes.count,
            class_names=classes.names,
            drop_path=0.0,
            label_smoothing=0.0,
            pretrained=None,
        )
    if kind == SEGMENTER:
        if classes is None or classes.head is None:
            raise UsageError("the head of a segmenter is not described; expected its kind, layers and channels")
        return Segmenter(
            encoder=build_encoder(config),
            head=classes.head,
            num_classes=classes.count,
            class_names=classes.names,
            config=config,
        )
    return build_model(config) if kind == MASKED_AUTOENCODER else build_pretrained_encoder(config)


def rebuilt(like: PretrainedEncoder, config: MethodConfig, weights: Mapping[str, Tensor]) -> PretrainedEncoder:
    """A model of the same kind with these weights as float32, on the CPU, in evaluation mode."""
    with drawing_from(0):  # overwritten below; leaves the caller's random state alone
        model = build(kind_of(like), config, classes_of(like), objects_found_by(like))
    model.load_state_dict(weights)
    return model.eval()


def kind_of(model: PretrainedEncoder) -> str:
    """Which of the kinds a model is."""
    for kind, type_ in CLASSIFIERS.items():
        if isinstance(model, type_):
            return kind
    if isinstance(model, Detector):
        return DETECTOR
    if isinstance(model, Segmenter):
        return SEGMENTER
    return MASKED_AUTOENCODER if isinstance(model, MaskedAutoencoder) else ENCODER


def classes_of(model: PretrainedEncoder) -> Classes | None:
    """What a classifier or a segmenter tells apart; None of another model."""
    if isinstance(model, Segmenter):
        return Classes(count=model.num_classes, names=model.class_names, head=model.described)
    if not isinstance(model, Classifier):
        return None
    feature = model.feature if isinstance(model, LinearProbe) else ""
    return Classes(count=model.num_classes, names=model.class_names, feature=feature)


def objects_found_by(model: PretrainedEncoder) -> ObjectsFound | None:
    """What a detector finds; None of another model."""
    return ObjectsFound(names=model.class_names, head=model.described) if isinstance(model, Detector) else None
