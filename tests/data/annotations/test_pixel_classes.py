"""What values in masks stand for."""

from pathlib import Path

import numpy as np
import pytest

from mae.data.annotations.pixel_classes import IGNORED, pixel_classes, read_classes
from mae.errors import MAEError, UsageError


def test_numbers_are_in_the_order_of_the_list_and_what_does_not_count_is_left_out():
    listed = {"sky": None, "void": None, "road": None}
    classes = pixel_classes(listed, (), coloured=False, ignore=(), name="set")
    assert classes.names == ("sky", "road") and classes.values == (0, 2)
    mask = np.array([[0, 1, 2], [255, 2, 0]], dtype=np.uint8)
    assert classes.of(mask, name="m").tolist() == [[0, IGNORED, 1], [IGNORED, 1, 0]]
    grey = np.repeat(mask[:, :, None], 3, axis=2)
    assert (classes.of(grey, name="m") == classes.of(mask, name="m")).all()


def test_without_a_list_the_numbers_are_the_classes_and_some_may_be_left_out():
    classes = pixel_classes(None, {7, 0, 3, 255}, coloured=False, ignore=(0,), name="set")
    assert classes.names == ("class 3", "class 7")
    assert classes.of(np.array([[0, 3, 7, 255]], dtype=np.uint16), name="m").tolist() == [[IGNORED, 0, 1, IGNORED]]


def test_colours_are_those_of_the_list():
    listed = {"road": 128 << 16 | 64 << 8 | 128, "Void": 0, "sky": 255}
    classes = pixel_classes(listed, (), coloured=True, ignore=(), name="set")
    assert classes.names == ("road", "sky")
    mask = np.array([[[128, 64, 128], [0, 0, 0], [0, 0, 255]]], dtype=np.uint8)
    assert classes.of(mask, name="m").tolist() == [[0, IGNORED, 1]]


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (
            np.array([[0, 9]], dtype=np.uint8),
            "holds the number 9, which stands for no class; expected the numbers 0, 1",
        ),
        (np.array([[[1, 2, 3]]], dtype=np.uint8), "holds colours, other masks numbers of classes"),
    ],
)
def test_unknown_values_are_refused_with_the_file(mask: np.ndarray, told: str):
    classes = pixel_classes({"a": None, "b": None}, (), coloured=False, ignore=(), name="set")
    with pytest.raises(MAEError, match=f"^m.png {told}"):
        classes.of(mask, name="m.png")


def test_numbers_among_colours_and_unknown_colours_are_refused():
    classes = pixel_classes({"a": 1, "b": 2}, (), coloured=True, ignore=(), name="set")
    with pytest.raises(MAEError, match="holds numbers of classes, other masks colours"):
        classes.of(np.zeros((1, 1), dtype=np.uint8), name="m.png")
    with pytest.raises(MAEError, match="the colour 9 8 7, which stands for no class"):
        classes.of(np.array([[[9, 8, 7]]], dtype=np.uint8), name="m.png")


def test_too_few_classes_and_colours_without_a_list_are_refused():
    with pytest.raises(UsageError, match="has 1 classes that count; expected 2 to 255; 255 marks .* as 0 and 1"):
        pixel_classes(None, {0, 255}, coloured=False, ignore=(), name="data")
    with pytest.raises(UsageError, match="has 1 classes that count; expected 2 to 255$"):
        pixel_classes(None, {0}, coloured=False, ignore=(), name="set")
    for listed in (None, {"road": None, "sky": 3}):
        with pytest.raises(UsageError, match="the masks hold colours, and nothing says which class"):
            pixel_classes(listed, {1, 2}, coloured=True, ignore=(), name="set")


def test_a_list_of_classes_is_read_in_each_of_its_forms(tmp_path: Path):
    path = tmp_path / "classes.txt"
    path.write_text("# names\nroad\n\n3 traffic sign\n5: tree\nsky 1 2 3\n4,5,6,wall\nroad 66\n")
    assert read_classes(path) == {
        "road": None, "traffic sign": 3, "tree": 5, "sky": 0x010203, "wall": 0x040506, "road 66": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# names\nstanding 1\nflat plain 2\n\nlying 0\n", {"standing": 1, "flat plain": 2, "lying": 0}),
        ("zone 1\nzone 2\n", {"zone 1": None, "zone 2": None}),
        ("road 3\nwall\n", {"road 3": None, "wall": None}),
    ],
)
def test_numbers_stand_behind_names_where_all_end_in_one(text: str, expected: dict, tmp_path: Path):
    (tmp_path / "classes.txt").write_text(text)
    assert read_classes(tmp_path / "classes.txt") == expected


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\na\n", "line 2 names 'a' again"),
        ("a\nb 1 2 256\n", "line 2: 'b 1 2 256'; expected red, green and blue"),
    ],
)
def test_a_wrong_list_is_refused_with_its_line(tmp_path: Path, text: str, told: str):
    path = tmp_path / "classes.txt"
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        read_classes(path)


def test_a_list_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "classes.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read as text"):
        read_classes(path)


@pytest.mark.parametrize(
    ("listed", "coloured", "told"),
    [
        ({"a": 0, "b": 0, "c": 1}, False, "gives 0 to 'a' and to 'b'; give each class a number of its own"),
        ({"a": None, "b": 0, "c": 2}, False, "gives 0 to 'a' and to 'b'"),  # the first line stands for 0
        ({"a": 66051, "void": 66051, "c": 2}, True, "gives 1 2 3 to 'a' and to 'void'; give each class a colour"),
    ],
)
def test_a_value_of_two_classes_is_refused(listed: dict, coloured: bool, told: str):
    with pytest.raises(UsageError, match=f"^set: classes.txt {told}"):
        pixel_classes(listed, (), coloured=coloured, ignore=(), name="set")
