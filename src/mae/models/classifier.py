"""An encoder with a head that names classes, for fine-tuning, and what of it trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mae.core.method import MethodConfig
from mae.encoders.vit import Features
from mae.errors import UsageError
from mae.layers.attention_pooling import AttentionPooling
from mae.layers.lora import add_lora
from mae.layers.precision import without_autocast
from mae.layers.score_pooling import ScorePooling
from mae.layers.transformer import LAYER_NORM_EPS
from mae.models.given_images import Images
from mae.models.inference import undisturbed
from mae.models.pretrained import PretrainedEncoder, told_classes
from mae.models.trainable import build_trainable_encoder

_HEAD_STD = 2e-5

FEATURES = ("cls", "mean", "cls+mean")
"""What a linear probe can be trained on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassifierOutput:
    """What a classifier says of a labelled batch.

    Attributes:
        loss: what to minimise.
        terms: its named parts.
        logits: unnormalised log-probabilities of the classes.
    """

    loss: Float[Tensor, ""]
    terms: Mapping[str, Float[Tensor, ""]]
    logits: Float[Tensor, "B K"]


class Classifier(PretrainedEncoder):
    """An encoder under something that names classes; called on images it gives logits.

    Args:
        encoder: sees whole images.
        num_classes: classes to tell apart, at least 2.
        class_names: of all of them, in the order of the logits; empty: not known.
        config: what the encoder was built from; None for one put together by hand.

    Attributes:
        pooling: makes one vector `[B, D]` of patch tokens `[B, N, D]`, as it learned to; None where nothing did.

    Raises:
        UsageError: fewer than two classes, or as many names as there are not.
    """

    def __init__(
        self, *, encoder: Any, num_classes: int, class_names: Sequence[str], config: MethodConfig | None
    ) -> None:
        super().__init__(encoder=encoder, config=config)
        if num_classes < 2:
            raise UsageError(f"num_classes is {num_classes}; expected at least 2 classes to tell apart")
        if class_names and len(class_names) != num_classes:
            raise UsageError(f"there are {num_classes} classes and {len(class_names)} names; expected a name for each")
        self.num_classes = num_classes
        self.class_names = tuple(class_names)
        self.pooling: nn.Module | None = None

    def classify(self, features: Features) -> Float[Tensor, "B K"]:
        """Logits of what the encoder says of images."""
        raise NotImplementedError

    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B K"]]:
        """The mean of the patch tokens of normalised images, and the logits: what a model is known again by."""
        features = self.encode(images)
        return features.mean, self.classify(features)

    def forward(self, images: Float[Tensor, "B C H W"]) -> Any:
        """Logits `[B, K]` of normalised images.

        Raises:
            UsageError: images of a wrong shape or size.
        """
        return self.classify(self.encode(images))

    def predict(self, images: Images) -> list[str]:
        """The most probable class of each image, by name; `class 0` and so on where the names are not known.

        Args:
            images: see `preprocess`, which makes what the model sees of them.

        Raises:
            UsageError: see `preprocess`.
        """
        names = self.class_names or [f"class {number}" for number in range(self.num_classes)]
        return [names[number] for number in self.predict_proba(images).argmax(dim=1).tolist()]

    def predict_proba(self, images: Images) -> Float[Tensor, "B K"]:
        """The probability of each class for each image, on the CPU; a row adds up to 1. See `predict`."""
        with undisturbed(self):
            return self(self.preprocess(images)).float().softmax(dim=1).cpu()

    def _facts(self) -> list[tuple[str, str]]:
        return [*super()._facts(), ("classes", told_classes(self.num_classes, self.class_names))]


