"""COCO's labels."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.mask import encode

from mae.data.annotations.detection import open_detection, read_detection
from mae.data.inspect.labels import inspect_labels
from mae.errors import MAEError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # pycocotools'


def image(path: Path, size: tuple[int, int] = (20, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (7, 8, 9)).save(path)


def coco(numbers: range, **changes: object) -> dict:
    """Labels of an object in each of some images, and two in the first."""
    numbered = [*numbers, numbers[0]]
    return {
        "info": {"year": 2017},
        "images": [{"id": n + 100, "file_name": f"{n}.jpg", "width": 20, "height": 10, "license": 1} for n in numbers],
        "annotations": [
            {"id": row, "image_id": n + 100, "category_id": 7, "bbox": [1.5, 2, 3, 4], "area": 12, "iscrowd": 0}
            for row, n in enumerate(numbered)
        ],
        "categories": [{"id": 7, "name": "cat", "supercategory": "animal"}, {"id": 3, "name": "dog"}],
    } | changes


def write(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("labels", "images"),
    [
        ("annotations/instances_{part}2017.json", "{part}2017/{number}.jpg"),
        ("annotations/instances_{part}2017.json", "images/{part}2017/{number}.jpg"),
        ("annotations/{part}.json", "images/{number}.jpg"),
        ("annotations/{part}.json", "{part}/{number}.jpg"),
        ("{part}/_annotations.coco.json", "{part}/{number}.jpg"),
    ],
)
def test_files_and_images_are_found_by_looking(tmp_path: Path, labels: str, images: str):
    for part, numbers in (("train", range(3)), ("val", range(3, 5))):
        for number in numbers:
            image(tmp_path / images.format(part=part, number=number))
        write(tmp_path / labels.format(part=part), coco(numbers))
    write(tmp_path / "annotations" / "captions_train2017.json", {})
    data = open_detection(tmp_path)
    assert data.note == "COCO: 3 training images and 2 test images, 7 boxes of 2 classes"
    assert data.class_names == ("dog", "cat")  # by their ids
    objects = data.train.objects(0)
    assert objects.boxes.tolist() == [[1.5, 2, 4.5, 6]] * 2 and objects.classes.tolist() == [1, 1]


def test_one_file_beside_images_has_a_fifth_held_out(tmp_path: Path):
    for number in range(9):
        image(tmp_path / f"{number}.jpg")
    write(tmp_path / "labels.json", coco(range(10)))
    data = open_detection(tmp_path)
    assert data.note == (
        "COCO: 7 training images and 2 test images, a fifth held out, 10 boxes of 2 classes; 1 image listed but not "
        "there left out"
    )


def test_a_byte_order_mark_is_passed_over(tmp_path: Path):
    for number in range(9):
        image(tmp_path / "images" / f"{number}.jpg")
    labels = coco(range(9), categories=[{"id": 7, "name": "größer"}])
    (tmp_path / "labels.json").write_text(json.dumps(labels, ensure_ascii=False), encoding="utf-8-sig")
    data = open_detection(tmp_path)
    assert data.class_names == ("größer",) and data.note.endswith("10 boxes of 1 class")


def test_outlines_are_those_of_pycocotools(tmp_path: Path):
    image(tmp_path / "0.jpg")
    image(tmp_path / "1.jpg")
    square = [2, 1, 8, 1, 8, 6, 2, 6]
    runs = {"size": [10, 20], "counts": [20, 5, 5, 6, 164]}
    disc = np.hypot(*np.mgrid[-4:6, -9:11]) < 4
    packed = encode(np.asfortranarray(disc.astype(np.uint8)))
    packed["counts"] = packed["counts"].decode()
    values = coco(range(2))
    outlines = [[square, [10, 1, 12, 1, 12, 3, 10, 3]], runs, packed]
    for annotation, outline, crowd in zip(values["annotations"], outlines, (0, 1, 0), strict=True):
        annotation |= {"segmentation": outline, "iscrowd": crowd}
    write(tmp_path / "labels.json", values)
    with contextlib.redirect_stdout(io.StringIO()):
        oracle = COCO(tmp_path / "labels.json")
    data = open_detection(tmp_path)
    assert data.train.has_masks and "3 outlined objects" in data.note
    for split in (data.train, data.test):
        name = split.source.names[0]
        objects = split.objects(0)
        theirs = oracle.imgToAnns[int(Path(name).stem) + 100]
        expected = np.stack([oracle.annToMask(each) > 0 for each in theirs])
        assert (objects.masks(10, 20) == expected).all()
        assert objects.crowd.tolist() == [each["iscrowd"] == 1 for each in theirs]


def test_a_super_category_among_the_categories_is_left_out(tmp_path: Path):
    image(tmp_path / "0.jpg"), image(tmp_path / "1.jpg")
    categories = [
        {"id": 0, "name": "cells", "supercategory": "none"},
        {"id": 3, "name": "red", "supercategory": "cells"},
        {"id": 7, "name": "white", "supercategory": "cells"},
    ]
    write(tmp_path / "labels.json", coco(range(2), categories=categories))
    assert open_detection(tmp_path).class_names == ("red", "white")


def test_a_class_without_a_name_is_refused_but_read_for_the_doctor(tmp_path: Path):
    image(tmp_path / "0.jpg"), image(tmp_path / "1.jpg")
    write(tmp_path / "labels.json", coco(range(2), categories=[{"id": 1, "name": "cat"}]))
    with pytest.raises(MAEError, match="hold a class that has no name; expected one of cat"):
        open_detection(tmp_path)
    assert (read_detection(tmp_path).train.written[0].classes == -1).all()


@pytest.mark.parametrize("changes", [{}, {"annotations": []}])
def test_labels_that_name_no_classes_are_refused(tmp_path: Path, changes: dict):
    image(tmp_path / "0.jpg"), image(tmp_path / "1.jpg")
    write(tmp_path / "labels.json", coco(range(2), categories=[], **changes))
    with pytest.raises(UsageError, match="the labels name no classes; expected one or more"):
        open_detection(tmp_path)


def annotation(**changes: object) -> dict:
    return {"annotations": [{"image_id": 100, "category_id": 7, "bbox": [1, 2, 3, 4]} | changes]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "images input should be a valid"),
        (annotation(bbox=[1, 2, 3]), "annotations.0.bbox"),
        (annotation(bbox=[1, 2, 3, float("nan")]), "annotations.0.bbox.3"),
        (annotation(bbox=[1, 2, 3, 1e30]), "annotations.0.bbox.3"),
        (annotation(image_id=5), "annotation 0 is of image 5"),
        (annotation(segmentation=[[1, 2, 3, 4]]), "polygon of other than 6, 8"),
        (annotation(segmentation={"size": [10, 20], "counts": [1, 2]}), "has runs of 3 pixels; expected 200"),
        (annotation(segmentation={"size": [10, 20], "counts": "\n"}), "no compressed run lengths"),
        (annotation(segmentation={"size": [10, 1 << 30], "counts": [1]}), "annotations.0.segmentation"),
        ({"images": [{"id": 100, "file_name": "../../etc/passwd"}]}, "expected a path inside the folder"),
        ({"images": [{"id": 100, "file_name": "/etc/passwd"}]}, "expected a path inside the folder"),
        ({"images": [{"id": 100, "file_name": "C:\\secret.jpg"}]}, "expected a path inside the folder"),
        ({"images": [{"id": 100, "file_name": "https://example.org/1.jpg"}]}, "expected a path inside the folder"),
        ({"annotations": [], "images": [{"id": 100, "file_name": "absent.jpg"}]}, "none of the labelled images"),
        ({"annotations": [], "images": [{"id": 1, "file_name": "a" * 5000 + ".jpg"}]}, "none of the labelled images"),
        ({"annotations": [], "images": [{"id": 1, "file_name": "a\0.jpg"}]}, "expected a path inside the folder"),
        (
            {"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "cat"}]},
            "two classes are called 'cat'; give each",
        ),
        ({"categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": " "}]}, "class 2 of 2 has no name; give it one"),
        ({"categories": [{"id": 1, "name": ""}]}, "class 1 of 1 has no name; give it one"),
        ({"images": [{"id": 100, "file_name": f"{n}.jpg"} for n in range(2)]}, "several of its images have the id 100"),
        (
            {"images": [{"id": n, "file_name": name} for n, name in ((100, "1.jpg"), (101, "./1.jpg"))]},
            r"labels\.json: the images of the ids 100 and 101 are both '1.jpg'; expected it once: give its annotations",
        ),
        (
            {"annotations": [{"image_id": 100, "category_id": 7, "bbox": [1, 2, 3, float("nan")]}]},
            "annotations.0.bbox.3 input should be a finite number",
        ),
        (
            {
                "annotations": [
                    {
                        "image_id": 100,
                        "category_id": 7,
                        "bbox": [1, 2, 3, 4],
                        "segmentation": {"size": [10**9, 10], "counts": [1]},
                    }
                ]
            },
            r"annotations.0.segmentation.size.0 input should be less than or equal to",
        ),
    ],
)
def test_files_that_are_no_labels_are_refused(tmp_path: Path, changes: dict, message: str):
    image(tmp_path / "0.jpg"), image(tmp_path / "1.jpg")
    write(tmp_path / "labels.json", coco(range(2), **changes))
    with pytest.raises((MAEError, UsageError), match=message):
        open_detection(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"images": 1}'])
def test_text_that_is_no_json_of_labels_is_refused(tmp_path: Path, text: str):
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(MAEError, match="no JSON of COCO's labels"):
        open_detection(tmp_path)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["train/a.json", "val/a.json", "val/old.json"], "a.json, old.json for the test part"),
        (
            ["annotations/cars_train.json", "annotations/dogs_train.json"],
            "cars_train.json, dogs_train.json for the",
        ),
    ],
)
def test_several_files_of_a_part_are_refused(files: list[str], told: str, tmp_path: Path):
    for number in range(4):
        image(tmp_path / "images" / f"{number}.jpg")
    for file in files:
        write(tmp_path / file, coco(range(2)))
    with pytest.raises(UsageError, match=f"holds {told}.*merge or remove some"):
        open_detection(tmp_path)


@pytest.mark.parametrize(("part", "crowd"), [("train", False), ("train", True), ("val", False)])
def test_a_part_without_an_object_stops_the_doctor(tmp_path: Path, part: str, crowd: bool):
    for number in range(5):
        image(tmp_path / "images" / f"{number}.jpg")
    for each, numbers in {"train": range(3), "val": range(3, 5)}.items():
        labels = coco(numbers)
        if each == part:
            left = labels["annotations"] if crowd else []
            labels["annotations"] = [{**annotation, "iscrowd": 1} for annotation in left]
        write(tmp_path / "annotations" / f"instances_{each}.json", labels)
    findings = {finding.name: finding for finding in inspect_labels(tmp_path)[0]}
    told = findings["images without labels"]
    assert told.level == "stop" and told.value.startswith(f"no image of the {part.replace('val', 'test')} part has")


def test_beside_a_file_of_val_one_of_test_is_not_used(tmp_path: Path):
    for number in range(6):
        image(tmp_path / "images" / f"{number}.jpg")
    for part, numbers in {"train": range(3), "val": range(3, 5), "test": range(5, 6)}.items():
        write(tmp_path / "annotations" / f"instances_{part}.json", coco(numbers))
    data = open_detection(tmp_path)
    assert list(data.train.source.names) == ["0.jpg", "1.jpg", "2.jpg"]
    assert list(data.test.source.names) == ["3.jpg", "4.jpg"]


def test_a_file_that_lists_no_image_is_told_from_images_that_are_not_there(tmp_path: Path):
    for number in range(3):
        image(tmp_path / "train" / f"{number}.jpg")
    write(tmp_path / "train" / "_annotations.coco.json", coco(range(3)))
    write(tmp_path / "valid" / "_annotations.coco.json", coco(range(1), images=[], annotations=[]))
    with pytest.raises(UsageError, match="the test part holds no image; expected one or more"):
        open_detection(tmp_path)


def test_files_of_unknown_parts_are_refused(tmp_path: Path):
    write(tmp_path / "a.json", coco(range(2)))
    write(tmp_path / "b.json", coco(range(2)))
    with pytest.raises(UsageError, match=r"holds a.json, b.json; expected one JSON file"):
        open_detection(tmp_path)


def test_images_called_by_their_time_are_found(tmp_path: Path):
    labels = coco(range(3))
    for row, entry in enumerate(labels["images"]):
        entry["file_name"] = f"2024-05-01T12:30:0{row}.png"
        image(tmp_path / "images" / entry["file_name"])
    write(tmp_path / "labels.json", labels)
    data = open_detection(tmp_path)
    assert len(data.train.written) + len(data.test.written) == 3
