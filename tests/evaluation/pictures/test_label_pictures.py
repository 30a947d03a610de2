"""Pictures of labelled images."""

from pathlib import Path

import numpy as np
import pytest
from drawn_boxes import drawn_boxes
from drawn_masks import drawn_masks
from PIL import Image

from mae.data.annotations.detection import open_detection, read_detection
from mae.data.annotations.segmentation import open_segmentation
from mae.evaluation.pictures.labels import draw_labels
from mae.report.figures import sheet


@pytest.fixture
def sheets(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What is drawn on sheets."""
    drawn: list[dict] = []

    def write(columns, **given):
        drawn.append({"columns": columns, **given})
        sheet.write_sheet(columns, **given)

    monkeypatch.setattr("mae.evaluation.pictures.labels.write_sheet", write)
    return drawn


def test_eight_images_with_boxes_outlines_and_names(tmp_path: Path, sheets: list[dict]):
    split = open_detection(drawn_boxes(tmp_path / "boxes")).train
    draw_labels(split, title="Labels", path=tmp_path / "labels.png")
    (drawn,) = sheets
    assert list(drawn["legend"]) == ["rectangle", "disc"] and drawn["caption"] == ["8 of 12 images."]
    assert [len(column.pictures) for column in drawn["columns"]] == [2, 2, 2, 2]
    first = drawn["columns"][0]
    assert first.notes[0][0].startswith("0.png: ") and drawn["columns"][3].notes[1][0].startswith("11.png: ")
    objects, picture, by = split.objects(0), first.pictures[0].numpy(), first.pictures.shape[1] // 48
    colours = np.stack([colour.numpy() for colour in drawn["legend"].values()])
    for box, label in zip(objects.boxes, objects.classes, strict=True):
        right, bottom = (box[2:] * by).astype(int) - 1  # of the lower right corner, which no name covers
        assert np.allclose(picture[bottom, right], colours[label], atol=1 / 255)
    with Image.open(tmp_path / "labels.png") as written:
        assert written.width > 1000


def test_images_beside_their_masks(tmp_path: Path, sheets: list[dict]):
    split = open_segmentation(drawn_masks(tmp_path / "masks", train=3)).train
    draw_labels(split, title="Labels", path=tmp_path / "labels.png")
    (drawn,) = sheets
    columns = drawn["columns"]
    assert [column.name for column in columns] == ["image", "mask", "image", "mask"]
    assert columns[0].notes == [["0.png"], ["2.png"]] and columns[2].notes == [["1.png"], [""]]
    mask, colours = columns[1].pictures[0].numpy(), np.stack([each.numpy() for each in drawn["legend"].values()])
    by, labels = mask.shape[0] // 24, split.labels(0)
    assert np.allclose(mask[by::by, ::by][: len(labels) - 1], colours[labels[1:]])
    assert (mask[0] == 1).all()  # the border that does not count


def test_labels_with_faults_are_drawn(tmp_path: Path):
    drawn_boxes(tmp_path / "boxes", train=1, test=1)
    path = tmp_path / "boxes" / "annotations" / "instances_train.json"
    path.write_text(path.read_text().replace('"category_id": 1', '"category_id": 9'))
    data = read_detection(tmp_path / "boxes")
    assert data is not None
    draw_labels(data.train, title="Labels", path=tmp_path / "labels.png")
    assert (tmp_path / "labels.png").is_file()
