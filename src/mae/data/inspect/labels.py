"""Silent faults in labels: what training would not complain about and yet be spoilt by."""

from collections.abc import Collection
from pathlib import Path

from mae.data.annotations.detection import LAYOUTS, DetectionData, read_detection
from mae.data.annotations.segmentation import SegmentationData, find_masks, open_segmentation
from mae.data.inspect.box_labels import inspect_boxes
from mae.data.inspect.mask_labels import inspect_masks
from mae.errors import MAEError, UsageError
from mae.findings import Finding


def inspect_labels(
    folder: str | Path, *, ignore: Collection[int] = ()
) -> tuple[list[Finding], DetectionData | SegmentationData | None]:
    """Findings on a folder of images with boxes or outlines, or with masks of pixels; every image is decoded.

    Args:
        folder: with its labels.
        ignore: numbers in masks of pixels that do not count.

    Returns:
        The findings, and the data; None where their faults keep them from being opened.

    Raises:
        UsageError: no such folder, or none with labels.
        MAEError: labels that cannot be read.
    """
    if (boxes := read_detection(folder)) is not None:
        return inspect_boxes(boxes), boxes
    try:
        find_masks(folder)
    except UsageError as error:
        raise UsageError(f"{error}. For boxes: {LAYOUTS}") from error
    findings = inspect_masks(folder, ignore=ignore)
    try:
        return findings, open_segmentation(folder, ignore=ignore)
    except MAEError:
        return findings, None
