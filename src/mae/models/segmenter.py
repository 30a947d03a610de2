"""An encoder with a head that tells the class of each pixel."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.nn.functional import cross_entropy, interpolate

from mae.core.method import MethodConfig
from mae.encoders.vit import Features
from mae.errors import UsageError
from mae.layers.map_heads import LinearMapHead, UPerNetHead
from mae.layers.precision import without_autocast
from mae.layers.together import num_together
from mae.models.given_images import Images, finite, given_images, whole
from mae.models.inference import undisturbed
from mae.models.preprocess import preprocessing_of
from mae.models.pretrained import PretrainedEncoder, told_classes
from mae.models.sliding import map_of_classes
from mae.models.trainable import build_trainable_encoder

_IGNORED = 255
_CORNER = 4
_MOST_CLASSES, _MOST_CHANNELS, _MOST_LAYERS = 255, 8192, 64


@dataclass(frozen=True, kw_only=True)
class MapHead:
    """What stands on the encoder's maps.

    Attributes:
        kind: `linear`: DINOv3's linear layer, on maps of which the last is behind the encoder's norm; `upernet`: four
            maps as they leave their blocks.
        layers: numbers of the blocks whose maps it is given, from 0.
        channels: of UPerNet's pyramid.

    Raises:
        UsageError: values out of range.
    """

    kind: Literal["linear", "upernet"]
    layers: tuple[int, ...]
    channels: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= _MOST_LAYERS or (self.kind == "upernet" and len(self.layers) != 4):
            raise UsageError(f"layers of a {self.kind} head are {self.layers}; expected 4 for upernet, else 1 or more")
        if not (1 if self.kind == "upernet" else 0) <= self.channels <= _MOST_CHANNELS:
            raise UsageError(f"channels is {self.channels}; expected 1 to {_MOST_CHANNELS}")

    def build(self, dim: int, num_classes: int) -> nn.Module:
        """The head on maps of `dim` channels, with fresh weights from PyTorch's global generator."""
        if self.kind == "upernet":
            return UPerNetHead(dim, self.channels, num_classes)
        return LinearMapHead(len(self.layers) * dim, num_classes)


def linear_head(depth: int, layers: int = 1) -> MapHead:
    """A linear head on the last block, or on several.

    Raises:
        UsageError: the encoder has fewer blocks.
    """
    if not 1 <= layers <= depth:
        raise UsageError(f"layers is {layers}; expected 1 to {depth}, the number of the model's blocks")
    return MapHead(kind="linear", layers=tuple(range(depth - layers, depth)))


