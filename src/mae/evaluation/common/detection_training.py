"""The parts of training on objects: images and boxes jittered together, and what is found in the test images."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from mae.data.annotations.detection import DetectionSplit
from mae.data.annotations.objects import Objects
from mae.data.loading.annotated import Sample
from mae.evaluation.common.annotated_images import AnnotatedImages
from mae.evaluation.common.average_precision import FoundObjects, GroundTruth, ground_truth, runs_of
from mae.evaluation.common.task import DetectionTask
from mae.models.detector import Detector
from mae.models.given_images import scaled
from mae.models.inference import undisturbed

_LEAST_SIDE = 1.0
"""Pixels: of a box that is still learnt."""


@dataclass(frozen=True, kw_only=True)
class LargeScaleJitter:
    """Image and objects mirrored by a fair coin, resized at random and cut (Ghiasi et al. 2021; ViTDet).

    What is smaller than the square stays so: the detector fills it up.

    Attributes:
        size: side of the square that a scale of 1 just fits into.
        masks: whether masks are wanted; boxes are then those around what is left of them.
        scales: bounds of the random size.
    """

    size: int
    masks: bool
    scales: tuple[float, float] = (0.1, 2.0)

    def __call__(self, sample: Sample) -> Sample:
        """`image`, `boxes`, `labels` from 1 and `masks`; objects of a crowd are left out. See `Transform`."""
        image, objects = sample["image"], sample["objects"]
        height, width = image.shape[-2:]
        kept: Objects = objects.take(np.flatnonzero(~objects.crowd))
        whole: dict[str, Any] = {
            "image": image,
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(kept.boxes), format="XYXY", canvas_size=(height, width)),
        }
        if self.masks:
            whole["masks"] = tv_tensors.Mask(torch.from_numpy(kept.masks(height, width).astype(np.uint8)))
        changed = self._cut(self._resized(v2.RandomHorizontalFlip()(whole)))
        return self._left(changed, torch.from_numpy(kept.classes) + 1)

    def _resized(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        low, high = self.scales
        height, width = sample["image"].shape[-2:]
        by = self.size / max(height, width) * (low + (high - low) * torch.rand(()).item())
        size = [max(1, round(height * by)), max(1, round(width * by))]
        # Of masks "nearest" alone would move them by half a pixel.
        exact = v2.InterpolationMode.NEAREST_EXACT
        return {
            name: tv_tensors.Mask(functional.resize(value.as_subclass(Tensor), size, interpolation=exact))
            if name == "masks" and len(value)
            else functional.resize(value, size, antialias=True)
            for name, value in sample.items()
        }

    def _cut(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        height, width = sample["image"].shape[-2:]
        rows, columns = min(height, self.size), min(width, self.size)
        top, left = (int(torch.randint(0, room + 1, ()).item()) for room in (height - rows, width - columns))
        return {name: functional.crop(value, top, left, rows, columns) for name, value in sample.items()}

    def _left(self, sample: Mapping[str, Any], labels: Int64[Tensor, " n"]) -> Sample:
        height, width = sample["image"].shape[-2:]
        boxes = sample["boxes"].as_subclass(Tensor).float()
        boxes = boxes.clamp(min=torch.zeros(4), max=torch.tensor([width, height, width, height]).float())
        if self.masks:
            masks = sample["masks"].as_subclass(Tensor)
            there = (masks > 0).flatten(1).any(dim=1)
            boxes = torch.zeros_like(boxes)
            # The last pixel is inside of the box.
            boxes[there] = masks_to_boxes(masks[there]).float() + torch.tensor([0.0, 0.0, 1.0, 1.0])
        filled = (boxes[:, 2:] - boxes[:, :2] >= _LEAST_SIDE).all(dim=1)
        left = {"image": sample["image"], "boxes": boxes[filled], "labels": labels[filled]}
        return {**left, "masks": masks[filled]} if self.masks else left


@dataclass(frozen=True, kw_only=True)
class _Labels:
    """The objects of an image; not a function of a task, so that processes of any kind can be given it."""

    split: DetectionSplit

    def __call__(self, number: int) -> Mapping[str, Any]:
        return {"objects": self.split.objects(number)}


def images_with_objects(
    task: DetectionTask, jitter: LargeScaleJitter, *, batch_size: int, accumulate: int, numbers: Int64[Tensor, " n"]
) -> AnnotatedImages:
    """Some training images and their objects, jittered, as a detector takes them."""

    def prepare(samples: Mapping[str, Any]) -> Mapping[str, Any]:
        images = [scaled(image.to(task.device, non_blocking=True)) for image in samples["image"]]
        names = [name for name in samples if name != "image"]
        targets = [
            {name: samples[name][row].to(task.device, non_blocking=True) for name in names}
            for row in range(len(images))
        ]
        return {"images": images, "targets": targets}

    return AnnotatedImages(
        task=task,
        batch_size=batch_size,
        accumulate=accumulate,
        annotate=_Labels(split=task.data.train),
        transform=jitter,
        described={**asdict(jitter), "images": len(numbers)},
        stacked=False,
        prepare=prepare,
        numbers=numbers,
    )


def truth_of(task: DetectionTask) -> GroundTruth:
    """The objects of the readable test images, in their own pixels.

    Raises:
        UsageError: the package that computes average precision is missing.
        MAEError: labels for an image of another size.
    """
    images = task.images("test")
    infos = [images.probe(number) for number in images.readable.tolist()]
    sizes = [(info.height, info.width) for info in infos]
    return ground_truth(task.objects("test"), sizes, task.class_names)


def find_objects(task: DetectionTask, detector: Detector) -> list[FoundObjects]:
    """What a detector finds in each readable test image. Every process must ask."""
    images, masks = task.images("test"), detector.described.masks

    def of(number: int) -> Mapping[str, Tensor]:
        image: Float[Tensor, "C h w"] = scaled(images.get(number).to(task.device))
        found = detector.detect([image])[0]
        told = {"boxes": found.boxes, "labels": found.labels, "scores": found.scores}
        if found.masks is None:
            return told
        runs = runs_of(found.masks.numpy())  # the masks of all images would fill the memory
        flat = torch.frombuffer(bytearray(b"".join(runs)), dtype=torch.uint8) if runs else torch.zeros(0).byte()
        return {**told, "runs": flat, "lengths": torch.tensor([len(run) for run in runs], dtype=torch.int64)}

    with undisturbed(detector):
        return [_found(told, masks) for told in task.world.in_turns(images.readable.tolist(), of)]


def _found(told: Mapping[str, Tensor], masks: bool) -> FoundObjects:
    runs = None
    if masks:
        ends = told["lengths"].cumsum(0).tolist()
        flat = told["runs"].numpy().tobytes()
        runs = tuple(flat[start:end] for start, end in zip([0, *ends], ends, strict=False))
    return FoundObjects(
        boxes=told["boxes"].numpy(), labels=told["labels"].numpy(), scores=told["scores"].numpy(), masks=runs
    )
