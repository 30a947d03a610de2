"""The parts of training on masks: crops of images and masks, the frozen model under a head, maps of the test images."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, UInt8
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.transforms import v2

from mae.data.annotations.pixel_classes import IGNORED
from mae.data.annotations.segmentation import SegmentationSplit
from mae.data.loading.annotated import Sample
from mae.data.loading.loader import normalise
from mae.errors import UsageError
from mae.evaluation.common.annotated_images import AnnotatedImages
from mae.evaluation.common.dense import class_counts, resized_map
from mae.evaluation.common.supervised import largest_batch
from mae.evaluation.common.task import SegmentationTask, patch_grid
from mae.evaluation.extractors.extractor import PATCHES, Extractor
from mae.layers.map_heads import LinearMapHead
from mae.models.preprocess import Preprocessing
from mae.models.segmenter import SegmenterOutput, told
from mae.models.sliding import Logits, covering, map_of_classes

_USUAL_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class ScaledCrop:
    """Image and mask resized at random, cut to the model's size, mirrored by a fair coin.

    Attributes:
        size: height and width of the crops.
        mean: of each channel, in the image's unit: what surrounds a smaller image; nothing counts there.
        scales: bounds of the random size, in those at which the image just covers a crop.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    scales: tuple[float, float] = (0.5, 2.0)

    def __call__(self, sample: Sample) -> Sample:
        """The changed sample; see `Transform`."""
        image, mask = sample["image"], sample["mask"]
        low, high = self.scales
        scale = low + (high - low) * torch.rand(()).item()
        size = list(covering((image.shape[-2], image.shape[-1]), self.size, scale=scale))
        exact = v2.InterpolationMode.NEAREST_EXACT  # a mask's own resizing would move it by half a pixel
        labels = v2.functional.resize(mask.as_subclass(Tensor)[None], size, interpolation=exact)[0]
        changed = {
            "image": v2.functional.resize(image, size, antialias=True),
            "mask": tv_tensors.Mask(labels),
        }
        unit = 255 if image.dtype == torch.uint8 else 1
        fill = {tv_tensors.Image: [unit * value for value in self.mean], tv_tensors.Mask: IGNORED}
        cut = v2.RandomCrop(self.size, pad_if_needed=True, fill=fill)
        return v2.RandomHorizontalFlip()(cut(changed))


@dataclass(frozen=True, kw_only=True)
class _Masks:
    """The mask of an image; not a function of a task, so that processes of any kind can be given it."""

    split: SegmentationSplit

    def __call__(self, number: int) -> Mapping[str, Any]:
        return {"mask": tv_tensors.Mask(torch.from_numpy(self.split.labels(number)))}


def masked_images(
    task: SegmentationTask, *, batch_size: int, accumulate: int, numbers: Int64[Tensor, " n"]
) -> AnnotatedImages:
    """Random crops of some training images and their masks, as a segmenter takes them."""
    wanted = task.extractor.preprocessing
    crop = ScaledCrop(size=wanted.img_size, mean=wanted.mean)
    mean, std = (torch.tensor(values, device=task.device) for values in (wanted.mean, wanted.std))

    def prepare(samples: Mapping[str, Any]) -> Mapping[str, Tensor]:
        images = samples["image"].to(task.device, non_blocking=True)
        return {"images": normalise(images, mean, std), "target": samples["mask"].to(task.device).long()}

    return AnnotatedImages(
        task=task,
        batch_size=batch_size,
        accumulate=accumulate,
        annotate=_Masks(split=task.data.train),
        transform=crop,
        described={**asdict(crop), "images": hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]},
        stacked=True,
        prepare=prepare,
        numbers=numbers,
    )


def batch_of(given: int | None, accumulate: int, images: int) -> int:
    """The given batch size, or 16, halved until there are as many images.

    Raises:
        UsageError: it is larger than their number, or leaves a micro-batch of one image.
    """
    batch = largest_batch(given, _USUAL_BATCH, images=images, steps_per_epoch=1)
    if batch // accumulate < 2:
        raise UsageError(
            f"a batch of {batch} in {accumulate} micro-batch(es) leaves a micro-batch of one image, of which no norm "
            "can be taken; give a larger --batch-size, or more images"
        )
    return batch


def grid_of_patches(extractor: Extractor, device: torch.device) -> tuple[int, int]:
    """Rows and columns of a model's patches; those of a function are taken for square.

    Raises:
        UsageError: it gives no patch tokens, or none that cover the image.
    """
    patches = extractor.named(_blank(extractor, device)).get(PATCHES)
    if patches is None:
        raise UsageError(f"{extractor.name} gives no patch tokens; expected a model that does, called 'patches'")
    return patch_grid(extractor, patches)


def _blank(extractor: Extractor, device: torch.device) -> Float[Tensor, "1 C H W"]:
    wanted = extractor.preprocessing
    return torch.zeros(1, wanted.in_chans, *wanted.img_size, device=device)


