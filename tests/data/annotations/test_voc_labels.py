"""Pascal VOC's labels."""

from pathlib import Path

import numpy as np
import pytest
from pictures import SHARED
from PIL import Image

from mae.data.annotations.detection import open_detection
from mae.errors import MAEError, UsageError

OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{0}</xmin><ymin>{1}</ymin>"
    "<xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"
)


def labels(path: Path, *boxes: tuple[str, list[float]], size: tuple[int, int] = (20, 10), difficult: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    objects = "".join(OBJECT.format(*box, name=name, difficult=difficult) for name, box in boxes)
    width, height = size
    size_ = f"<size><width>{width}</width><height>{height}</height></size>"
    path.write_text(f"<annotation><filename>../../x.jpg</filename>{size_}{objects}</annotation>")


def image(path: Path, size: tuple[int, int] = (20, 10), colour: int = 7) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 8, 9)).save(path)


def voc(root: Path, count: int = 5) -> None:
    for number in range(count):
        image(root / "JPEGImages" / f"{number}.jpg", colour=number)
        labels(root / "Annotations" / f"{number}.xml", ("cat", [1, 1, 20, 10]), ("a dog", [3, 2, 3, 2]))


def test_corners_counted_from_one_become_edges(tmp_path: Path):
    voc(tmp_path)
    data = open_detection(tmp_path)
    assert data.note == "Pascal VOC: 4 training images and 1 test image, a fifth held out, 10 boxes of 2 classes"
    assert data.class_names == ("a dog", "cat")
    objects = data.train.objects(0)
    assert objects.boxes.tolist() == [[0, 0, 20, 10], [2, 1, 3, 2]]  # the whole image, and the third pixel of row 2
    assert objects.classes.tolist() == [1, 0] and not objects.crowd.any() and objects.outlines is None


def test_lists_tell_the_parts(tmp_path: Path):
    voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for name, stems in {
        "train": "0\n1\n0\n",
        "val": "2\n",
        "trainval": "0\n1\n2\n1.jpg",
        "test": "3\n../../etc/passwd\n",
    }.items():
        (lists / f"{name}.txt").write_text(stems)
    data = open_detection(tmp_path)
    assert list(data.train.source.names) == [f"JPEGImages/{number}.jpg" for number in range(3)]
    assert list(data.test.source.names) == ["JPEGImages/3.jpg"]
    assert data.note.endswith(
        "parts as listed in trainval.txt and test.txt; 1 image listed or labelled but not there left out"
    )
    (lists / "test.txt").unlink()
    assert list(open_detection(tmp_path).test.source.names) == ["JPEGImages/2.jpg"]


def test_labels_of_images_that_are_not_there_are_counted(tmp_path: Path):
    voc(tmp_path)
    labels(tmp_path / "Annotations" / "gone.xml", ("bird", [1, 1, 2, 2]))
    image(tmp_path / "JPEGImages" / "plain.jpg")
    data = open_detection(tmp_path)
    assert data.class_names == ("a dog", "cat") and "4 training images and 1 test image" in data.note
    assert data.note.endswith("; 1 image without labels left out; 1 image listed or labelled but not there left out")


def test_a_part_without_labels_is_told_from_one_without_images(tmp_path: Path):
    voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (lists / "trainval.txt").write_text("0\n1\n2\n")
    (lists / "test.txt").write_text("3\n4\n")
    for number in (3, 4):
        (tmp_path / "Annotations" / f"{number}.xml").unlink()
    with pytest.raises(UsageError, match=r"none of the test part's images has labels; expected 3.xml for JPEGImages/3"):
        open_detection(tmp_path)
    (tmp_path / "JPEGImages" / "3.jpg").unlink()
    (tmp_path / "JPEGImages" / "4.jpg").unlink()
    with pytest.raises(UsageError, match="none of the labelled images of the test part is there"):
        open_detection(tmp_path)
    (lists / "test.txt").write_text("\n")
    with pytest.raises(UsageError, match="the test part holds no image"):
        open_detection(tmp_path)


def test_labels_that_may_be_of_two_images_are_refused(tmp_path: Path):
    voc(tmp_path)
    image(tmp_path / "JPEGImages" / "3.png")
    with pytest.raises(UsageError, match=r"holds 3.jpg and 3.png for .*3.xml; expected one image for each"):
        open_detection(tmp_path)


@pytest.mark.parametrize("line", ["{}.jpg", "{}  1", "{} -1", "{}.JPG 0"])
def test_lists_name_images_with_their_ending_or_a_mark(line: str, tmp_path: Path):
    voc(tmp_path)
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    for name, numbers in {"train": range(3), "val": range(3, 5)}.items():
        (lists / f"{name}.txt").write_text("\n".join(map(line.format, numbers)))
    data = open_detection(tmp_path)
    assert list(data.test.source.names) == ["JPEGImages/3.jpg", "JPEGImages/4.jpg"]


