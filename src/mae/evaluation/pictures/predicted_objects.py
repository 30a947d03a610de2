"""The objects that a trained detector finds in images: a picture of each, and COCO's json."""

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from mae.credentials import concealed
from mae.data.decode.limits import UnreadableImage
from mae.errors import MAEError, UsageError
from mae.evaluation.common.average_precision import FoundObjects, coco_results, runs_of
from mae.evaluation.common.finetuning import DETECTOR_FILE
from mae.evaluation.pictures.detection import THRESHOLD, colours_of, with_found
from mae.evaluation.pictures.predict import images_for, only_file
from mae.models.detector import Detections, Detector
from mae.models.file import is_detector, load_with_report
from mae.models.given_images import scaled
from mae.models.preprocess import preprocessing_of
from mae.records import check_new, safe_name, write_whole
from mae.report.figures.picture_file import write_picture
from mae.training.device import choose_device

FILE = "detections.json"
"""What is found, in the folder of the pictures."""


def find_detector(path: Path) -> Path | None:
    """The file of a detector: itself, or the only one in a folder; None where there is none."""
    return only_file(path, DETECTOR_FILE, is_detector)


def find_objects(
    model: Detector | str | Path,
    source: str | Path,
    *,
    out: str | Path,
    threshold: float = THRESHOLD,
    data_root: str | Path = "data",
    device: str = "auto",
    unreadable: Callable[[str], object] | None = None,
) -> dict[str, FoundObjects]:
    """Find objects in every image, like the command `mae predict` with a detector.

    Args:
        model: a detector that `mae finetune detection` or `instances` trained: its file, or what `mae.load` gives.
        source: images, see `mae.embed`; of those with a test part that part.
        out: a new folder: a picture of each image with the boxes, and `detections.json` as COCO writes annotations,
            with a score for each.
        threshold: leave out what is found with a lower score; at least 0.5 is drawn.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        unreadable: is given what is wrong with each image that cannot be read.

    Returns:
        What was found in each readable image, by its name.

    Raises:
        UsageError: no detector or images, or a folder that is there already.
        MAEError: no image can be read, or a damaged file.
    """
    folder = Path(out)
    check_new(folder)
    detector = deepcopy(model) if isinstance(model, Detector) else _loaded(Path(model))
    where = choose_device(device)
    detector = detector.to(where).eval()
    images = images_for(concealed(str(source)), Path(data_root), preprocessing_of(detector.config))
    folder.mkdir(parents=True)
    found: dict[str, FoundObjects] = {}
    sizes = []
    for number in range(len(images)):
        try:
            image = scaled(images.get(number))
        except UnreadableImage as error:
            if unreadable is not None:
                unreadable(str(error))
            continue
        objects = of_detections(detector.detect([image.to(where)], threshold=threshold)[0])
        name = images.item_name(number)
        found[name] = objects
        sizes.append((image.shape[1], image.shape[2]))
        picture = with_found(colours_of(images, number), objects, detector.class_names)
        file = folder / f"{number:05d}-{safe_name(Path(name).stem)}.png"
        write_picture(picture.permute(2, 0, 1), file, dtype=np.dtype(np.uint8))
    if not found:
        raise MAEError(f"no image of {source} can be read")
    write_whole(folder / FILE, json.dumps(_as_coco(found, sizes, detector, within=Path(source))) + "\n")
    return found


def of_detections(found: Detections) -> FoundObjects:
    """What a detector found as COCO's tools take it.

    Raises:
        UsageError: there are masks, and the package that writes them is missing.
    """
    return FoundObjects(
        boxes=found.boxes.numpy(),
        labels=found.labels.numpy(),
        scores=found.scores.numpy(),
        masks=None if found.masks is None else runs_of(found.masks.numpy()),
    )


def _loaded(path: Path) -> Detector:
    model = load_with_report(path)[0]
    if not isinstance(model, Detector):
        raise UsageError(
            f"{path} is a model that finds no objects; train one: mae finetune detection MODEL --data BOXES"
        )
    return model


def _as_coco(
    found: Mapping[str, FoundObjects], sizes: list[tuple[int, int]], detector: Detector, *, within: Path
) -> dict[str, Any]:
    """Annotations as in COCO's files of labels, so that they can be read as such; images by their paths in a folder."""
    paths = [
        Path(name).relative_to(within) if Path(name).is_relative_to(within) else Path(Path(name).name) for name in found
    ]
    annotations = []
    results = coco_results(list(found.values()), sizes, masks=detector.described.masks)
    boxes = [box for of in found.values() for box in of.boxes.tolist()]
    for number, (entry, (left, top, right, bottom)) in enumerate(zip(results, boxes, strict=True), start=1):
        width, height = right - left, bottom - top
        annotations.append(
            {"id": number, "bbox": [left, top, width, height], "area": width * height, "iscrowd": 0, **entry}
        )
    return {
        "images": [
            {"id": number, "file_name": path.as_posix(), "height": height, "width": width}
            for number, (path, (height, width)) in enumerate(zip(paths, sizes, strict=True), start=1)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(detector.class_names, start=1)],
        "annotations": annotations,
    }
