"""Pictures of test images with what is found in them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import png
from torch import Tensor

from mae.data.annotations.objects import Objects
from mae.data.dataset.images import load_images
from mae.data.sources.open import open_source
from mae.evaluation.common.average_precision import FoundObjects
from mae.evaluation.pictures import detection
from mae.evaluation.pictures.segmentation import class_colours
from mae.report.figures.sheet import Column


def test_the_legend_has_the_classes_that_are_drawn_in_their_colours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of COCO's 80 classes all but the first 20 were white in it."""
    legends: list[dict[str, Tensor]] = []
    monkeypatch.setattr(detection, "write_sheet", lambda columns, *, legend, **told: legends.append(legend))
    box = np.array([[0, 0, 4, 4]], dtype=np.float32)
    found = FoundObjects(
        boxes=box.repeat(2, axis=0), labels=np.array([41, 7]), scores=np.array([0.9, 0.2], dtype=np.float32)
    )
    detection.draw_detections(
        load_images(open_source("builtin:digits", data_root=tmp_path), in_chans=None),
        [0],
        [Objects(boxes=box, classes=np.array([25]), crowd=np.array([False]))],
        {"this model": [found]},
        class_names=tuple(f"class {number}" for number in range(80)),
        title="Found",
        path=tmp_path / "found.png",
    )
    (legend,) = legends
    colours = class_colours(80)
    assert list(legend) == ["class 25", "class 41"], "what is found below the threshold is not drawn"
    assert torch.equal(torch.stack(list(legend.values())), colours[[25, 41]])


def test_images_of_one_base_name_are_told_apart_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sheets: list[list[Column]] = []
    monkeypatch.setattr(detection, "write_sheet", lambda columns, **told: sheets.append(columns))
    for day in ("monday", "tuesday"):
        (tmp_path / "photos" / day).mkdir(parents=True)
        (tmp_path / "photos" / day / "1.png").write_bytes(png(8, 8))
    nothing = Objects(
        boxes=np.zeros((0, 4), dtype=np.float32), classes=np.zeros(0, dtype=np.int64), crowd=np.zeros(0, bool)
    )
    detection.draw_detections(
        load_images(open_source(str(tmp_path / "photos"), data_root=tmp_path), in_chans=None),
        [0, 1],
        [nothing, nothing],
        {},
        class_names=("a",),
        title="Found",
        path=tmp_path / "found.png",
    )
    assert sheets[0][0].notes == [["monday/1.png: 0"], ["tuesday/1.png: 0"]]


def test_no_two_classes_have_one_colour_and_the_first_are_those_of_the_palette():
    colours = class_colours(255)
    assert torch.equal(class_colours(20)[:20], colours[:20]) and (colours[255] == 1).all()
    assert torch.pdist(colours[:80]).min() > 0.03 and torch.pdist(colours).min() > 0.004
