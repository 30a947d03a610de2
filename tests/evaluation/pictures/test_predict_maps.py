"""`mae predict` by a segmenter: maps as files, names, a picture."""

import csv
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_masks import drawn_masks
from full import fill
from PIL import Image
from tiny import tiny_config

import mae
from mae.cli import main
from mae.data.annotations.segmentation import open_segmentation
from mae.errors import UsageError
from mae.evaluation.pictures import predict_maps
from mae.evaluation.pictures.predict_maps import find_segmenter
from mae.models.classifier import build_classifier
from mae.models.file import model_metadata, save_model
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
    assert sorted(path.name for path in out.iterdir()) == [
        *("0.png", "1.png", "2.png", "classes.txt", "long-one.png", "maps.csv")
    ]
    assert (out / "classes.txt").read_text() == "lying\nstanding\nplain\n"
    for path in images.glob("[0-9l]*.png"):
        found = np.array(Image.open(out / path.name.replace(" ", "-")))
        assert np.array_equal(found, segmenter.predict(path)[0].numpy())
    shown = capsys.readouterr().out
    assert "4 images" in shown and "broken.png" in shown and f"Look at {sheet}" in shown
    with Image.open(sheet) as picture:
        assert picture.width > 300
    assert main([*words, "--device", "cpu"]) == 2  # nothing is overwritten


def test_a_number_of_classes_in_a_row_is_refused(segmenter: Segmenter, tmp_path: Path, capsys):
    assert main([*command(tmp_path, drawn_masks(tmp_path / "data", test=2) / "val"), "--top", "3"]) == 2
    assert "segmenter.safetensors tells the classes of pixels; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "maps").exists()