def test_labels_beside_images_in_folders_of_the_parts(tmp_path: Path):
    for part in ("train", "valid"):
        image(tmp_path / part / "1.jpg")
        labels(tmp_path / part / "1.xml", ("cat", [2, 2, 5.5, 5]), difficult=1)
        image(tmp_path / part / "2.jpg")
    data = open_detection(tmp_path)
    assert "1 training image and 1 test image, 2 boxes" in data.note and "2 images without labels left out" in data.note
    assert data.test.objects(0).crowd.all() and data.test.objects(0).boxes.tolist() == [[1, 1, 5.5, 5]]


def test_boxes_are_cut_at_the_edges_and_empty_ones_left_out(tmp_path: Path):
    voc(tmp_path)
    labels(tmp_path / "Annotations" / "0.xml", ("cat", [-3, 1, 50, 4]), ("cat", [5, 5, 4, 6]), ("cat", [30, 1, 40, 4]))
    data = open_detection(tmp_path)
    split, row = next(
        (split, row)
        for split in (data.train, data.test)
        for row, name in enumerate(split.source.names)
        if name.endswith("/0.jpg")
    )
    assert split.objects(row).boxes.tolist() == [[0, 0, 20, 4]]
    assert len(split.written[row]) == 3


@pytest.mark.parametrize("size", [(10, 20), (19, 10), (20, 9)])
def test_labels_for_another_size_are_refused(tmp_path: Path, size: tuple[int, int]):
    voc(tmp_path)
    for number in range(5):
        labels(tmp_path / "Annotations" / f"{number}.xml", ("cat", [1, 1, 5, 5]), size=size)
    with pytest.raises(MAEError, match=f"10 x 20 pixels, and its labels are for {size[1]} x {size[0]}"):
        open_detection(tmp_path).train.objects(0)


def test_a_size_of_0_tells_nothing(tmp_path: Path):
    voc(tmp_path)
    for number in range(5):
        labels(tmp_path / "Annotations" / f"{number}.xml", ("cat", [1, 1, 5, 5]), size=(0, 0))
    assert len(open_detection(tmp_path).train.objects(0)) == 1


def test_the_version_changes_with_the_labels(tmp_path: Path):
    voc(tmp_path)
    first = open_detection(tmp_path).train.version()
    assert open_detection(tmp_path).train.version() == first
    for number in range(5):
        labels(tmp_path / "Annotations" / f"{number}.xml", ("cat", [1, 1, 20, 10]), ("a dog", [3, 2, 4, 2]))
    assert open_detection(tmp_path).train.version() != first


BOMB = (
    '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>'
    "<annotation><object><name>&b;</name></object></annotation>"
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "declares a document type"),
        ("<annotation><object>", "no XML of Pascal VOC"),
        ("<annotation><object><bndbox/></object></annotation>", "without <name>"),
        ("<annotation><object><name>a</name></object></annotation>", "without <bndbox/xmin>"),
        (
            f"<annotation>{OBJECT.format('nan', 1, 2, 3, name='a', difficult=0)}</annotation>",
            "has nan as <bndbox/xmin>",
        ),
        (f"<annotation>{OBJECT.format('1e9', 1, 2, 3, name='a', difficult=0)}</annotation>", "has 1e9 as"),
        ("<annotation>" + " " * (17 << 20) + "</annotation>", "at most 16,384 KiB"),
    ],
)
def test_hostile_files_are_refused(tmp_path: Path, text: str, message: str):
    voc(tmp_path, 2)
    (tmp_path / "Annotations" / "1.xml").write_text(text)
    with pytest.raises(MAEError, match=message):
        open_detection(tmp_path)


def test_folders_without_labels_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="no folder"):
        open_detection(tmp_path / "absent")
    image(tmp_path / "1.jpg")
    with pytest.raises(UsageError, match="no labels of a known kind"):
        open_detection(tmp_path)


@pytest.mark.skipif(not (SHARED / "bccd").is_dir(), reason="the blood cells are not here")
def test_blood_cells():
    data = open_detection(SHARED / "bccd")
    assert data.note.startswith("Pascal VOC: 292 training images and 72 test images, 4,888 boxes of 3 classes")
    counts = np.bincount(np.concatenate([objects.classes for objects in data.train.written + data.test.written]))
    assert dict(zip(data.class_names, counts.tolist(), strict=True)) == {"Platelets": 361, "RBC": 4155, "WBC": 372}
