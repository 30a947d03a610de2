"""An encoder under torchvision's Faster or Mask R-CNN (ViTDet: Li et al. 2022), which finds objects."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import overload

import torch
from jaxtyping import Bool, Float, Float32
from torch import Tensor

from mae.core.method import MethodConfig
from mae.core.types import Grid
from mae.encoders.map_vit import MapViT
from mae.errors import UsageError
from mae.layers.feature_pyramid import SimpleFeaturePyramid
from mae.models.given_images import Images, finite, given_images, scaled, whole
from mae.models.inference import undisturbed
from mae.models.preprocess import preprocessing_of
from mae.models.pretrained import PretrainedEncoder, told_classes
from mae.models.trainable import trainable

_MOST_CLASSES, _MOST_CHANNELS, _MOST_PIXELS = 1 << 14, 4096, 8192

_LEAST_SCORE = 0.05
"""Of what counts in average precision, as in torchvision and detectron2."""

Target = Mapping[str, Tensor]
"""The objects of an image: `boxes` `[n, 4]` (left, top, right, bottom), `labels` `[n]` from 1, `masks` `[n, H, W]`."""


@dataclass(frozen=True, kw_only=True)
class DetectionHead:
    """What stands on the encoder, and how it sees an image.

    Attributes:
        size: side in pixels of the square that images are resized to fit into.
        window: side in patches of the windows that most blocks attend within; 0: all attend to the whole map.
        rel_pos: whether attention learns relative positions.
        channels: of the pyramid and the heads; ViTDet has 256.
        masks: whether the pixels of each object are told too (Mask R-CNN).

    Raises:
        UsageError: values out of range.
    """

    size: int
    window: int = 0
    rel_pos: bool = True
    channels: int = 256
    masks: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.size <= _MOST_PIXELS:
            raise UsageError(f"size is {self.size}; expected 1 to {_MOST_PIXELS} pixels")
        if not 0 <= self.window <= self.size:
            raise UsageError(f"window is {self.window}; expected a number of patches, or 0 for none")
        if not 0 < self.channels <= _MOST_CHANNELS:
            raise UsageError(f"channels is {self.channels}; expected 1 to {_MOST_CHANNELS}")

    def why_not(self, patch: Sequence[int]) -> str | None:
        """Why it cannot stand on an encoder whose patches have this height and width; None: it can."""
        height, width = patch
        if height != width:
            return (
                f"the model has patches of {height} x {width} pixels; expected square ones, for detectors look objects "
                "up on maps of one scale: use a model with such"
            )
        if self.size % height == 0 and self.size >= 2 * height:
            return None
        return f"size is {self.size}; expected a multiple of the patch of {height} pixels, two at least"


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectorOutput:
    """What a detector says of images whose objects are known.

    Attributes:
        loss: what to minimise: the sum of the terms.
        terms: its named parts, as torchvision calls them.
    """

    loss: Float[Tensor, ""]
    terms: Mapping[str, Float[Tensor, ""]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Detections:
    """The objects found in one image, the surest first, on the CPU.

    Attributes:
        boxes: left, top, right and bottom edge in pixels of the image.
        classes: of each, by name.
        labels: of each, its number from 0.
        scores: how sure the model is of each, in [0, 1].
        masks: which pixels of the image belong to each; None of a model that finds boxes alone.
    """

    boxes: Float32[Tensor, "n 4"]
    classes: tuple[str, ...]
    labels: Tensor
    scores: Float32[Tensor, " n"]
    masks: Bool[Tensor, "n H W"] | None


class Detector(PretrainedEncoder):
    """An encoder, a simple feature pyramid, and torchvision's detector with ViTDet's heads.

    Unlike other models of this package it takes images of any size that are not normalised: torchvision's transform
    normalises them. Then it fills them up to a square.

    Args:
        encoder: gives one map of normalised images.
        head: what stands on it.
        class_names: of the objects, in the order of their numbers.
        config: what the encoder was built from, which also says how images are normalised.

    Raises:
        UsageError: no class or too many, a size that does not divide into patches, patches that are not square, or no
            channel statistics.
    """

    def __init__(
        self, *, encoder: MapViT, head: DetectionHead, class_names: Sequence[str], config: MethodConfig
    ) -> None:
        super().__init__(encoder=encoder, config=config)
        if not 0 < len(class_names) <= _MOST_CLASSES:
            raise UsageError(f"there are {len(class_names):,} classes; expected 1 to {_MOST_CLASSES:,}")
        self.described = head
        self.class_names = tuple(class_names)
        self.pyramid = SimpleFeaturePyramid(dim=encoder.embed_dim, channels=head.channels)
        from mae.models.detection_heads import torchvision_detector  # slow to import, and only detectors need it

        parts = torchvision_detector(head, config, num_classes=len(class_names) + 1)
        self.transform, self.rpn, self.roi_heads = parts.transform, parts.rpn, parts.roi_heads

    def _facts(self) -> list[tuple[str, str]]:
        head = f"{'Mask' if self.described.masks else 'Faster'} R-CNN on images of {self.described.size} pixels"
        return [*super()._facts(), ("head", head), ("classes", told_classes(len(self.class_names), self.class_names))]

    def answer(self, images: Float[Tensor, "1 C H W"]) -> tuple[Float[Tensor, "1 D"], Float[Tensor, "1 V"]]:
        """The mean of the patch tokens of a normalised image, and numbers that every other part of the model enters.

        Scores and offsets of all anchors, then those of one box that is the whole image, and its mask.
        """
        height, width = images.shape[2:]
        maps = self.pyramid(self.encoder(images))
        found = [tensor.flatten() for of in self.rpn.head(list(maps.values())) for tensor in of]
        box = [images.new_tensor([[0.0, 0.0, width, height]])]
        heads = self.roi_heads
        pooled = heads.box_head(heads.box_roi_pool(maps, box, [(height, width)]))
        found += [tensor.flatten() for tensor in heads.box_predictor(pooled)]
        if self.described.masks:
            pooled = heads.mask_head(heads.mask_roi_pool(maps, box, [(height, width)]))
            found.append(heads.mask_predictor(pooled).flatten())
        return self.encode(images).mean, torch.cat(found)[None]

    @overload
    def forward(self, images: Sequence[Float[Tensor, "C _ _"]], targets: None = None) -> list[dict[str, Tensor]]: ...

    @overload
    def forward(self, images: Sequence[Float[Tensor, "C _ _"]], targets: Sequence[Target]) -> DetectorOutput: ...

    def forward(
        self, images: Sequence[Float[Tensor, "C _ _"]], targets: Sequence[Target] | None = None
    ) -> list[dict[str, Tensor]] | DetectorOutput:
        """The losses in training mode; else what is found, as `boxes`, `labels` from 1, `scores` and `masks`.

        Boxes are in pixels of the images given; masks are of 28 x 28 values in their box. Scores are above 0.05.

        Args:
            images: whole numbers of the files scaled to [0, 1], or raw values of floating point; not normalised, none
                of their sides above the model's size.
            targets: their objects, in training mode.

        Raises:
            UsageError: an image larger than the model's size.
        """
        from torchvision.models.detection.image_list import ImageList

        size = self.described.size
        for image in images:
            if max(image.shape[1:]) > size:
                raise UsageError(f"an image has {image.shape[1]} x {image.shape[2]} pixels; expected at most {size}")
        normalised = [self.transform.normalize(image) for image in images]
        batch = ImageList(
            self.transform.batch_images(normalised, size_divisible=size),
            [(image.shape[1], image.shape[2]) for image in images],
        )
        maps = self.pyramid(self.encoder(batch.tensors))
        given = None if targets is None else [dict(target) for target in targets]
        proposals, of_proposals = self.rpn(batch, maps, given)
        found, of_heads = self.roi_heads(maps, proposals, batch.image_sizes, given)
        if not self.training:
            return found
        terms = {**of_proposals, **of_heads}
        return DetectorOutput(loss=torch.stack(list(terms.values())).sum(), terms=terms)

    def predict(self, images: Images, *, threshold: float = 0.5) -> list[Detections]:
        """The objects in each image, in its own pixels.

        Args:
            images: one or several: files, images of Pillow, arrays `[H, W, C]` or tensors `[C, H, W]` of pixel values
                as in the files.
            threshold: leave out what is found with a lower score.

        Raises:
            UsageError: other channels, types or shapes than the model's, or values that are not finite.
            UnreadableImage: a file that is no whole image.
        """
        wanted = preprocessing_of(self.config)
        given = given_images(images, wanted)
        return [self.detect([finite(scaled(whole(image)), image, wanted)], threshold=threshold)[0] for image in given]

    def detect(self, images: Sequence[Float[Tensor, "C _ _"]], *, threshold: float = _LEAST_SCORE) -> list[Detections]:
        """`predict` of images that `forward` takes, of any size: they are resized to fit into the model's square."""
        weights = next(self.parameters())
        with undisturbed(self), self._finding_from(threshold):
            found = self([fitted(image, self.described.size).to(weights) for image in images])
            sizes = [(image.shape[1], image.shape[2]) for image in images]
            seen = [fitted_size(size, self.described.size) for size in sizes]
            found = [{name: tensor.float().cpu() for name, tensor in each.items()} for each in found]
            found = [{name: tensor[each["scores"] >= threshold] for name, tensor in each.items()} for each in found]
            return [self._named(each) for each in self.transform.postprocess(found, seen, sizes)]

    @contextmanager
    def _finding_from(self, threshold: float) -> Iterator[None]:
        """Inside, what is found with such a score is not left out for its score."""
        usual = self.roi_heads.score_thresh
        self.roi_heads.score_thresh = min(usual, threshold)
        try:
            yield
        finally:
            self.roi_heads.score_thresh = usual

    def _named(self, found: Mapping[str, Tensor]) -> Detections:
        labels = found["labels"].long() - 1
        return Detections(
            boxes=found["boxes"],
            classes=tuple(self.class_names[label] for label in labels.tolist()),
            labels=labels,
            scores=found["scores"],
            masks=found["masks"][:, 0] >= 0.5 if self.described.masks else None,
        )


