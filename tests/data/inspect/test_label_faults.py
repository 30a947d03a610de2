"""Silent faults in labels: a good folder has none, and each fault that is planted gives its finding and no other."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mae.data.inspect import mask_labels
from mae.data.inspect.labels import inspect_labels
from mae.errors import UsageError

HEIGHT, WIDTH = 40, 60
NAMES = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3)).astype(np.uint8)


def save(path: Path, values: np.ndarray, **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, **options)


def turned(path: Path, seed: int, orientation: int = 6) -> None:
    """An image whose EXIF data say to turn it."""
    exif = Image.Exif()
    exif[274] = orientation
    save(path, pixels(seed), exif=exif)


def numbered() -> list[tuple[str, int]]:
    return [("train", number) for number in range(4)] + [("val", number) for number in range(4, 6)]


def yolo(root: Path) -> Path:
    for part, number in numbered():
        save(root / "images" / part / f"{number}.png", pixels(number))
        label = root / "labels" / part / f"{number}.txt"
        label.parent.mkdir(parents=True, exist_ok=True)
        label.write_text("0 0.5 0.5 0.2 0.4\n1 0.3 0.3 0.6 0.6\n")
    (root / "data.yaml").write_text(NAMES)
    return root


def coco_json(part: str) -> dict:
    numbers = [number for which, number in numbered() if which == part]
    boxes = [[30 + number, 20, 20, 15] for number in numbers]
    return {
        "images": [{"id": n, "file_name": f"{n}.png", "height": HEIGHT, "width": WIDTH} for n in numbers],
        "annotations": [
            {"id": 2 * row + kind, "image_id": n, "category_id": kind, "bbox": box, "iscrowd": 0}
            for row, (n, box) in enumerate(zip(numbers, boxes, strict=True))
            for kind in (0, 1)
        ],
        "categories": [{"id": 0, "name": "cat"}, {"id": 1, "name": "dog"}],
    }


def coco(root: Path, change: Callable[[dict], None] = lambda values: None) -> Path:
    """Labels of both parts, those of the training part changed."""
    for part, number in numbered():
        save(root / part / f"{number}.png", pixels(number))
    for part in ("train", "val"):
        values = coco_json(part)
        if part == "train":
            change(values)
        (root / part / "_annotations.coco.json").write_text(json.dumps(values))
    return root


def smooth(number: int) -> np.ndarray:
    """A mask of three fields: a disc over a slanting border."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    disc = np.hypot(rows - 20, columns - 30 - number) < 12
    return np.where(disc, 2, rows + columns > 45).astype(np.uint8)


def masks(root: Path, names: str | None = "sky\nroad\ncar\n") -> Path:
    for part, number in numbered():
        save(root / part / "images" / f"{number}.png", pixels(number))
        save(root / part / "masks" / f"{number}.png", smooth(number))
    if names is not None:
        (root / "classes.txt").write_text(names)
    return root


def found(root: Path) -> dict[str, str]:
    """The level of each finding that is not fine."""
    findings, _ = inspect_labels(root)
    for each in findings:
        assert each.level == "ok" or each.advice
    return {each.name: each.level for each in findings if each.level != "ok"}


@pytest.mark.parametrize("good", [yolo, coco, masks, lambda root: masks(root, None)])
def test_good_labels_have_no_fault(tmp_path: Path, good: Callable[[Path], Path]):
    assert found(good(tmp_path)) == {}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("2 0.5 0.5 0.2 0.4", {"classes": "stop"}),
        ("0 30 20 12 16", {"shares of the sides": "stop"}),
        ("0 0.95 0.5 0.2 0.4", {"boxes outside": "stop"}),
        ("0 0.5 0.5 0.2 0.001", {"empty boxes": "stop"}),
        ("0 0.98 0.5 0.04 0.4", {}),  # on the edge
        ("0 0.984 0.5 0.04 0.4", {}),  # a rounding beyond it
    ],
)
def test_lines_of_yolo(tmp_path: Path, line: str, expected: dict[str, str]):
    with (yolo(tmp_path) / "labels" / "train" / "1.txt").open("a") as file:
        file.write(f"{line}\n")
    assert found(tmp_path) == expected


def test_a_fault_among_hundreds_is_a_warning(tmp_path: Path):
    yolo(tmp_path)
    for part, number in numbered():
        with (tmp_path / "labels" / part / f"{number}.txt").open("a") as file:
            file.write("0 0.5 0.5 0.2 0.4\n" * 100)
    with (tmp_path / "labels" / "train" / "1.txt").open("a") as file:
        file.write("0 0.95 0.5 0.2 0.4\n")
    assert found(tmp_path) == {"boxes outside": "warn"}


def test_corners_of_yolo_instead_of_middle_and_size(tmp_path: Path):
    yolo(tmp_path)
    for part, number in numbered():
        (tmp_path / "labels" / part / f"{number}.txt").write_text("0 0.5 0.5 0.9 0.8\n1 0.1 0.4 0.7 0.6\n")
    assert found(tmp_path) == {"corners": "stop"}


