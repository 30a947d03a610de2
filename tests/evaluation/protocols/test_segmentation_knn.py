"""Segmentation by frozen patches, from a folder to its record, page and picture."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_masks import drawn_masks
from PIL import Image
from tiny_task import by_function, evaluator, small_model
from torch import Tensor
from torch.nn.functional import unfold

import mae
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.evaluation.common.dense_baselines import dense_baselines
from mae.evaluation.extractors.extractor import Extractor
from mae.evaluation.protocols.segmentation_knn import SegmentationKnn
from mae.evaluation.run import evaluate
from mae.models.preprocess import Preprocessing

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True}


def spectra(images: Tensor) -> Mapping[str, Tensor]:
    """Of each patch of 4 x 4 pixels how strongly it changes along both axes: what tells the stripes apart."""
    patches = unfold(images, 4, stride=4).mT.unflatten(2, (4, 4))
    return {"patches": torch.stack([patches.diff(dim=axis).abs().mean(dim=(2, 3)) for axis in (2, 3)], dim=2)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_masks(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    mae.save(small_model(depth=2), path)
    return path


def test_tokens_that_tell_the_fields_apart_beat_raw_pixels(data: Path, tmp_path: Path):
    record = evaluate("segmentation_knn", by_function(spectra, img_size=(24, 40)), data=data, out=tmp_path, **QUICK)
    found, pixels = record.result["this model"], record.result["raw pixels"]
    assert found["knn"]["mean_iou"] > max(0.8, pixels["knn"]["mean_iou"] + 0.1)
    assert found["logistic"]["mean_iou"] > 0.6 and list(found["knn"]["iou"]) == ["lying", "standing", "plain"]
    assert record.verdict is not None and record.verdict["answer"] == "better"
    assert record.data["train"] == 12 and record.data["test"] == 6 and record.chance is None
    assert set(record.pictures) == {"pictures"}


def test_maps_are_evaluated_at_the_models_size_on_whole_images(data: Path, tmp_path: Path):
    """What does not know the image predicts the same everywhere: its numbers can be told from the masks alone."""
    blind = by_function(lambda images: {"patches": torch.ones(len(images), 4, 2)}, img_size=(8, 8))
    record = evaluate("segmentation_knn", blind, data=data, out=tmp_path, **QUICK, pictures=0, baselines=False)
    truth = np.stack([np.array(Image.open(data / f"val/masks/{number}.png")) for number in range(6)])
    small = truth[:, 1::3][:, :, 2::5]
    assert small.shape == (6, 8, 8)
    classes = record.result["this model"]["logistic"]
    predicted = max(range(3), key=lambda label: classes["iou"][["lying", "standing", "plain"][label]] or 0)
    counted = small != 255
    assert classes["accuracy"] == pytest.approx((small[counted] == predicted).mean())
    assert record.verdict is None and not record.pictures


def test_the_command_writes_record_table_page_and_picture(
    data: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["evaluate", "segmentation_knn", str(saved), "--data", str(data), "--out", str(tmp_path), "--ks", "1", "3"]
    assert main([*asked, "--pictures", "2"]) == 0
    shown = capsys.readouterr().out
    assert "12 training images and 6 test images, masks of numbers, 3 classes" in shown and "standing, IoU" in shown
    folder = tmp_path / "evaluation"
    record = json.loads((folder / "segmentation_knn.json").read_text())
    assert record["result"]["random weights"]["knn"]["chosen"]["k"] in (1, 3)
    assert "data:image/png" in (folder / "segmentation_knn.html").read_text()
    with Image.open(folder / "segmentation_knn-pictures.png") as picture:
        assert picture.width > 800
    assert "segmentation_knn,this model / knn / iou / plain," in (folder / "segmentation_knn.csv").read_text()


def test_features_are_stored_for_whole_images_and_used_again(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = evaluate("segmentation_knn", saved, data=data, out=tmp_path, **QUICK)
    monkeypatch.setattr("mae.evaluation.extractors.feature_store.computed_batches", None)
    assert evaluate("segmentation_knn", saved, data=data, out=tmp_path, **QUICK).result == first.result


def test_an_image_in_both_parts_is_refused_or_left_out(saved: Path, tmp_path: Path):
    data = drawn_masks(tmp_path / "data")
    (data / "val/images/1.png").write_bytes((data / "train/images/3.png").read_bytes())
    with pytest.raises(UsageError, match="1 test image is among the training images too: .*3.png and .*1.png"):
        evaluate("segmentation_knn", saved, data=data, out=tmp_path, **QUICK)
    record = evaluate("segmentation_knn", saved, data=data, out=tmp_path, overlap="drop", **QUICK)
    assert record.data["test"] == 5 and "1 test image left out: trained on" in record.data["note"]


def test_pixels_that_are_asked_to_be_ignored_do_not_count(data: Path, saved: Path, tmp_path: Path):
    record = evaluate("segmentation_knn", saved, data=data, out=tmp_path, ignore=[2], **QUICK)
    assert list(record.result["this model"]["knn"]["iou"]) == ["lying", "standing"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ks": []}, "ks is"),
        ({"ks": [1, 1]}, "expected different numbers of 1 or more"),
        ({"metrics": []}, "expected cosine, l2 or both"),
        ({"pictures": -1}, "pictures is -1"),
        ({"ignore": [-1]}, "ignore is"),
        ({"ks": [10_000]}, "training patches; give smaller ones"),
        ({"test": "elsewhere"}, "--test is for classes of images; put test images and their masks into val/"),
    ],
)
def test_wrong_options_are_refused(data: Path, saved: Path, tmp_path: Path, options: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        evaluate("segmentation_knn", saved, data=data, out=tmp_path, **QUICK, **options)


def test_a_broken_mask_and_a_model_without_patches_are_one_line(
    data: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broken = drawn_masks(tmp_path / "data")
    (broken / "val/masks/2.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert main(["evaluate", "segmentation_knn", str(saved), "--data", str(broken), "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mae: error: ") and error.count("\n") == 1 and "val/masks/2.png" in error
    flat = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    with pytest.raises(UsageError, match="gives no patch tokens"):
        evaluate("segmentation_knn", flat, data=data, out=tmp_path, **QUICK)


def test_it_is_no_part_of_all_and_says_what_it_needs(capsys: pytest.CaptureFixture[str]):
    assert not SegmentationKnn.cheap
    assert main(["evaluate", "--help"]) == 0
    assert "vote on the class of each pixel (needs masks)" in capsys.readouterr().out


def test_a_mask_of_another_size_is_refused_with_both_files(saved: Path, tmp_path: Path):
    data = drawn_masks(tmp_path / "data")
    Image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(data / "train/masks/0.png")
    with pytest.raises(MAEError, match=r"masks/0.png has 4 x 4 pixels, and .*images/0.png, .*24 x 40"):
        evaluate("segmentation_knn", saved, data=data, out=tmp_path, **QUICK)


def test_patches_that_are_no_squares_lie_where_they_are(data: Path, tmp_path: Path):
    """Two columns of wide, flat patches: as many as of square ones, which would lie elsewhere."""
    model = small_model(img_size=(16, 16), patch_size=(2, 8))
    task = evaluator(model, data, tmp_path).segmentation_task(())
    assert task.grid == (8, 2) and task.patches("test").shape[1] == 16
    pixels = dense_baselines(task.extractor, task.grid)[-1].named(torch.arange(256.0).reshape(1, 1, 16, 16))["patches"]
    assert pixels[0, 1].tolist() == [*range(8, 16), *range(24, 32)]


@pytest.mark.parametrize(("channels", "values"), [(3, 192), (16, 1024), (17, 833), (200, 800), (500, 2000)])
def test_raw_pixels_of_patches_of_many_channels_are_few_values(channels: int, values: int):
    wanted = Preprocessing(img_size=(32, 32), in_chans=channels, mean=(0.0,) * channels, std=(1.0,) * channels)
    function = Extractor(name="f", encode=lambda images: {"patches": images}, preprocessing=wanted)
    (pixels,) = dense_baselines(function, (2, 2))
    patches = pixels.named(torch.randn(1, channels, 32, 32))["patches"]
    assert patches.shape == (1, 4, values)
    assert bool((patches.unflatten(2, (channels, -1)).std(dim=3) > 0).all())  # what contrast is told by