class FrozenSegmenter(nn.Module):
    """DINOv3's linear head on the maps of a model that never changes; its weights are those of the head.

    Args:
        extractor: the model.
        grid: rows and columns of its patches, see `grid_of_patches`.
        layers: last blocks whose maps it is given, the last one behind the final norm.
        num_classes: classes to tell apart.
        device: where it computes.

    Raises:
        UsageError: nobody says what leaves the model's blocks, there are fewer of them, or their maps differ in size.
    """

    def __init__(
        self,
        extractor: Extractor,
        *,
        grid: tuple[int, int],
        layers: int,
        num_classes: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        if layers > 1 and (extractor.blocks is None or extractor.blocks.depth < layers):
            raise UsageError(f"{extractor.name} does not give the maps of {layers} blocks; expected --layers 1")
        self._extractor, self._grid, self._layers = extractor, grid, layers
        shapes = [found.shape[1:] for found in self._maps(_blank(extractor, device))]
        if len(sizes := dict.fromkeys(shape[1:] for shape in shapes)) > 1:
            told = " and ".join("x".join(map(str, size)) for size in sizes)
            raise UsageError(
                f"{extractor.name} gives maps of {told} for --layers {layers}; expected fewer, of one size"
            )
        width = sum(shape[0] for shape in shapes)
        self.head = LinearMapHead(width, num_classes).to(device)

    @torch.no_grad()
    def _maps(self, images: Float[Tensor, "B C H W"]) -> list[Float[Tensor, "B D h w"]]:
        if self._layers == 1:
            patches = self._extractor.named(images)[PATCHES]
            return [patches.float().mT.unflatten(2, self._grid)]
        assert self._extractor.blocks is not None
        depth = self._extractor.blocks.depth
        return [found.float() for found in self._extractor.blocks.maps(images, range(depth - self._layers, depth))]

    def forward(
        self, images: Float[Tensor, "B C H W"], target: Int64[Tensor, "B H W"] | None = None
    ) -> Float[Tensor, "B K H W"] | SegmenterOutput:
        """See `Segmenter`."""
        return told(self.head(self._maps(images)), images, target)


def counts_of(task: SegmentationTask, logits: Logits) -> Int64[Tensor, "m 3 K"]:
    """`class_counts` of each readable test image and a model's map of it.

    Pixels are those of the images in their own size. Every process must ask.

    Raises:
        MAEError: an image or a mask cannot be read.
    """

    images = task.images("test")  # which all processes open together, and not each in its turn

    def of(number: int) -> Mapping[str, Tensor]:
        truth = torch.from_numpy(task.data.test.labels(number)).unsqueeze(0)
        found = _map_of(task, images.get(number), logits).unsqueeze(0)
        return {"counts": class_counts(found, truth, num_classes=task.num_classes)[0]}

    return torch.stack([found["counts"] for found in task.world.in_turns(images.readable.tolist(), of)])


def small_maps(
    task: SegmentationTask, logits: Logits, rows: Int64[Tensor, " s"], size: tuple[int, int]
) -> UInt8[Tensor, "s h w"]:
    """A model's maps of some readable test images in a size, for pictures. Every process must ask."""
    images = task.images("test")
    numbers = images.readable[rows].tolist()
    found = task.world.in_turns(numbers, lambda number: {"map": _map_of(task, images.get(number), logits)})
    return torch.stack([resized_map(each["map"].numpy(), size) for each in found])


def small_masks(task: SegmentationTask, rows: Int64[Tensor, " s"], size: tuple[int, int]) -> UInt8[Tensor, "s h w"]:
    """The masks of some readable test images in a size."""
    numbers = task.images("test").readable[rows].tolist()
    return torch.stack([resized_map(task.data.test.labels(number), size) for number in numbers])


def _map_of(
    task: SegmentationTask, image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"], logits: Logits
) -> UInt8[Tensor, "h w"]:
    wanted: Preprocessing = task.extractor.preprocessing
    return map_of_classes(image, wanted, logits, device=task.device)


def commonest_class(task: SegmentationTask, numbers: Int64[Tensor, " n"]) -> int:
    """The class of most pixels of some training images.

    Raises:
        UsageError: no pixel of them has a class that counts.
    """
    counts = np.zeros(IGNORED + 1, dtype=np.int64)
    for number in numbers.tolist():
        counts += np.bincount(task.data.train.labels(number).ravel(), minlength=IGNORED + 1)
    if not counts[:IGNORED].any():
        raise UsageError(
            f"no pixel of the {len(numbers):,} training masks has a class that counts; give other masks or ignore less"
        )
    return int(counts[:IGNORED].argmax())


def of_one_class(counts: Int64[Tensor, "m 3 K"], label: int) -> Int64[Tensor, "m 3 K"]:
    """The `class_counts` of a map of one class, from those of any other maps of the same images."""
    there, found = counts[:, 1], torch.zeros_like(counts)
    found[:, 0, label], found[:, 1], found[:, 2, label] = there[:, label], there, there.sum(dim=1)
    return found