def fitted_size(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Height and width of an image whose longer side becomes `side`."""
    return max(1, round(size[0] * side / max(size))), max(1, round(size[1] * side / max(size)))


def fitted(image: Float[Tensor, "C h w"], side: int) -> Float[Tensor, "C H W"]:
    """An image whose longer side becomes `side`."""
    from torchvision.transforms.v2.functional import resize

    return resize(image, list(fitted_size((image.shape[1], image.shape[2]), side)), antialias=True)


def build_detector(
    config: MethodConfig,
    head: DetectionHead,
    *,
    class_names: Sequence[str],
    pretrained: PretrainedEncoder | None,
    drop_path: float = 0.0,
    rank: int = 0,
    world: int = 1,
) -> Detector:
    """A detector on the encoder of a configuration, from a pre-trained model or from scratch.

    The absolute positions begin as the pre-trained model's, or as the sine-cosine table; they train. Class tokens and
    the final norm are left behind.

    Args:
        config: of the encoder.
        head: what stands on it.
        class_names: of the objects, in the order of their numbers.
        pretrained: whose encoder's weights to copy; None: fresh ones from PyTorch's global generator.
        drop_path: see `MapViT`.
        rank: see `DropPath`.
        world: see `DropPath`.

    Raises:
        UsageError: values that do not fit each other, or a pre-trained encoder of other sizes.
    """
    config = trainable(config)
    vit, patch = config.encoder, config.layout.patch
    if reason := head.why_not(patch):  # before anything is made of that size
        raise UsageError(reason)
    trained_on: Grid = (head.size // patch[0], head.size // patch[1])
    encoder = MapViT(
        patch_embed=config.tokenizer.embed(vit.embed_dim),
        grid=config.layout.grid,
        embed_dim=vit.embed_dim,
        depth=vit.depth,
        num_heads=vit.num_heads,
        mlp_ratio=vit.mlp_ratio,
        norm_eps=vit.norm_eps,
        window=head.window,
        rel_pos=trained_on if head.rel_pos else None,
        drop_path=drop_path,
        rank=rank,
        world=world,
    )
    detector = Detector(encoder=encoder, head=head, class_names=class_names, config=config)
    if pretrained is not None:
        encoder.load_state_dict(_weights_of(pretrained, encoder))
    return detector


def _weights_of(pretrained: PretrainedEncoder, encoder: MapViT) -> dict[str, Tensor]:
    """The encoder's weights with those of a pre-trained one in their places.

    Raises:
        UsageError: some have another shape there, or are not there.
    """
    source, own = pretrained.encoder, encoder.state_dict()
    given = {**source.state_dict(), "pos_embed.table": source.pos_embed(encoder.grid)}
    for name, tensor in own.items():
        if ".rel_pos." in name and name not in given:
            given[name] = tensor
        found = given.get(name)
        if found is None or found.shape != tensor.shape:
            there = "not there" if found is None else f"of shape {tuple(found.shape)}"
            raise UsageError(
                f"weights {name} of the pre-trained encoder are {there}; expected the shape {tuple(tensor.shape)}"
            )
    return {name: given[name] for name in own}
