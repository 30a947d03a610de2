"""What `mae predict` writes of a detector: pictures, and labels that are read as such."""

import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data.pictures import png
from faster_coco_eval.core import mask
from full import fill
from PIL import Image
from tiny_task import small_model

import mae
from mae.cli import main
from mae.data.annotations.detection import open_detection
from mae.errors import MAEError, UsageError
from mae.evaluation.pictures.predicted_objects import find_objects
from mae.models.detector import DetectionHead, Detector, build_detector


def detector(*, masks: bool) -> Detector:
    config = small_model(in_chans=3, mean=(0.5,) * 3, std=(0.3,) * 3).config
    assert config is not None
    head = DetectionHead(size=32, channels=8, masks=masks)
    return build_detector(config, head, class_names=("disc", "square"), pretrained=None)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for number, size in enumerate([(20, 30), (40, 25)]):
        (folder / f"{number}.png").write_bytes(png(*size, seed=number))
    (folder / "broken.png").write_bytes(b"no image")
    return folder


@pytest.mark.parametrize("masks", [False, True])
def test_what_is_written_is_read_as_labels(masks: bool, images: Path, tmp_path: Path):
    found = find_objects(detector(masks=masks), images, out=tmp_path / "out", threshold=0.0, device="cpu")
    assert len(found) == 2 and all(len(of.scores) for of in found.values())
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [".json", ".png", ".png"]
    (images / "broken.png").unlink()
    (images / "labels.json").write_text((tmp_path / "out" / "detections.json").read_text())
    data = open_detection(images)
    assert data.class_names == ("disc", "square")
    read = [split.objects(number) for split in (data.train, data.test) for number in range(len(split.written))]
    assert sorted(len(of) for of in read) == sorted(len(of.scores) for of in found.values())
    boxes = np.concatenate([of.boxes for of in read]).sum()
    assert boxes == pytest.approx(sum(float(of.boxes.sum()) for of in found.values()), rel=1e-4)
    told = json.loads((tmp_path / "out" / "detections.json").read_text())["annotations"]
    areas = [mask.area(each["segmentation"]) if masks else each["bbox"][2] * each["bbox"][3] for each in told]
    assert [each["area"] for each in told] == pytest.approx(areas)


def test_the_command(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    mae.save(detector(masks=False), "detector.safetensors")
    assert main(["predict", "detector.safetensors", "images", "--device", "cpu"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 images" in said and "broken.png" in said
    assert json.loads((tmp_path / "predictions" / "detections.json").read_text())["images"][0]["height"] in (20, 30)
    assert main(["predict", "detector.safetensors", "images", "--device", "cpu"]) == 2  # nothing is overwritten


def test_images_keep_their_folders_and_a_folder_its_detector(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run" / "evaluation").mkdir(parents=True)
    mae.save(detector(masks=False), tmp_path / "run" / "evaluation" / "detector.safetensors")
    for name in ("a", "b"):
        (tmp_path / "nest" / name).mkdir(parents=True)
        (tmp_path / "nest" / name / "1.png").write_bytes(png(20, 30))
    words = ["predict", str(tmp_path / "run"), str(tmp_path / "nest"), "--out", str(tmp_path / "out")]
    assert main([*words, "--device", "cpu", "--sheet", str(tmp_path / "sheet.png")]) == 2
    assert "--sheet is of classes" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*words, "--device", "cpu", "--top", "5"]) == 2
    assert "detector.safetensors finds objects; leave it out" in capsys.readouterr().err
    assert main([*words, "--device", "cpu"]) == 0
    told = json.loads((tmp_path / "out" / "detections.json").read_text())
    assert [each["file_name"] for each in told["images"]] == ["a/1.png", "b/1.png"]


def file_names(source: Path, out: Path) -> list[str]:
    find_objects(detector(masks=False), source, out=out, device="cpu")
    return [each["file_name"] for each in json.loads((out / "detections.json").read_text())["images"]]


def test_images_of_a_list_are_named_as_it_names_them(images: Path, tmp_path: Path):
    (images / "0").mkdir()
    (images / "1.png").rename(images / "0" / "0.png")
    (images / "list.txt").write_text("0.png\n0/0.png\n0.png\n")  # one of them twice
    assert file_names(images / "list.txt", tmp_path / "inside") == ["0.png", "0/0.png"]
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "list.txt").write_text(f"../images/0.png\n{images}/0/0.png\n")
    assert file_names(tmp_path / "lists" / "list.txt", tmp_path / "out") == ["../images/0.png", f"{images}/0/0.png"]


def test_images_in_archives_are_named_with_the_archive_where_there_are_several(images: Path, tmp_path: Path):
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as archive:
            archive.add(images / "0.png", "x/0.png")
    assert file_names(tmp_path / "a.tar", tmp_path / "one") == ["x/0.png"]
    assert file_names(tmp_path / "{a,b}.tar", tmp_path / "two") == ["a.tar/x/0.png", "b.tar/x/0.png"]


def test_long_names_are_cut(images: Path, tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "images.zip", "w") as archive:
        archive.write(images / "0.png", f"{'ä' * 300}.png")
    assert file_names(tmp_path / "images.zip", tmp_path / "out") == [f"{'ä' * 300}.png"]
    assert (tmp_path / "out" / f"00000-{'ä' * 100}.png").is_file()


def test_a_full_disk_is_said_and_refuses_no_second_try(images: Path, tmp_path: Path, disk: Path):
    wall = fill(disk, leave=4096)
    with pytest.raises(MAEError, match=f"{disk}/out cannot be written: No space left on device; free some space"):
        find_objects(detector(masks=False), images, out=disk / "out", device="cpu")
    assert [path.name for path in disk.iterdir()] == ["wall"]
    wall.unlink()
    assert len(find_objects(detector(masks=False), images, out=disk / "out", device="cpu")) == 2


def test_a_model_that_finds_nothing_is_refused(images: Path, tmp_path: Path):
    mae.save(small_model(), tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="finds no objects"):
        find_objects(tmp_path / "model.safetensors", images, out=tmp_path / "out", device="cpu")


@pytest.mark.parametrize("largest", [3000, 100_000])
def test_images_on_another_scale_are_told_or_refused(tmp_path: Path, largest: int):
    (tmp_path / "images").mkdir()
    values = np.random.default_rng(0).uniform(0, largest, (20, 30))
    told: list[str] = []
    if largest > 65535:
        np.save(tmp_path / "images" / "0.npy", values.astype(np.float32))
        with pytest.raises(UsageError, match="they are on another scale"):
            find_objects(detector(masks=False), tmp_path / "images", out=tmp_path / "out", device="cpu")
        assert not (tmp_path / "out").exists()
        return
    Image.fromarray(values.astype(np.uint16)).save(tmp_path / "images" / "0.png")
    find_objects(detector(masks=False), tmp_path / "images", out=tmp_path / "out", device="cpu", tell=told.append)
    assert len(told) == 1 and "mean little unless they really are like this" in told[0]
