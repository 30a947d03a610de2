"""A linear layer on frozen patches, from a folder to its record, page and model file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from drawn_masks import drawn_masks
from PIL import Image
from tiny_task import by_function, small_model
from torch import Tensor
from torch.nn.functional import unfold

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.evaluation.common.segmentation_training import ScaledCrop, commonest_class, counts_of, of_one_class
from mae.evaluation.extractors.external_models import wrap_timm
from mae.evaluation.run import Evaluation, evaluate
from mae.models.segmenter import Segmenter

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True, "iterations": 60, "batch_size": 6, "lr": 0.02, "pictures": 2}


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


def test_it_learns_what_features_tell_and_no_more(data: Path, tmp_path: Path):
    record = evaluate("segmentation_linear", by_function(spectra, img_size=(16, 16)), data=data, out=tmp_path, **QUICK)
    found = record.result
    assert found["this model"]["mean_iou"] > found["commonest class"]["mean_iou"] + 0.2
    assert found["this model"]["mean_iou"] > found["raw pixels"]["mean_iou"] + 0.1
    assert record.verdict is not None and record.verdict["answer"] == "better"
    assert list(found["this model"]["iou"]) == ["lying", "standing", "plain"]


def test_of_noise_nothing_is_learned(tmp_path: Path):
    folder = drawn_masks(tmp_path / "data", train=8, test=4)
    rng = np.random.default_rng(1)
    for path in folder.glob("*/images/*.png"):
        Image.fromarray(rng.integers(0, 256, (24, 40), dtype=np.uint8)).save(path)
    record = evaluate(
        "segmentation_linear", by_function(spectra, img_size=(16, 16)), data=folder, out=tmp_path, **QUICK
    )
    assert record.verdict is not None and record.verdict["answer"] != "better"


@pytest.mark.parametrize("layers", [1, 2])
def test_the_file_says_what_the_record_says(data: Path, saved: Path, tmp_path: Path, layers: int):
    record = evaluate(
        "segmentation_linear", saved, data=data, out=tmp_path, **{**QUICK, "iterations": 8}, layers=layers
    )
    assert set(record.result) >= {"this model", "random weights", "raw pixels", "commonest class"}
    model = mae.load(Path(record.result["training"]["folder"]) / "segmenter.safetensors")
    assert isinstance(model, Segmenter) and model.class_names == ("lying", "standing", "plain")
    right = total = 0
    images = sorted((data / "val/images").glob("*.png"))
    for image, found in zip(images, model.predict(images), strict=True):
        truth = np.array(Image.open(data / "val/masks" / image.name))
        assert found.shape == truth.shape
        right += int((found.numpy() == truth)[truth != 255].sum())
        total += int((truth != 255).sum())
    assert right / total == pytest.approx(record.result["this model"]["accuracy"])


def test_the_same_request_again_trains_nothing(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = {**QUICK, "iterations": 4, "baselines": False}
    first = evaluate("segmentation_linear", saved, data=data, out=tmp_path, **options)
    monkeypatch.setattr("mae.data.loading.annotated.AnnotatedLoader.iterate", None)
    assert evaluate("segmentation_linear", saved, data=data, out=tmp_path, **options).result == first.result


def test_the_command_writes_record_table_page_and_picture(
    data: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = f"evaluate segmentation_linear {saved} --data {data} --out {tmp_path} --iterations 3 --no-baselines"
    assert main([*words.split(), "--pictures", "2"]) == 0
    shown = capsys.readouterr().out
    assert "the paper has 40,000 steps" in shown and "standing, IoU" in shown and "commonest class" in shown
    folder = tmp_path / "evaluation"
    assert "mean_iou" in (folder / "segmentation_linear.json").read_text()
    assert "data:image/png" in (folder / "segmentation_linear.html").read_text()
    with Image.open(folder / "segmentation_linear-pictures.png") as picture:
        assert picture.width > 600


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"iterations": 0}, "iterations is 0"),
        ({"layers": 3}, "does not give the maps of 3 blocks"),
        ({"lr": -1.0}, "lr is -1"),
        ({"batch_size": 1}, "of which no norm can be taken"),
        ({"batch_size": 13}, "expected 1 to 12, the number of training images"),
    ],
)
def test_wrong_options_are_refused(data: Path, saved: Path, tmp_path: Path, options: dict[str, Any], told: str):
    with pytest.raises(UsageError, match=told):
        evaluate("segmentation_linear", saved, data=data, out=tmp_path, **{**QUICK, **options})


def test_a_model_without_patches_is_refused(data: Path, tmp_path: Path):
    flat = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    with pytest.raises(UsageError, match="gives no patch tokens"):
        evaluate("segmentation_linear", flat, data=data, out=tmp_path, **QUICK)


def test_stages_of_different_sizes_are_refused(data: Path, tmp_path: Path):
    model = timm.create_model("test_convnext", num_classes=0, pretrained_cfg_overlay={"input_size": (3, 64, 64)})
    with pytest.raises(UsageError, match="^stages gives maps of 4x4 and 2x2 for --layers 2; expected fewer, of one"):
        evaluate("segmentation_linear", wrap_timm(model, name="stages"), data=data, out=tmp_path, **QUICK, layers=2)


@pytest.mark.parametrize("protocol", ["segmentation_linear", "finetune_segmentation"])
def test_training_masks_of_ignored_pixels_alone_are_refused(protocol: str, saved: Path, tmp_path: Path):
    folder = drawn_masks(tmp_path / "data")
    for path in folder.glob("train/masks/*.png"):
        Image.fromarray(np.full((24, 40), 255, dtype=np.uint8)).save(path)
    options: dict[str, Any] = {"head": "linear", "warmup": 0} if protocol == "finetune_segmentation" else {}
    with pytest.raises(UsageError, match="^no pixel of the 12 training masks has a class that counts; give other"):
        evaluate(
            protocol, saved, data=folder, out=tmp_path, device="cpu", quiet=True, batch_size=6, iterations=2, **options
        )


def test_crops_keep_image_and_mask_together():
    from torchvision import tv_tensors

    rows, columns = np.mgrid[:30, :50]
    pattern = torch.from_numpy(((rows // 10 + columns // 10) % 2).astype(np.uint8))
    crop = ScaledCrop(size=(16, 24), mean=(0.5,))
    areas = set()
    for seed in range(40):
        torch.manual_seed(seed)
        found = crop({"image": tv_tensors.Image(255 * pattern[None]), "mask": tv_tensors.Mask(pattern)})
        image, mask = found["image"], found["mask"]
        assert image.shape == (1, 16, 24) and mask.shape == (16, 24)
        counted = mask != 255
        assert (image[0][~counted] == 127).all()  # the mean
        near = (image[0].float() / 255 - mask.float()).abs()[counted]
        assert near.mean() < 0.25  # but for edges, which are smoothed
        areas.add(int(counted.sum()))
    assert len(areas) > 5 and max(areas) == 16 * 24 > min(areas)


def test_the_map_of_the_commonest_class_is_counted_by_hand(data: Path, tmp_path: Path):
    from tiny_task import evaluator

    task = evaluator(small_model(), data, tmp_path).segmentation_task(())
    masks = [np.array(Image.open(path)) for path in (data / "train/masks").glob("*.png")]
    counts = [sum(int((mask == label).sum()) for mask in masks) for label in range(3)]
    label = commonest_class(task, task.images("train").readable)
    assert label == int(np.argmax(counts))

    def constant(cut: Tensor) -> Tensor:
        scores = torch.zeros(len(cut), 3, *cut.shape[2:])
        scores[:, label] = 1
        return scores

    other = counts_of(task, lambda cut: cut.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1))
    assert torch.equal(of_one_class(other, label), counts_of(task, constant))


def test_the_record_holds_all_its_numbers(data: Path, saved: Path, tmp_path: Path):
    record: Evaluation = evaluate(
        "segmentation_linear", saved, data=data, out=tmp_path, **{**QUICK, "iterations": 2, "pictures": 0}
    )
    assert not [name for name in record.pictures if name == "pictures"]
    assert json.loads((tmp_path / "evaluation" / "segmentation_linear.json").read_text())["result"]["training"]["curve"]
