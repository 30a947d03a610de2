"""Labels before a training: silent faults refused, others told, and eight labelled images drawn."""

import time
from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from mae.data.annotations.detection import DetectionSplit
from mae.data.annotations.segmentation import SegmentationSplit
from mae.data.inspect.labelled_images import COPIES
from mae.data.inspect.labels import inspect_labels
from mae.evaluation.pictures.labels import draw_labels
from mae.report.terminal.diagnosis import Diagnosis, refuse, show_diagnosis
from mae.text import visible


def check_labels(
    spec: str,
    train: SegmentationSplit | DetectionSplit,
    *,
    ignore: Collection[int],
    dropped: bool,
    picture: Path,
    console: Console,
) -> None:
    """What `mae doctor labels` does, before a training.

    Args:
        spec: the folder.
        train: what is learned from, of which eight images are drawn.
        ignore: numbers in masks that do not count.
        dropped: whether test images that are among the training images are left out, so that they are no fault.
        picture: a PNG, replaced where it is there.
        console: where findings are shown.

    Raises:
        MAEError: labels whose faults would spoil the training.
    """
    began = time.monotonic()
    findings, _ = inspect_labels(spec, ignore=ignore)
    findings = [finding for finding in findings if not (dropped and finding.name == COPIES)]
    found = Diagnosis(findings=tuple(findings), seconds=time.monotonic() - began)
    show_diagnosis(console, found, everything=False)
    draw_labels(train, title=f"Labels of {spec}", path=picture)
    console.print(visible(f"Look at {picture}"), soft_wrap=True, highlight=False, markup=False)
    refuse(found)