class LinearProbe(Classifier):
    """A linear classifier on what a frozen encoder says of an image, its final norm included.

    Args:
        encoder: sees whole images.
        feature: what the classifier is given: `cls`, `mean` or `cls+mean`, the two side by side.
        num_classes: see `Classifier`.
        class_names: see `Classifier`.
        config: see `Classifier`.

    Raises:
        UsageError: see `Classifier`; another feature, or one that the encoder does not give.
    """

    def __init__(
        self,
        *,
        encoder: Any,
        feature: str,
        num_classes: int,
        class_names: Sequence[str] = (),
        config: MethodConfig | None = None,
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, class_names=class_names, config=config)
        if feature not in FEATURES or ("cls" in feature and not encoder.num_prefix):
            raise UsageError(f"a probe on the feature {feature!r}; expected one that the encoder gives of {FEATURES}")
        self.feature = feature
        self.head = nn.Linear(encoder.embed_dim * len(feature.split("+")), num_classes)

    def classify(self, features: Features) -> Float[Tensor, "B K"]:
        """See `Classifier`."""
        return self.head(torch.cat([getattr(features, name) for name in self.feature.split("+")], dim=-1))


class AttentiveProbe(Classifier):
    """`AttentionPooling` on the patch tokens of a frozen encoder, its final norm included.

    Args:
        encoder: sees whole images.
        num_classes: see `Classifier`.
        class_names: see `Classifier`.
        config: see `Classifier`.

    Raises:
        UsageError: see `Classifier`.
    """

    def __init__(
        self, *, encoder: Any, num_classes: int, class_names: Sequence[str] = (), config: MethodConfig | None = None
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, class_names=class_names, config=config)
        self.head = AttentionPooling(dim=encoder.embed_dim, num_classes=num_classes)

    def classify(self, features: Features) -> Float[Tensor, "B K"]:
        """See `Classifier`."""
        return self.head(features.patches)


class PooledProbe(Classifier):
    """`ScorePooling` of the patch tokens of a frozen encoder, its final norm included, under a linear classifier.

    Args:
        encoder: sees whole images.
        num_classes: see `Classifier`.
        class_names: see `Classifier`.
        config: see `Classifier`.

    Raises:
        UsageError: see `Classifier`.
    """

    pooling: ScorePooling

    def __init__(
        self, *, encoder: Any, num_classes: int, class_names: Sequence[str] = (), config: MethodConfig | None = None
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, class_names=class_names, config=config)
        self.pooling = ScorePooling(encoder.embed_dim)
        self.head = nn.Linear(encoder.embed_dim, num_classes)

    def classify(self, features: Features) -> Float[Tensor, "B K"]:
        """See `Classifier`."""
        return self.head(self.pooling(features.patches))

    def pool(self, images: Images) -> Float[Tensor, "B D"]:
        """One vector for each image, on the CPU: its patch tokens as the probe learned to weigh them.

        Args:
            images: see `preprocess`.

        Raises:
            UsageError: see `preprocess`.
        """
        with undisturbed(self):
            return self.pooling(self.encode(self.preprocess(images)).patches).float().cpu()