def test_an_image_too_lengthy_is_told_and_the_others_get_their_maps(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    images = drawn_masks(tmp_path / "data", test=2) / "val" / "images"
    Image.fromarray(np.zeros((9, 900), dtype=np.uint8)).save(images / "00.png")
    words = ["predict", str(tmp_path / "training"), str(images), "--out", str(tmp_path / "maps"), "--device", "cpu"]
    assert main(words) == 0
    assert sorted(path.name for path in (tmp_path / "maps").iterdir()) == ["0.png", "1.png", "classes.txt", "maps.csv"]
    said = " ".join(capsys.readouterr().out.split())
    assert "2 images" in said and "00.png is an image of 9 x 900 pixels; expected one at most" in said


def test_a_name_of_a_table_is_refused_for_the_folder_of_maps(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    images = images_of(tmp_path / "data", "1.png")
    words = ["predict", str(tmp_path / "training"), str(images), "--out", str(tmp_path / "maps.csv"), "--device", "cpu"]
    assert main(words) == 2 and not (tmp_path / "maps.csv").exists()
    assert "a folder is written; give its name, such as" in " ".join(capsys.readouterr().err.split())


def test_of_several_segmenters_those_trained_from_scratch_are_told(segmenter: Segmenter, tmp_path: Path):
    saved = tmp_path / "training" / "segmenter.safetensors"
    (tmp_path / "training" / "copy").mkdir()
    saved.rename(saved.with_name("copy") / saved.name)  # of `mae.save`, which does not know
    for name, begun in (("ours", "run"), ("other", None)):
        origin = {"data_source": "photos", "init_from": begun}
        save_model(segmenter, saved.with_name(name) / saved.name, model_metadata(segmenter, origin=origin))
    told = r"copy/segmenter.safetensors, \S*other/segmenter.safetensors \(trained from scratch\), \S*ours/\S*$"
    with pytest.raises(UsageError, match=told):
        find_segmenter(tmp_path / "training")


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


def images_of(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((9, 9), len(name), dtype=np.uint8)).save(folder / name)
    return folder


def maps_in(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*.png"))


def told_in(out: Path) -> dict[str, str]:
    """The map of each image, by the names in the table."""
    with (out / "maps.csv").open(newline="", errors="surrogateescape") as file:
        return {row["image"]: row["map"] for row in csv.DictReader(file)}


def command(tmp_path: Path, images: Path) -> list[str]:
    out = str(tmp_path / "maps")
    return ["predict", str(tmp_path / "training"), str(images), "--out", out, "--device", "cpu"]


def test_no_map_is_written_over_another_and_a_table_tells_whose_each_is(segmenter: Segmenter, tmp_path: Path):
    images = images_of(tmp_path / "images", "a-2.png", "a.png", "a.tif", "x/a.png", "y/a.png")
    (images / "y" / "broken.png").write_bytes(b"no image")
    assert main(command(tmp_path, images)) == 0
    assert maps_in(tmp_path / "maps") == ["a-2.png", "a-3.png", "a.png", "x/a.png", "y/a.png"]
    names = {"a-2.png": "a-2.png", "a.png": "a.png", "a.tif": "a-3.png", "x/a.png": "x/a.png", "y/a.png": "y/a.png"}
    told = told_in(tmp_path / "maps")
    assert told == {**{str(images / image): name for image, name in names.items()}, str(images / "y/broken.png"): ""}
    with (tmp_path / "maps" / "maps.csv").open(newline="") as file:
        problems = [row["problem"] for row in csv.DictReader(file)]
    assert problems[:-1] == [""] * 5 and "broken.png" in problems[-1]


def test_maps_are_read_as_masks_of_their_images(segmenter: Segmenter, tmp_path: Path):
    images = images_of(tmp_path / "data" / "images", "a/1.png", "b/1.png")
    assert main(command(tmp_path, images)) == 0
    shutil.move(tmp_path / "maps", tmp_path / "data" / "masks")
    data = open_segmentation(tmp_path / "data")
    assert data.class_names == ("lying", "standing", "plain")
    pairs = [(of.source.item_name(0), of.masks[0]) for of in (data.train, data.test)]
    assert sorted((Path(image).parent.name, mask.parent.name) for image, mask in pairs) == [("a", "a"), ("b", "b")]
    for image, mask in pairs:
        assert np.array_equal(np.array(Image.open(mask)), segmenter.predict(Path(image))[0].numpy())


@pytest.mark.parametrize("sheet", ["maps/sheet.png", "sheet.png"])
def test_a_picture_may_lie_among_the_maps(segmenter: Segmenter, tmp_path: Path, sheet: str):
    images = images_of(tmp_path / "images", "a.png", "sheet.png")
    assert main([*command(tmp_path, images), "--sheet", str(tmp_path / sheet)]) == 0
    told = told_in(tmp_path / "maps")
    assert told[str(images / "sheet.png")] == ("sheet-1.png" if sheet == "maps/sheet.png" else "sheet.png")
    assert Image.open(tmp_path / sheet).width > 200  # and no map


def test_a_picture_of_maps_shows_what_can_be_read(segmenter: Segmenter, tmp_path: Path):
    images = images_of(tmp_path / "images", *(f"{number:02}.png" for number in range(20)))
    for number in predict_maps.spread(20, 8).tolist():
        (images / f"{number:02}.png").write_bytes(b"no image")
    assert main([*command(tmp_path, images), "--sheet", str(tmp_path / "sheet.png")]) == 0
    assert (tmp_path / "sheet.png").is_file()


def test_maps_of_a_list_lie_in_the_folder_whatever_the_list_names(segmenter: Segmenter, tmp_path: Path):
    images = images_of(tmp_path / "images", "a/1.png", "b/1.png")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "list.txt").write_text(f"../images/a/1.png\n{images}/b/1.png\n../images/a/1.png\n")
    assert main(command(tmp_path, tmp_path / "lists" / "list.txt")) == 0
    absolute = "/".join([*(images / "b").parts[1:], "1.png"])
    assert maps_in(tmp_path / "maps") == sorted([absolute, "images/a/1-2.png", "images/a/1.png"])


@pytest.mark.parametrize("name", ["ä" * 125 + ".a", "ä" * 150, "a" * 300 + "/" + "b" * 300])
def test_long_names_are_cut(segmenter: Segmenter, tmp_path: Path, name: str):
    picture = images_of(tmp_path / "images", "1.png") / "1.png"
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        for ending in ("png", "bmp"):
            archive.write(picture, f"{name}.{ending}")
    assert main(command(tmp_path, tmp_path / "images.zip")) == 0
    told = told_in(tmp_path / "maps")
    assert len(set(told.values())) == 2 and sorted(told.values()) == maps_in(tmp_path / "maps")


def test_names_that_are_no_text_are_told_as_they_are(segmenter: Segmenter, tmp_path: Path):
    picture = images_of(tmp_path / "images", "1.png") / "1.png"
    picture.rename(picture.with_name("\udcff.png"))
    assert main(command(tmp_path, tmp_path / "images")) == 0
    assert told_in(tmp_path / "maps") == {str(picture.with_name("\udcff.png")): "-.png"}


@pytest.mark.parametrize("leave", [4096, 40_000])  # no room for a map, and none for the picture
def test_a_full_disk_is_said_and_refuses_no_second_try(
    segmenter: Segmenter, tmp_path: Path, disk: Path, leave: int, capsys: pytest.CaptureFixture[str]
):
    images = images_of(tmp_path / "images", "a.png", "b.png", "c.png")
    words = ["predict", str(tmp_path / "training"), str(images), "--out", str(disk / "maps"), "--device", "cpu"]
    words += ["--sheet", str(disk / "sheet.png")]
    wall = fill(disk, leave=leave)
    assert main(words) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert str(disk / ("maps" if leave == 4096 else "sheet.png")) in told and "No space left on device" in told
    assert [path.name for path in disk.iterdir()] == ["wall"]
    wall.unlink()
    assert main(words) == 0 and len(maps_in(disk / "maps")) == 3


def test_what_is_stopped_leaves_nothing(segmenter: Segmenter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images, told = images_of(tmp_path / "images", "a.png", "b.png"), predict_maps.map_of_classes

    def stops(image: object, *words: object, **options: object) -> object:
        if list(tmp_path.rglob("a.png"))[1:]:
            raise KeyboardInterrupt
        return told(image, *words, **options)

    with monkeypatch.context() as patch:
        patch.setattr(predict_maps, "map_of_classes", stops)
        assert main(command(tmp_path, images)) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["images", "training"]
    assert main(command(tmp_path, images)) == 0


@pytest.mark.parametrize("largest", [3000, 100_000])
def test_images_on_another_scale_are_told_or_refused(
    segmenter: Segmenter, tmp_path: Path, capsys: pytest.CaptureFixture[str], largest: int
):
    (tmp_path / "images").mkdir()
    values = np.random.default_rng(0).uniform(0, largest, (20, 30))
    if refused := largest > 65535:
        np.save(tmp_path / "images" / "0.npy", values.astype(np.float32))
    else:
        Image.fromarray(values.astype(np.uint16)).save(tmp_path / "images" / "0.png")
    words = ["predict", str(tmp_path / "training"), str(tmp_path / "images"), "--out", str(tmp_path / "maps")]
    assert main([*words, "--device", "cpu"]) == (2 if refused else 0)
    said = "".join(capsys.readouterr())
    assert ("they are on another scale" if refused else "mean little unless they really are like this") in said
    assert (tmp_path / "maps").exists() is not refused
