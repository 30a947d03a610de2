"""The objects that a trained detector finds in images: a picture of each, and COCO's json."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mae.credentials import concealed
from mae.data.decode.limits import UnreadableImage
from mae.errors import MAEError, UsageError
from mae.evaluation.common.average_precision import FoundObjects, Size, coco_results, mask_area, runs_of
from mae.evaluation.common.finetuning import DETECTOR_FILE
from mae.evaluation.pictures.detection import THRESHOLD, colours_of, with_found
from mae.evaluation.pictures.predict import images_for, name_within, only_file
from mae.models.detector import Detections, Detector
from mae.models.file import is_detector, load_with_report
from mae.models.given_images import scaled
from mae.models.preprocess import preprocessing_of
from mae.records import check_new, short_name, whole_folder, write_whole
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
    tell: Callable[[str], object] = lambda line: None,
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
        tell: is given what is unusual about the values of the images, and what is wrong with each that cannot be read.

    Returns:
        What was found in each readable image, by its name.

    Raises:
        UsageError: no detector or images, values in another unit than the model expects, or a folder that is there
            already.
        MAEError: no image can be read, a damaged file, or no place to write; nothing is left then.
    """
    check_new(Path(out))
    detector = deepcopy(model) if isinstance(model, Detector) else _loaded(Path(model))
    where = choose_device(device)
    detector = detector.to(where).eval()
    images = images_for(concealed(str(source)), Path(data_root), preprocessing_of(detector.config), tell=tell)
    found: dict[str, FoundObjects] = {}
    sizes: dict[str, Size] = {}  # by name, too: a list may name a file twice
    with whole_folder(Path(out)) as folder:
        for number in range(len(images)):
            try:
                image = scaled(images.get(number))
            except UnreadableImage as error:
                tell(str(error))
                continue
            objects = of_detections(detector.detect([image.to(where)], threshold=threshold)[0])
            name = images.item_name(number)
            found[name] = objects
            sizes[name] = (image.shape[1], image.shape[2])
            picture = with_found(colours_of(images, number), objects, detector.class_names)
            pixels = np.rint(picture.clamp(0, 1).numpy() * 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{number:05d}-{short_name(Path(name).stem)}.png")
        if not found:
            raise MAEError(f"no image of {source} can be read")
        names = [name_within(name, str(source)) for name in found]
        told = _as_coco(names, list(found.values()), list(sizes.values()), detector)
        write_whole(folder / FILE, json.dumps(told) + "\n")
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
    names: Sequence[str], found: Sequence[FoundObjects], sizes: Sequence[Size], detector: Detector
) -> dict[str, Any]:
    """Annotations as in COCO's files of labels, so that they can be read as such; the area is that of the mask."""
    annotations = []
    results = coco_results(found, sizes, masks=detector.described.masks)
    boxes = [box for of in found for box in of.boxes.tolist()]
    for number, (entry, (left, top, right, bottom)) in enumerate(zip(results, boxes, strict=True), start=1):
        width, height = right - left, bottom - top
        area = mask_area(entry["segmentation"]) if "segmentation" in entry else width * height
        annotations.append({"id": number, "bbox": [left, top, width, height], "area": area, "iscrowd": 0, **entry})
    return {
        "images": [
            {"id": number, "file_name": name, "height": height, "width": width}
            for number, (name, (height, width)) in enumerate(zip(names, sizes, strict=True), start=1)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(detector.class_names, start=1)],
        "annotations": annotations,
    }
