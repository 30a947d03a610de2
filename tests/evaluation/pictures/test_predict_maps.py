"""`mae predict` by a segmenter: maps as files, names, a picture."""

from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_masks import drawn_masks
from PIL import Image
from tiny import tiny_config

import mae
from mae.cli import main
from mae.models.classifier import build_classifier
from mae.models.segmenter import Segmenter, build_segmenter, upernet_head


@pytest.fixture
def segmenter(tmp_path: Path) -> Segmenter:
    torch.manual_seed(0)
    model = build_segmenter(
        tiny_config(img_size=16, in_chans=1, mean=(0.5,), std=(0.25,)),
        head=upernet_head(2, 8),
        num_classes=3,
        class_names=("lying", "standing", "plain"),
        drop_path=0.0,
        pretrained=None,
    ).eval()
    torch.nn.init.normal_(model.head.classes.weight)  # so that maps hold several classes
    mae.save(model, tmp_path / "training" / "segmenter.safetensors")
    return model


@pytest.mark.parametrize("named", ["training", "training/segmenter.safetensors"])
def test_each_image_gets_a_map_of_its_size(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str], named: str
):
    images = drawn_masks(tmp_path / "data", test=3) / "val" / "images"
    Image.fromarray(np.zeros((7, 90), dtype=np.uint8)).save(images / "long one.png")
    (images / "broken.png").write_bytes((images / "0.png").read_bytes()[:60])
    out, sheet = tmp_path / "maps", tmp_path / "sheet.png"
    words = ["predict", str(tmp_path / named), str(images), "--out", str(out), "--sheet", str(sheet)]
    assert main([*words, "--device", "cpu"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["0.png", "1.png", "2.png", "classes.txt", "long-one.png"]
    assert (out / "classes.txt").read_text() == "lying\nstanding\nplain\n"
    for path in images.glob("[0-9l]*.png"):
        found = np.array(Image.open(out / path.name.replace(" ", "-")))
        assert np.array_equal(found, segmenter.predict(path)[0].numpy())
    shown = capsys.readouterr().out
    assert "4 images" in shown and "broken.png" in shown and f"Look at {sheet}" in shown
    with Image.open(sheet) as picture:
        assert picture.width > 300
    assert main([*words, "--device", "cpu"]) == 2  # nothing is overwritten


def test_an_image_too_lengthy_is_told_and_the_others_get_their_maps(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    images = drawn_masks(tmp_path / "data", test=2) / "val" / "images"
    Image.fromarray(np.zeros((9, 900), dtype=np.uint8)).save(images / "00.png")
    words = ["predict", str(tmp_path / "training"), str(images), "--out", str(tmp_path / "maps"), "--device", "cpu"]
    assert main(words) == 0
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["0.png", "1.png", "classes.txt"]
    said = " ".join(capsys.readouterr().out.split())
    assert "2 images" in said and "00.png is an image of 9 x 900 pixels; expected one at most" in said


def test_a_folder_with_models_of_two_kinds_asks_which(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tiny_config(img_size=16, in_chans=1, mean=(0.5,), std=(0.25,))
    said = {"num_classes": 2, "class_names": ("a", "b"), "drop_path": 0.0, "label_smoothing": 0.0}
    other = build_classifier(config, pretrained=None, **said)
    mae.save(other, tmp_path / "training" / "other" / "classifier.safetensors")
    words = ["predict", str(tmp_path / "training"), str(drawn_masks(tmp_path / "data", test=1) / "val" / "images")]
    assert main([*words, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    told = capsys.readouterr().err
    assert "holds models of several kinds" in told and "segmenter.safetensors or" in told and "classifier.saf" in told


def test_no_map_is_written_over_another(segmenter: Segmenter, tmp_path: Path):
    for name in ("a-2.png", "x/a.png", "y/a.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), len(name), dtype=np.uint8)).save(path)
    words = ["predict", str(tmp_path / "training"), str(tmp_path / "images"), "--out", str(tmp_path / "maps")]
    assert main([*words, "--device", "cpu"]) == 0
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["a-2.png", "a-3.png", "a.png", "classes.txt"]
