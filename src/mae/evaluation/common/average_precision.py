"""COCO's average precision of boxes and masks, computed by faster-coco-eval."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Int64

from mae.data.annotations.objects import Objects
from mae.errors import UsageError

Area = Literal["boxes", "masks"]
Size = tuple[int, int]
"""Height and width of an image."""

_KINDS = {"boxes": "bbox", "masks": "segm"}
_MOST_DETECTIONS = 100


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundObjects:
    """What a model found in one image.

    Attributes:
        boxes: left, top, right and bottom edge in pixels.
        labels: from 0.
        scores: how sure the model is of each.
        masks: of each, as COCO's compressed runs; None where there are boxes alone.
    """

    boxes: Float32[np.ndarray, "n 4"]
    labels: Int64[np.ndarray, " n"]
    scores: Float32[np.ndarray, " n"]
    masks: tuple[bytes, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class AveragePrecision:
    """COCO's numbers in [0, 1]; None where there is nothing to be found.

    Attributes:
        ap: the mean over overlaps (IoU) from 0.5 to 0.95 and over classes.
        ap50: at an overlap of 0.5.
        ap75: at an overlap of 0.75.
        small: `ap` of objects below 32 x 32 pixels.
        medium: `ap` of those between.
        large: `ap` of objects above 96 x 96 pixels.
        by_class: `ap` of each class, by name.
    """

    ap: float | None
    ap50: float | None
    ap75: float | None
    small: float | None
    medium: float | None
    large: float | None
    by_class: Mapping[str, float | None]


def check_installed() -> None:
    """Refuse to go on where the extra package is missing.

    Raises:
        UsageError: it is.
    """
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "average precision needs the package faster-coco-eval, which is not installed: "
            "pip install 'openmae[detection]'"
        ) from error


def runs_of(masks: Bool[np.ndarray, "n H W"]) -> tuple[bytes, ...]:
    """Masks as COCO's compressed runs.

    Raises:
        UsageError: see `check_installed`.
    """
    check_installed()
    from faster_coco_eval.core import mask

    if not len(masks):
        return ()
    runs = mask.encode(np.asfortranarray(masks.transpose(1, 2, 0).astype(np.uint8)))
    return tuple(bytes(each["counts"]) for each in runs)


def drawn_runs(runs: Sequence[bytes], size: Size) -> Bool[np.ndarray, "n H W"]:
    """The masks of `runs_of`.

    Raises:
        UsageError: see `check_installed`.
    """
    check_installed()
    from faster_coco_eval.core import mask

    if not runs:
        return np.zeros((0, *size), dtype=bool)
    masks = mask.decode([_run_length(run, size) for run in runs])
    return np.asarray(masks, dtype=bool).transpose(2, 0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class GroundTruth:
    """The objects of some images as COCO describes them.

    Attributes:
        annotations: an entry an object.
        sizes: of the images.
        class_names: in the order of their numbers.
    """

    annotations: tuple[Mapping[str, Any], ...]
    sizes: tuple[Size, ...]
    class_names: tuple[str, ...]


def ground_truth(objects: Sequence[Objects], sizes: Sequence[Size], class_names: Sequence[str]) -> GroundTruth:
    """The objects of images, whose area is that of their masks where they have any, as in COCO.

    Raises:
        UsageError: see `check_installed`.
        MAEError: masks of another size than their image.
    """
    check_installed()
    annotations: list[Mapping[str, Any]] = []
    for image, (of, size) in enumerate(zip(objects, sizes, strict=True), start=1):
        runs = None if of.outlines is None else runs_of(of.masks(*size))
        for number, (box, label, crowd) in enumerate(zip(of.boxes, of.classes, of.crowd, strict=True)):
            entry: dict[str, Any] = {
                "id": len(annotations) + 1,
                "image_id": image,
                "category_id": int(label) + 1,
                "bbox": _sized(box),
                "area": float((box[2] - box[0]) * (box[3] - box[1])),
                "iscrowd": int(crowd),
            }
            if runs is not None:
                entry["segmentation"] = _run_length(runs[number], size)
                entry["area"] = mask_area(entry["segmentation"])
            annotations.append(entry)
    return GroundTruth(annotations=tuple(annotations), sizes=tuple(sizes), class_names=tuple(class_names))


def mask_area(segmentation: Mapping[str, Any]) -> float:
    """The pixels of a mask in COCO's runs; raises `UsageError`, see `check_installed`."""
    check_installed()
    from faster_coco_eval.core import mask

    return float(mask.area(segmentation))


def average_precision(truth: GroundTruth, found: Sequence[FoundObjects], area: Area) -> AveragePrecision:
    """How well objects are found, as COCO counts: the 100 surest of each image; crowds are neither found nor missed.

    Args:
        truth: the objects of the images.
        found: what was found in each, in the same order.
        area: whose overlap counts.

    Raises:
        UsageError: see `check_installed`.
    """
    check_installed()
    from faster_coco_eval import COCO, COCOeval_faster

    images = [
        {"id": number, "height": height, "width": width} for number, (height, width) in enumerate(truth.sizes, start=1)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(truth.class_names, start=1)]
    given = COCO(
        {"images": images, "categories": categories, "annotations": [dict(entry) for entry in truth.annotations]}
    )
    results = coco_results(found, truth.sizes, masks=area == "masks")
    evaluation = COCOeval_faster(given, given.loadRes(results), _KINDS[area], print_function=_silent)
    evaluation.evaluate()
    evaluation.accumulate()
    # Overlaps, recalls, classes, sizes (all, small, medium, large), most detections (1, 10, 100).
    precision = np.asarray(evaluation.eval["precision"])[..., -1]
    return AveragePrecision(
        ap=_mean(precision[..., 0]),
        ap50=_mean(precision[0, ..., 0]),
        ap75=_mean(precision[5, ..., 0]),
        small=_mean(precision[..., 1]),
        medium=_mean(precision[..., 2]),
        large=_mean(precision[..., 3]),
        by_class={name: _mean(precision[:, :, number, 0]) for number, name in enumerate(truth.class_names)},
    )


def coco_results(found: Sequence[FoundObjects], sizes: Sequence[Size], *, masks: bool) -> list[dict[str, Any]]:
    """What was found as COCO's results: images and classes are numbered from 1, boxes are left, top, width, height."""
    results: list[dict[str, Any]] = []
    for image, (of, size) in enumerate(zip(found, sizes, strict=True), start=1):
        for number in range(len(of.scores)):
            entry = {
                "image_id": image,
                "category_id": int(of.labels[number]) + 1,
                "score": float(of.scores[number]),
                "bbox": _sized(of.boxes[number]),
            }
            if masks:
                assert of.masks is not None
                # With a box COCO's readers would take its area for that of the mask.
                del entry["bbox"]
                entry["segmentation"] = _run_length(of.masks[number], size)
            results.append(entry)
    return results


def _run_length(counts: bytes, size: Size) -> dict[str, Any]:
    return {"size": list(size), "counts": counts.decode()}


def _sized(box: Float32[np.ndarray, " 4"]) -> list[float]:
    left, top, right, bottom = box.tolist()
    return [left, top, right - left, bottom - top]


def _mean(precision: np.ndarray) -> float | None:
    """Over what there is: -1 stands for classes without an object of the size."""
    counted = precision[precision > -1]
    return float(counted.mean()) if counted.size else None


def _silent(*words: object) -> None:
    """faster-coco-eval tells how long it takes."""
