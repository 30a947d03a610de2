"""YOLO's labels and the YAML that comes with them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torchvision.ops import box_convert

from mae.data.annotations.detection import open_detection, read_detection
from mae.data.annotations.plain_yaml import read_plain_yaml
from mae.errors import MAEError, UsageError

NAMES = "names: [cat, 'a dog']\n"


def write(path: Path, text: str = "1 0.5 0.5 0.2 0.4\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def image(path: Path, size: tuple[int, int] = (20, 10)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (7, 8, 9)).save(path)


def three_labelled(root: Path) -> None:
    for number in range(3):
        image(root / "images" / f"{number}.jpg")
        write(root / "labels" / f"{number}.txt")


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ("images/{part}/{name}", "path: /somewhere/data\ntrain: images/train\nval: images/val\n" + NAMES),
        ("{part}/images/{name}", "train: ../train/images\nval: ../val/images\nnc: 2\n" + NAMES),
        ("{part}/images/{name}", "train: [train/images]\nval:\n  - val/images\nnames:\n  0: cat\n  1: a dog\n"),
        ("sub/images/{part}/{name}", "path: ../sub\ntrain: images/train\nval: images/val\nnames:\n- cat\n- a dog\n"),
        ("images/{part}/{name}", NAMES),
        ("{part}/images/{name}", NAMES),
        ("{part}/{name}", "train: train\nval: val\n" + NAMES),
    ],
)
def test_folders_are_found_by_yaml_and_by_looking(tmp_path: Path, images: str, told: str):
    for part, count in (("train", 3), ("val", 2)):
        for number in range(count):
            path = images.format(part=part, name=number)
            image(tmp_path / f"{path}.jpg")
            write(tmp_path / f"{path.replace('images', 'labels')}.txt")
    write(tmp_path / "data.yaml", told)
    data = open_detection(tmp_path)
    assert data.note == "YOLO: 3 training images and 2 test images, 5 boxes of 2 classes"
    assert data.class_names == ("cat", "a dog")
    assert data.train.objects(0).boxes == pytest.approx(np.array([[8, 3, 12, 7]]))
    assert data.train.objects(0).classes.tolist() == [1]


def test_images_that_a_list_names_and_that_are_not_there_are_counted(tmp_path: Path):
    three_labelled(tmp_path)
    write(tmp_path / "train.txt", "./images/0.jpg\nimages/1.jpg\nimages/gone.jpg\n")
    write(tmp_path / "val.txt", "images/2.jpg\nimages/lost.jpg\n")
    write(tmp_path / "data.yaml", "train: train.txt\nval: val.txt\n" + NAMES)
    note = open_detection(tmp_path).note
    assert note.startswith("YOLO: 2 training images and 1 test image, 3 boxes")
    assert note.endswith("; 2 images listed but not there left out")


@pytest.mark.parametrize("told", ["train: Images\n" + NAMES, NAMES, ""])
def test_folders_may_be_in_capitals(tmp_path: Path, told: str):
    for number in range(3):
        image(tmp_path / "Images" / f"{number}.jpg")
        write(tmp_path / "Labels" / f"{number}.txt")
    write(tmp_path / "data.yaml" if told else tmp_path / "Labels" / "classes.txt", told or "cat\na dog\n")
    assert open_detection(tmp_path).note.endswith("a fifth held out, 3 boxes of 2 classes")


def test_labels_without_an_image_are_counted(tmp_path: Path):
    three_labelled(tmp_path)
    for name in ("gone", "lost", "classes"):
        write(tmp_path / "labels" / f"{name}.txt", "cat\na dog\n")
    note = open_detection(tmp_path).note
    assert note.endswith("3 boxes of 2 classes; 2 label files without an image left out")
    write(tmp_path / "train.txt", "images/0.jpg\nimages/1.jpg\n")  # 2 is there, and not listed
    write(tmp_path / "data.yaml", "train: train.txt\n" + NAMES)
    assert open_detection(tmp_path).note.endswith("2 boxes of 2 classes; 2 label files without an image left out")


def test_texts_beside_images_are_no_labels_without_an_image(tmp_path: Path):
    for part, count in (("train", 2), ("val", 1)):
        for number in range(count):
            image(tmp_path / part / f"{number}.jpg")
            write(tmp_path / part / f"{number}.txt")
        write(tmp_path / part / "licence.txt")
    write(tmp_path / "data.yaml", "train: train\nval: val\n" + NAMES)
    assert open_detection(tmp_path).note.endswith("3 boxes of 2 classes")


def test_a_part_without_images_is_named(tmp_path: Path):
    three_labelled(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "data.yaml", "train: images\nval: empty\n" + NAMES)
    with pytest.raises(UsageError, match="the test part holds no image; expected one or more"):
        open_detection(tmp_path)


def test_an_image_that_lists_name_twice_counts_once(tmp_path: Path):
    three_labelled(tmp_path)
    write(tmp_path / "first.txt", "./images/0.jpg\nimages/1.jpg\nimages/0.jpg\n")
    write(tmp_path / "more.txt", "images/1.jpg\n")
    write(tmp_path / "val.txt", "images/2.jpg\n")
    write(tmp_path / "data.yaml", "train: [first.txt, more.txt]\nval: val.txt\n" + NAMES)
    assert list(open_detection(tmp_path).train.source.names) == ["images/0.jpg", "images/1.jpg"]


def test_boxes_are_those_of_torchvision(tmp_path: Path):
    shares = torch.rand(30, 4, generator=torch.Generator().manual_seed(0)) * 0.4 + 0.3
    image(tmp_path / "images" / "1.jpg", (640, 480))
    image(tmp_path / "images" / "2.jpg", (640, 480))
    text = "\n".join(" ".join(f"{value:.8f}" for value in row) for row in shares.tolist())
    for name in ("1", "2"):
        write(tmp_path / "labels" / f"{name}.txt", "\n".join(f"0 {line}" for line in text.splitlines()))
    expected = box_convert(shares * torch.tensor([640, 480, 640, 480]), "cxcywh", "xyxy").clamp(
        torch.zeros(4), torch.tensor([640, 480, 640, 480])
    )
    data = open_detection(tmp_path)
    assert torch.from_numpy(data.test.objects(0).boxes).allclose(expected, atol=1e-3)
    assert data.class_names == ("class 0",)


@pytest.mark.parametrize("shape", ["[2, 2]", "[1, 3]"])
def test_keypoints_behind_a_box_are_no_corners(tmp_path: Path, shape: str):
    points = "0.1 0.1 0.9 0.9" if shape == "[2, 2]" else "0.1 0.9 2"
    for number in range(2):
        image(tmp_path / "images" / f"{number}.jpg")
        write(tmp_path / "labels" / f"{number}.txt", f"0 0.5 0.5 0.2 0.4 {points}\n")
    write(tmp_path / "data.yaml", f"train: images\nkpt_shape: {shape}\n{NAMES}")
    data = open_detection(tmp_path)
    assert data.train.objects(0).boxes == pytest.approx(np.array([[8, 3, 12, 7]]))
    assert not data.train.has_masks


def test_polygons_have_the_box_around_them(tmp_path: Path):
    for name in ("1", "2", "3"):
        image(tmp_path / "images" / f"{name}.jpg")
    write(tmp_path / "labels" / "1.txt", "0 0.1 0.2 0.5 0.2 0.5 0.6 0.1 0.6\n\n1 0 0 1 0 .5 1\n")
    write(tmp_path / "labels" / "2.txt", "")
    write(tmp_path / "labels" / "classes.txt", "cat\na dog\n")
    data = open_detection(tmp_path)
    assert "2 outlined objects of 2 classes; 1 image without a file of labels" in data.note
    split = next(split for split in (data.train, data.test) if "images/1.jpg" in list(split.source.names))
    objects = split.objects(list(split.source.names).index("images/1.jpg"))
    assert objects.boxes == pytest.approx(np.array([[2, 2, 10, 6], [0, 0, 20, 10]]))
    mask = objects.masks(10, 20)
    assert mask[0, 2:6, 2:10].all() and mask[0].sum() == 32
    write(tmp_path / "labels" / "2.txt", "0 .5 .5 .1 .1")
    mixed = open_detection(tmp_path)
    assert not mixed.train.has_masks and "outlines are not used: 1 image with boxes alone" in mixed.note


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat .5 .5 .1 .1", "expected the number of a class"),
        ("-1 .5 .5 .1 .1", "expected the number of a class"),
        ("0.5 .5 .5 .1 .1", "expected the number of a class"),
        ("0 .5 .5 .1", "has 3 numbers after the class"),
        ("0 .5 .5 .1 .1 .9", "has 5 numbers after the class"),
        ("0 nan .5 .1 .1", "expected shares of the image's sides"),
        ("0 1e9 .5 .1 .1", "expected shares of the image's sides"),
    ],
)
def test_lines_that_are_no_labels_are_refused(tmp_path: Path, text: str, message: str):
    image(tmp_path / "images" / "1.jpg")
    write(tmp_path / "labels" / "1.txt", f"0 .5 .5 .1 .1\n{text}\n")
    with pytest.raises(MAEError, match=f"1.txt, line 2.*{message}"):
        open_detection(tmp_path)


def test_classes_without_a_name_are_refused_but_read_for_the_doctor(tmp_path: Path):
    for name in ("1", "2"):
        image(tmp_path / "images" / f"{name}.jpg")
        write(tmp_path / "labels" / f"{name}.txt", "2 .5 .5 .1 .1\n")
    write(tmp_path / "data.yml", "train: images\n" + NAMES)
    with pytest.raises(MAEError, match="hold a class that has no name; expected one of cat, a dog"):
        open_detection(tmp_path)
    assert read_detection(tmp_path).train.written[0].classes.tolist() == [-1]


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("train: elsewhere\n" + NAMES, "names elsewhere, which is not in the folder"),
        ("train: ../..\n" + NAMES, "which is not in the folder"),
        ("train: /etc\n" + NAMES, "names /etc, which is not in the folder"),
        ("train: //etc\n" + NAMES, "names //etc, which is not in the folder"),
        ("path: ..\ntrain: secret\n" + NAMES, "names secret, which is not in the folder"),
        (f"train: {'a' * 5000}\n" + NAMES, "which is not in the folder"),
        ("train: long.txt\n" + NAMES, "no image has labels"),
        ("train: list.txt\n" + NAMES, "expected a path inside the folder"),
        ("train: images\nnames:\n  1: cat\n", "expected a list, or a mapping"),
        ("train: images\nnames: [cat, dog, cat]\n", "two classes are called 'cat'; give each a name of its own"),
    ],
)
def test_yaml_that_leads_out_of_the_folder_is_refused(tmp_path: Path, told: str, message: str):
    image(tmp_path / "images" / "1.jpg")
    write(tmp_path / "labels" / "1.txt")
    write(tmp_path / "long.txt", "a" * 5000 + ".jpg\n")
    (tmp_path.parent / "secret").mkdir(exist_ok=True)
    write(tmp_path / "list.txt", "images/1.jpg\n../../secret.jpg\n")
    write(tmp_path / "data.yaml", told)
    with pytest.raises((UsageError, MAEError), match=message):
        open_detection(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "names: [cat, 'a dog', \"x, y\", bird]  # three\ntrain: images/train # here\n",
        "names:\n  - cat\n  - 'it''s'\n  - don't # this\n\ntrain: 'a b'\n",
        "# set\nnames:\n  0: person\n  1: 'traffic light'\n  10: \"x: y\"\npath: ../datasets/coco8  # root\ntest:\n",
        "names: {0: cat, 1: dog}\n",
        "names: [\n  'a',\n  'b',   # second\n  c\n]\nnc: 3\n",
        "names: ['aeroplane', 'bicycle']\r\ntrain: ../train/images\r\nroboflow:\r\n  license: MIT\r\n  version: 1\r\n",
        "names:\n- a\n- b\nval: [x/images, y/images]\n",
        '"names": [a-b, c_d, e.f]\n',
        "names: ['a #1', \"b # 2\", it's, 'c''s #3'] # four\n",
        "names: [\n  'a #1', # first\n  'b #2'\n]\n",
        "names: {0: 'a #1', 1: \"b #2\"} # two\n",
        "names:\n  0: 'a #1' # first\n  1: b#2\n",
    ],
)
def test_yaml_is_read_as_pyyaml_reads_it(text: str):
    def plain(value: object) -> object:
        if isinstance(value, list):
            return [str(item) for item in value]
        return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else str(value)

    expected = {key: plain(value) for key, value in yaml.safe_load(text).items() if value is not None}
    assert read_plain_yaml(text) == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "a" + " " * (1 << 20) + "b",
        "names: [\n" + "a,\n" * (1 << 18),
        "'" * (1 << 20),
        "a:" * (1 << 19),
        "a: [" + ",'''" * (1 << 18),
    ],
)
def test_hostile_yaml_takes_no_more_time_than_its_length(text: str):
    read_plain_yaml(text)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("names: [cat, dog", r"names are '\[cat, dog'; expected a list"),
        ("nc: 5\n" + NAMES, r"tells 5 classes \(nc\) and names 2; correct one of them"),
    ],
)
def test_a_yaml_file_that_contradicts_itself_is_refused(tmp_path: Path, told: str, message: str):
    image(tmp_path / "images" / "1.jpg")
    write(tmp_path / "labels" / "1.txt")
    write(tmp_path / "data.yaml", told)
    with pytest.raises(UsageError, match=message):
        open_detection(tmp_path)


def test_names_that_nothing_tells_are_said_to_be_numbers(tmp_path: Path):
    for number in range(2):
        image(tmp_path / "images" / f"{number}.jpg")
        write(tmp_path / "labels" / f"{number}.txt")
    write(tmp_path / "data.yaml", "train: images\n")
    assert "classes called by their numbers" in open_detection(tmp_path).note
    write(tmp_path / "data.yaml", "train: images\n" + NAMES)
    assert "called by their numbers" not in open_detection(tmp_path).note