def upernet_head(depth: int, channels: int) -> MapHead:
    """UPerNet on blocks 3, 5, 7 and 11 of 12, as MAE is fine-tuned with it, and on those in their places of others."""
    places = (depth // 3, depth // 2, 2 * depth // 3, depth)
    return MapHead(kind="upernet", layers=tuple(max(place - 1, 0) for place in places), channels=channels)


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmenterOutput:
    """What a segmenter says of images with masks.

    Attributes:
        loss: what to minimise.
        terms: its named parts.
        logits: unnormalised log-probabilities of the classes of the pixels.
    """

    loss: Float[Tensor, ""]
    terms: Mapping[str, Float[Tensor, ""]]
    logits: Float[Tensor, "B K H W"]


class Segmenter(PretrainedEncoder):
    """An encoder under a head that tells the class of each pixel; called on images of the model's size it gives logits.

    Args:
        encoder: sees whole images; for UPerNet its final norm is taken away, in place.
        head: what stands on its maps.
        num_classes: classes to tell apart, 2 to 255.
        class_names: of all of them, in the order of the logits; empty: not known.
        config: what the encoder was built from; None for one put together by hand.

    Raises:
        UsageError: a number of classes out of range, as many names as there are not, or no such block.
    """

    def __init__(
        self,
        *,
        encoder: Any,
        head: MapHead,
        num_classes: int,
        class_names: Sequence[str] = (),
        config: MethodConfig | None = None,
    ) -> None:
        super().__init__(encoder=encoder, config=config)
        if not 2 <= num_classes <= _MOST_CLASSES:
            raise UsageError(f"num_classes is {num_classes}; expected 2 to {_MOST_CLASSES} classes to tell apart")
        if class_names and len(class_names) != num_classes:
            raise UsageError(f"there are {num_classes} classes and {len(class_names)} names; expected a name for each")
        depth = len(encoder.blocks)
        if not all(0 <= number < depth for number in head.layers):
            raise UsageError(f"layers of the head are {head.layers}; this encoder has blocks 0 to {depth - 1}")
        if head.kind == "upernet":
            encoder.norm = nn.Identity()
        self.described = head
        self.num_classes = num_classes
        self.class_names = tuple(class_names)
        self.head = head.build(encoder.embed_dim, num_classes)

    def _encoded(self, images: Float[Tensor, "B C H W"]) -> tuple[Features, list[Float[Tensor, "B D h w"]]]:
        """What the encoder says of normalised images, and the maps of it that the head is given."""
        numbers = self.described.layers
        features = self.encode(images, layers=numbers, as_map=True)
        last = features.patches.mT.unflatten(2, features.grid)  # behind the norm, if there is one
        final = len(self.encoder.blocks) - 1
        found = zip(numbers, features.layers, strict=True)
        return features, [last if number == final else inner for number, inner in found]

    def _facts(self) -> list[tuple[str, str]]:
        head = f"{self.described.kind} on blocks {', '.join(map(str, self.described.layers))}"
        return [*super()._facts(), ("head", head), ("classes", told_classes(self.num_classes, self.class_names))]

    def answer(self, images: Float[Tensor, "B C H W"]) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B K h w"]]:
        """The mean of the patch tokens of normalised images, and logits of a corner: what a model is known again by."""
        features, maps = self._encoded(images)
        # Of large maps UPerNet would take minutes in float64.
        return features.mean, self.head([found[:, :, :_CORNER, :_CORNER] for found in maps])

    @overload
    def forward(self, images: Float[Tensor, "B C H W"], target: None = None) -> Float[Tensor, "B K H W"]: ...

    @overload
    def forward(self, images: Float[Tensor, "B C H W"], target: Int64[Tensor, "B H W"]) -> SegmenterOutput: ...

    def forward(
        self, images: Float[Tensor, "B C H W"], target: Int64[Tensor, "B H W"] | None = None
    ) -> Float[Tensor, "B K H W"] | SegmenterOutput:
        """Logits of each pixel; with the classes of the pixels, 255 where none counts, also their cross-entropy.

        Raises:
            UsageError: images of a wrong shape or size.
        """
        return told(self.head(self._encoded(images)[1]), images, target)

    def predict(self, images: Images) -> list[UInt8[Tensor, "H W"]]:
        """The class of each pixel of each image, in its own size, on the CPU; see `map_of_classes`.

        Args:
            images: one or several: files, images of Pillow, arrays `[H, W, C]` or tensors `[C, H, W]` of pixel values
                as in the files, of any sizes.

        Raises:
            UsageError: other channels or types than the model's, or values that are not finite; a model without channel
                statistics.
            MAEError: a file that is no whole image, or an image too lengthy.
        """
        wanted = preprocessing_of(self.config)
        weights = next(self.parameters())
        given = given_images(images, wanted)
        wholes = [finite(whole(image), image, wanted) for image in given]
        with undisturbed(self):
            return [
                map_of_classes(image, wanted, lambda cut: self(cut.to(weights)), device=weights.device)
                for image in wholes
            ]


def told(
    scores: Float[Tensor, "B K h w"], images: Float[Tensor, "B C H W"], target: Int64[Tensor, "B H W"] | None
) -> Float[Tensor, "B K H W"] | SegmenterOutput:
    """Logits in the size of the images; with their classes, also the cross-entropy in float32.

    It is the mean over the pixels that count, of all processes together, so that it does not depend on how many there
    are.
    """
    logits = interpolate(scores, images.shape[-2:], mode="bilinear", align_corners=False)
    if target is None:
        return logits
    counted = (target != _IGNORED).sum()
    processes = num_together()
    if processes > 1:
        all_reduce(counted)
    with without_autocast(images.device):
        total = cross_entropy(logits.float(), target, ignore_index=_IGNORED, reduction="sum")
    loss = total * processes / counted.clamp(min=1)
    return SegmenterOutput(loss=loss, terms={"cross_entropy": loss}, logits=logits)


def build_segmenter(
    config: MethodConfig,
    *,
    head: MapHead,
    num_classes: int,
    drop_path: float,
    pretrained: PretrainedEncoder | None,
    class_names: Sequence[str] = (),
    rank: int = 0,
    world: int = 1,
) -> Segmenter:
    """A segmenter all of which trains, from a pre-trained encoder or from scratch; see `build_trainable_encoder`.

    Args:
        config: the encoder and the size of the images.
        head: what stands on its maps.
        num_classes: see `Segmenter`.
        drop_path: see `make_blocks`; 0 for none.
        pretrained: whose encoder's weights to copy; None: fresh ones from PyTorch's global generator.
        class_names: see `Segmenter`.
        rank: see `DropPath`.
        world: see `DropPath`.

    Raises:
        UsageError: values that do not fit each other, or a pre-trained encoder of other sizes.
    """
    config, encoder = build_trainable_encoder(
        config, pretrained=pretrained, drop_path=drop_path, rank=rank, world=world
    )
    return Segmenter(encoder=encoder, head=head, num_classes=num_classes, class_names=class_names, config=config)