class ImageClassifier(Classifier):
    """The mean of the patch tokens, a layer norm, a linear head (He et al. 2021, A.1; official fine-tuning).

    The encoder's own final norm is taken away, from what `encode` gives too: the new one stands behind the mean.

    Args:
        encoder: its final norm is replaced in place.
        num_classes: classes to tell apart, at least 2.
        label_smoothing: share of each target spread evenly over all classes, from 0 to 1.
        class_names: of all of them, in the order of the logits; empty: not known.
        config: what the encoder was built from, and what gives the new norm its epsilon; None for one put together by
            hand.

    Raises:
        UsageError: fewer than two classes, or as many names as there are not.
    """

    def __init__(
        self,
        *,
        encoder: Any,
        num_classes: int,
        label_smoothing: float,
        class_names: Sequence[str] = (),
        config: MethodConfig | None = None,
    ) -> None:
        super().__init__(encoder=encoder, num_classes=num_classes, class_names=class_names, config=config)
        encoder.norm = nn.Identity()
        self.label_smoothing = label_smoothing
        eps = LAYER_NORM_EPS if config is None else config.encoder.norm_eps
        self.fc_norm = nn.LayerNorm(encoder.embed_dim, eps=eps)
        self.head = nn.Linear(encoder.embed_dim, num_classes)
        nn.init.trunc_normal_(self.head.weight, std=_HEAD_STD)
        nn.init.zeros_(self.head.bias)

    def classify(self, features: Features) -> Float[Tensor, "B K"]:
        """See `Classifier`."""
        return self.head(self.fc_norm(features.mean))

    @overload
    def forward(self, images: Float[Tensor, "B C H W"], target: None = None) -> Float[Tensor, "B K"]: ...

    @overload
    def forward(
        self, images: Float[Tensor, "B C H W"], target: Float[Tensor, "B K"] | Int64[Tensor, " B"]
    ) -> ClassifierOutput: ...

    def forward(
        self, images: Float[Tensor, "B C H W"], target: Float[Tensor, "B K"] | Int64[Tensor, " B"] | None = None
    ) -> Float[Tensor, "B K"] | ClassifierOutput:
        """Logits; with a target, also its smoothed cross-entropy, in float32.

        Args:
            images: normalised images.
            target: the class of each image, or a probability for each class.

        Raises:
            UsageError: images of a wrong shape or size.
        """
        logits = self.classify(self.encode(images))
        if target is None:
            return logits
        with without_autocast(images.device):
            loss = cross_entropy(logits.float(), target, label_smoothing=self.label_smoothing)
        return ClassifierOutput(loss=loss, terms={"cross_entropy": loss}, logits=logits)


def build_classifier(
    config: MethodConfig,
    *,
    num_classes: int,
    drop_path: float,
    label_smoothing: float,
    pretrained: PretrainedEncoder | None,
    class_names: Sequence[str] = (),
    rank: int = 0,
    world: int = 1,
) -> ImageClassifier:
    """A classifier all of which trains, from a pre-trained encoder or from scratch; see `build_trainable_encoder`.

    Args:
        config: the encoder and the size of the images.
        num_classes: see `ImageClassifier`.
        drop_path: see `make_blocks`; 0 for none.
        label_smoothing: see `ImageClassifier`.
        pretrained: whose encoder's weights to copy; None: fresh ones from PyTorch's global generator.
        class_names: see `ImageClassifier`.
        rank: see `DropPath`.
        world: see `DropPath`.

    Raises:
        UsageError: values that do not fit each other, or a pre-trained encoder of other sizes.
    """
    config, encoder = build_trainable_encoder(
        config, pretrained=pretrained, drop_path=drop_path, rank=rank, world=world
    )
    return ImageClassifier(
        encoder=encoder,
        num_classes=num_classes,
        label_smoothing=label_smoothing,
        class_names=class_names,
        config=config,
    )


def train_last_blocks(classifier: ImageClassifier, k: int) -> None:
    """Let the last `k` blocks, norm and head train and freeze the rest (He et al. 2021, "Partial fine-tuning").

    Frozen blocks drop no paths: what they say of an image never changes.

    Raises:
        UsageError: `k` is negative or above the number of blocks.
    """
    blocks = classifier.encoder.blocks
    if not 0 <= k <= len(blocks):
        raise UsageError(f"asked to train the last {k} blocks; the encoder has {len(blocks)}: use 0 to {len(blocks)}")
    classifier.requires_grad_(False)
    frozen = len(blocks) - k
    for block in blocks[:frozen]:
        block.drop_path = nn.Identity()
    for part in (blocks[frozen:], classifier.fc_norm, classifier.head):
        part.requires_grad_(True)


def train_biases(classifier: ImageClassifier) -> None:
    """Let the biases, those of layer norms among them, and the head train; freeze the rest (Ben Zaken et al. 2021)."""
    for name, parameter in classifier.named_parameters():
        parameter.requires_grad_(name.endswith(".bias") or name.startswith("head."))


def train_lora(classifier: ImageClassifier, rank: int) -> None:
    """Let low-rank products in the attention train beside norm and head; freeze the rest (Hu et al. 2021).

    Raises:
        UsageError: see `add_lora`.
    """
    add_lora(classifier.encoder, rank=rank)
