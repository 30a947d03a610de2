"""Average precision against pycocotools, on boxes and masks drawn at random, crowds among them."""

import sys
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from mae.data.annotations.objects import Objects, RunLengths, objects_of
from mae.errors import UsageError
from mae.evaluation.common.average_precision import (
    AveragePrecision,
    FoundObjects,
    average_precision,
    coco_results,
    ground_truth,
    runs_of,
)

NAMES = ("disc", "square", "never there")
SIZE = (160, 200)


def blob(box: np.ndarray) -> np.ndarray:
    """An ellipse in a box."""
    left, top, right, bottom = box
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]] + 0.5
    y, x = (rows - (top + bottom) / 2) / (bottom - top), (columns - (left + right) / 2) / (right - left)
    return np.asarray(y**2 + x**2 <= 0.25)


def run_lengths(mask: np.ndarray) -> RunLengths:
    flat = mask.T.ravel().astype(np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flat, [1 - flat[-1]]])))
    counts = np.diff(np.concatenate([[0], edges])).astype(np.int64)
    return RunLengths(height=SIZE[0], width=SIZE[1], counts=counts)


def drawn(rng: np.random.Generator, count: int) -> np.ndarray:
    corner = rng.uniform(0, 60, (count, 2))
    return np.concatenate([corner, corner + rng.uniform(4, 99, (count, 2))], axis=1).astype(np.float32)


def scenes(seed: int, *, images: int = 12) -> tuple[list[Objects], list[FoundObjects]]:
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(images):
        boxes, count = drawn(rng, 5), 5
        classes = rng.integers(0, 2, count)
        crowd = rng.random(count) < 0.2
        truth.append(objects_of(boxes, classes, crowd, [run_lengths(blob(box)) for box in boxes]))
        moved = boxes + rng.normal(0, 4, boxes.shape).astype(np.float32)
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 2)
        guesses = np.concatenate([moved[1:], drawn(rng, 3)]).clip(0, 159)
        labels = np.concatenate([classes[1:], rng.integers(0, 3, 3)])
        masks = np.stack([blob(box) for box in guesses])
        scores = rng.random(len(guesses)).astype(np.float32)
        found.append(FoundObjects(boxes=guesses, labels=labels, scores=scores, masks=runs_of(masks)))
    return truth, found


def by_pycocotools(
    truth: list[Objects], found: list[FoundObjects], area: str, capsys: pytest.CaptureFixture[str]
) -> Any:
    coco = COCO()
    coco.dataset = {
        "images": [{"id": n + 1, "height": SIZE[0], "width": SIZE[1]} for n in range(len(truth))],
        "categories": [{"id": n + 1, "name": name} for n, name in enumerate(NAMES)],
        "annotations": [],
    }
    for image, objects in enumerate(truth):
        for box, label, crowd in zip(objects.boxes, objects.classes, objects.crowd, strict=True):
            runs = coco_mask.encode(np.asfortranarray(blob(box).astype(np.uint8)))
            coco.dataset["annotations"].append(
                {
                    "id": len(coco.dataset["annotations"]) + 1,
                    "image_id": image + 1,
                    "category_id": int(label) + 1,
                    "bbox": [*map(float, box[:2]), float(box[2] - box[0]), float(box[3] - box[1])],
                    "segmentation": runs,
                    "area": float(coco_mask.area(runs)),
                    "iscrowd": int(crowd),
                }
            )
    coco.createIndex()
    results = coco.loadRes(coco_results(found, [SIZE] * len(truth), masks=area == "masks"))
    evaluation = COCOeval(coco, results, {"boxes": "bbox", "masks": "segm"}[area])
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    capsys.readouterr()
    return evaluation


def numbers(found: AveragePrecision) -> list[float]:
    named = (found.ap, found.ap50, found.ap75, found.small, found.medium, found.large)
    return [-1.0 if value is None else value for value in named]


@pytest.mark.parametrize("area", ["boxes", "masks"])
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_pycocotools(area: Any, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    truth, found = scenes(seed)
    ours = average_precision(ground_truth(truth, [SIZE] * len(truth), NAMES), found, area)
    theirs = by_pycocotools(truth, found, area, capsys)
    assert numbers(ours) == pytest.approx(list(theirs.stats[:6]), abs=1e-6)
    assert 0.05 < numbers(ours)[0] < 0.95
    for number, name in enumerate(NAMES[:2]):
        counted = theirs.eval["precision"][:, :, number, 0, 2]
        assert ours.by_class[name] == pytest.approx(counted[counted > -1].mean(), abs=1e-6)
    assert ours.by_class["never there"] is None


def test_what_is_right_is_1_and_what_is_missed_0() -> None:
    truth, _ = scenes(0, images=3)
    given = ground_truth(truth, [SIZE] * 3, NAMES)
    right = [
        FoundObjects(
            boxes=of.boxes[~of.crowd],
            labels=of.classes[~of.crowd],
            scores=np.ones((~of.crowd).sum(), np.float32),
            masks=runs_of(of.masks(*SIZE)[~of.crowd]),
        )
        for of in truth
    ]
    none = FoundObjects(
        boxes=np.zeros((0, 4), np.float32), labels=np.zeros(0, np.int64), scores=np.zeros(0, np.float32), masks=()
    )
    for area in ("boxes", "masks"):
        assert average_precision(given, right, area).ap == pytest.approx(1.0)  # type: ignore[arg-type]
        assert average_precision(given, [none] * 3, area).ap == 0.0  # type: ignore[arg-type]


def test_images_without_objects_have_no_precision() -> None:
    empty = ground_truth([objects_of([], [], [])], [SIZE], NAMES)
    none = FoundObjects(
        boxes=np.zeros((0, 4), np.float32), labels=np.zeros(0, np.int64), scores=np.zeros(0, np.float32)
    )
    assert average_precision(empty, [none], "boxes").ap is None


def test_a_missing_package_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(UsageError, match=r"pip install 'openmae\[detection\]'"):
        ground_truth([], [], NAMES)