def corners(values: dict) -> None:
    for annotation in values["annotations"]:
        left, top, width, height = annotation["bbox"]
        annotation["bbox"] = [left, top, left + width, top + height]


def unnamed(values: dict) -> None:
    values["annotations"][0]["category_id"] = 9


def outside(values: dict) -> None:
    values["annotations"][0]["bbox"] = [50, 20, 20, 15]


def empty(values: dict) -> None:
    values["annotations"][0]["bbox"] = [50, 20, 0, 15]


def negative(values: dict) -> None:
    values["annotations"][0]["bbox"] = [50, 20, -5, 15]


def other_size(values: dict) -> None:
    values["images"][0] |= {"height": HEIGHT * 2, "width": WIDTH * 2}


def other_mask(values: dict) -> None:
    for annotation in values["annotations"]:
        annotation["segmentation"] = {"size": [HEIGHT, WIDTH], "counts": [5, HEIGHT * WIDTH - 5]}
    values["annotations"][0]["segmentation"] = {"size": [HEIGHT, WIDTH // 2], "counts": [5, HEIGHT * WIDTH // 2 - 5]}


def without_objects(values: dict) -> None:
    values["annotations"] = values["annotations"][2:]


def one_class_alone(values: dict) -> None:
    values["categories"].append({"id": 2, "name": "bird"})
    values["annotations"][0]["category_id"] = 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (corners, {"corners": "stop"}),
        (unnamed, {"classes": "stop"}),
        (outside, {"boxes outside": "stop"}),
        (empty, {"empty boxes": "stop"}),
        (negative, {"empty boxes": "stop"}),
        (other_size, {"sizes": "stop"}),
        (without_objects, {"images without labels": "note"}),
        (one_class_alone, {"classes in both parts": "warn"}),
    ],
)
def test_json_of_coco(tmp_path: Path, change: Callable[[dict], None], expected: dict[str, str]):
    assert found(coco(tmp_path, change)) == expected


def test_masks_of_objects_of_another_size(tmp_path: Path):
    coco(tmp_path, other_mask)
    values = coco_json("val")
    other_mask(values)
    values["annotations"][0]["segmentation"] = values["annotations"][1]["segmentation"]
    (tmp_path / "val" / "_annotations.coco.json").write_text(json.dumps(values))
    assert found(tmp_path) == {"mask sizes": "stop"}


@pytest.mark.parametrize("folder", [coco, masks])
def test_labels_from_before_exif_data_turned_the_image(tmp_path: Path, folder: Callable[[Path], Path]):
    folder(tmp_path)
    path = tmp_path / "train" / ("images" if folder is masks else ".") / "1.png"
    turned(path, 1)
    assert found(tmp_path) == {"EXIF": "stop"}
    turned(path, 1, orientation=3)  # upside down: nothing tells for which the labels were made
    assert found(tmp_path) == {"EXIF": "warn"}


def test_labels_for_the_turned_image_are_right(tmp_path: Path):
    masks(tmp_path)
    turned(tmp_path / "train" / "images" / "1.png", 1)
    save(tmp_path / "train" / "masks" / "1.png", smooth(1).T.copy())
    assert found(tmp_path) == {}


def test_yolo_cannot_tell_for_which_its_labels_were_made(tmp_path: Path):
    turned(yolo(tmp_path) / "images" / "train" / "1.png", 1)
    assert found(tmp_path) == {"EXIF": "warn"}


@pytest.mark.parametrize("folder", [yolo, coco, masks])
def test_copies(tmp_path: Path, folder: Callable[[Path], Path]):
    folder(tmp_path)
    inner = {yolo: "images/{}", coco: "{}", masks: "{}/images"}[folder]
    save(tmp_path / inner.format("train") / "2.png", pixels(1))
    assert found(tmp_path) == {"copies": "note"}
    save(tmp_path / inner.format("train") / "2.png", pixels(2))
    save(tmp_path / inner.format("val") / "5.png", pixels(1), compress_level=1)  # other bytes, the same pixels
    assert found(tmp_path) == {"copies in both parts": "stop"}


def test_unreadable_images(tmp_path: Path):
    (yolo(tmp_path) / "images" / "train" / "1.png").write_bytes(b"no image")
    assert found(tmp_path) == {"unreadable images": "warn"}


def compressed(values: np.ndarray) -> np.ndarray:
    """Once it was a JPEG."""
    file = io.BytesIO()
    Image.fromarray(values).save(file, "JPEG", quality=80)
    return np.array(Image.open(file))


@pytest.mark.parametrize("names", ["0 sky\n50 road\n100 car\n", None])
def test_masks_that_were_jpegs(tmp_path: Path, names: str | None):
    masks(tmp_path, names)
    for part, number in numbered():
        save(tmp_path / part / "masks" / f"{number}.png", smooth(number) * 50)
    assert found(tmp_path) == {}
    save(tmp_path / "train" / "masks" / "1.png", compressed(smooth(1) * 50))
    assert found(tmp_path) == {"compressed masks": "stop"}


def test_colours_that_were_jpegs(tmp_path: Path):
    palette = np.array([[0, 0, 200], [128, 64, 128], [200, 10, 10]], dtype=np.uint8)
    masks(tmp_path, "sky 0 0 200\nroad 128 64 128\ncar 200 10 10\n")
    for part, number in numbered():
        save(tmp_path / part / "masks" / f"{number}.png", palette[smooth(number)])
    assert found(tmp_path) == {}
    save(tmp_path / "train" / "masks" / "1.png", compressed(palette[smooth(1)]))
    assert found(tmp_path) == {"compressed masks": "stop"}
    save(tmp_path / "train" / "masks" / "1.png", (palette + 1)[smooth(1)])
    assert found(tmp_path) == {"values": "stop"}


def test_masks_in_jpeg_files(tmp_path: Path):
    masks(tmp_path)
    (tmp_path / "train" / "masks" / "1.png").unlink()
    save(tmp_path / "train" / "masks" / "1.jpg", smooth(1))
    assert found(tmp_path) == {"masks as JPEG": "stop"}


def test_a_palette_that_was_read_as_colours(tmp_path: Path):
    palette = np.array([[0, 0, 200], [128, 64, 128], [200, 10, 10]], dtype=np.uint8)
    masks(tmp_path)
    save(tmp_path / "train" / "masks" / "1.png", palette[smooth(1)])
    assert found(tmp_path) == {"palette": "stop"}  # one among numbers
    for part, number in numbered():
        save(tmp_path / part / "masks" / f"{number}.png", palette[smooth(number)])
    assert found(tmp_path) == {"palette": "stop"}  # all, and classes.txt has names alone
    masks(tmp_path, "sky 0 0 200\nroad 128 64 128\ncar 200 10 10\n")
    assert found(tmp_path) == {"palette": "stop"}  # numbers, and classes.txt has colours


def test_a_mask_of_one_grey_among_colours_is_one_of_them(tmp_path: Path):
    palette = np.array([[0, 0, 0], [128, 64, 128], [200, 10, 10]], dtype=np.uint8)
    masks(tmp_path, "sky 0 0 0\nroad 128 64 128\ncar 200 10 10\n")
    for part, number in numbered():
        save(tmp_path / part / "masks" / f"{number}.png", palette[smooth(number)])
    save(tmp_path / "train" / "masks" / "1.png", palette[0 * smooth(1)])
    assert found(tmp_path) == {}
    save(tmp_path / "train" / "masks" / "1.png", 0 * palette[smooth(1)] + 77)
    assert found(tmp_path) == {"values": "stop"}


def test_numbers_beyond_the_names(tmp_path: Path):
    masks(tmp_path, "sky\nroad\n")
    assert found(tmp_path) == {"values": "stop"}
    assert inspect_labels(tmp_path, ignore=[2])[1] is not None


def test_masks_of_another_size(tmp_path: Path):
    save(masks(tmp_path) / "train" / "masks" / "1.png", smooth(1)[:-1])
    assert found(tmp_path) == {"sizes": "stop"}


def test_a_class_that_is_never_in_the_test_part(tmp_path: Path):
    masks(tmp_path)
    for number in (4, 5):
        save(tmp_path / "val" / "masks" / f"{number}.png", smooth(number).clip(0, 1))
    assert found(tmp_path) == {"classes in both parts": "warn"}


def test_masks_of_255_are_masks_of_one_class(tmp_path: Path):
    masks(tmp_path, "ground\ncell\n")
    for part, number in numbered():
        save(tmp_path / part / "masks" / f"{number}.png", (smooth(number) > 0).astype(np.uint8) * np.uint8(255))
    assert found(tmp_path) == {"classes in both parts": "stop"}
    (finding,) = [each for each in inspect_labels(tmp_path)[0] if each.level == "stop"]
    assert finding.value == "of 2 classes the masks hold one alone: ground" and "as 0 and 1" in (finding.advice or "")


def test_images_without_a_mask(tmp_path: Path):
    (masks(tmp_path) / "train" / "masks" / "1.png").unlink()
    assert found(tmp_path) == {"images without labels": "note"}


def test_folders_without_labels_are_refused(tmp_path: Path):
    save(tmp_path / "1.png", pixels(0))
    with pytest.raises(UsageError, match="expected images/ and masks/.*For boxes: expected Annotations"):
        inspect_labels(tmp_path)


def test_masks_that_are_all_smeared_are_not_compared_with_each_other():
    """Of 100,000 masks that were JPEGs each was looked for among all others, which took minutes."""
    compared: list[object] = []

    class Compared(mask_labels._Mask):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return self is other

    shown = {"values": np.array([0, 1]), "counts": np.array([32, 32]), "size": (8, 8)}
    masks = [Compared(path=f"{number}.png", lonely=0.3 * (number % 2), **shown) for number in range(100)]
    findings = mask_labels._classes([masks[:50], masks[50:]], None, ignore=(), name="x")
    smeared = {each.name: each.value for each in findings}["compressed masks"]
    assert smeared.startswith("50 of 100 masks") and compared == []
