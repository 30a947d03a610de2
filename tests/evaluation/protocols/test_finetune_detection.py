"""Fine-tuning to detection: what it learns, what is trained beside it, how images and objects are jittered."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_objects import NAMES, drawn_objects
from resuming import stop_in_step
from tiny_task import by_function, small_model
from torch.testing import assert_close
from torchvision import tv_tensors

import mae
from mae.data.annotations.detection import open_detection
from mae.data.annotations.objects import objects_of
from mae.errors import MAEError, Stopped, UsageError
from mae.evaluation.common.detection_training import LargeScaleJitter
from mae.evaluation.protocols.finetune_detection import FinetuneDetection
from mae.evaluation.run import evaluate
from mae.models.detector import Detector
from mae.randomness import drawing_from
from mae.training.schedule import WarmupSteps

COLOUR: dict[str, Any] = {"in_chans": 3, "mean": (0.3,) * 3, "std": (0.2,) * 3}
QUICK: dict[str, Any] = {"device": "cpu", "quiet": True}
SHORT: dict[str, Any] = {
    **QUICK, "iterations": 2, "batch_size": 2, "channels": 8, "size": 32, "pictures": 2, "scales": (0.5, 1.5)
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn_objects(tmp_path_factory.mktemp("drawn"), train=6, test=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    mae.save(small_model(depth=2, **COLOUR), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("noise", [False, True])
def test_it_finds_what_is_there_and_nothing_in_noise(tmp_path: Path, noise: bool):
    model = small_model(
        img_size=64, patch_size=(8, 8), embed_dim=48, depth=2, num_heads=3, decoder_embed_dim=16, **COLOUR
    )
    folder = drawn_objects(tmp_path / "data", noise=noise)
    options: dict[str, Any] = {
        "iterations": 250, "batch_size": 4, "size": 64, "channels": 32, "scales": (0.5, 1.5), "lr": 2e-3,
        "layer_decay": 1.0, "drop_path": 0.0, "weight_decay": 0.05, "beside": (), "pictures": 0,
    }  # fmt: skip
    record = evaluate("finetune_detection", model, data=folder, out=tmp_path, **QUICK, **options)
    curve = record.result["training"]["curve"]
    assert curve[0]["ap50"] < 0.05
    found = record.result["this model"]["boxes"]["ap50"]
    assert found < 0.2 if noise else found > 0.5


@pytest.mark.parametrize("kind", ["detection", "instances"])
def test_a_training_beside_scratch_is_told_drawn_saved_and_not_repeated(
    tmp_path: Path, data: Path, saved: Path, kind: str, capsys: pytest.CaptureFixture[str]
):
    seeds = 2 if kind == "detection" else 1
    words = {**SHORT, "quiet": False, "seeds": seeds, "window": 2}
    record = evaluate(f"finetune_{kind}", saved, data=data, out=tmp_path, **words)
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("AP50", "scratch", "disc, AP"))
    assert ("2 seeds" in shown and "paired" in shown) is (seeds == 2)
    assert ("Verdict: " in shown and "scratch (" in shown) is (record.verdict is not None) is (seeds == 2)
    assert ("One seed says nothing of chance" in " ".join(shown.split())) is (seeds == 1)
    areas = ["boxes"] if kind == "detection" else ["boxes", "masks"]
    assert list(record.result["this model"]) == areas and list(record.result["scratch"]) == areas
    assert (tmp_path / "evaluation" / f"finetune_{kind}-pictures.png").is_file()
    training = record.result["training"]
    file = Path(training["folder"]) / "detector.safetensors"
    detector = mae.load(file)
    assert isinstance(detector, Detector) and detector.class_names == NAMES
    image = next((data / "val2017").glob("*.png"))
    found = detector.predict(image, threshold=0.0)[0]
    assert found.boxes[:, 0::2].max() <= 64 and found.boxes[:, 1::2].max() <= 48 and set(found.classes) <= set(NAMES)
    assert (found.masks is not None and found.masks.shape[1:] == (48, 64)) if kind == "instances" else not found.masks
    before = file.stat().st_mtime_ns, len(list(file.parent.parent.iterdir()))
    again = evaluate(f"finetune_{kind}", saved, data=data, out=tmp_path, **{**words, "quiet": True})
    assert again.result["training"]["seconds"] == training["seconds"]
    assert again.result["this model"] == record.result["this model"]
    assert len(list(file.parent.parent.iterdir())) == before[1] == 2 * seeds


def test_fewer_labels_are_some_of_them(tmp_path: Path, data: Path, saved: Path):
    record = evaluate(
        "finetune_detection", saved, data=data, out=tmp_path, **{**SHORT, "beside": (), "labels_used": "50%"}
    )
    assert (tmp_path / "evaluation" / "finetune_detection-50percent.json").is_file()
    told = json.loads((Path(record.result["training"]["folder"]) / "training.json").read_text())
    assert told["transform"]["images"] == 3


def test_a_stopped_training_resumes_to_the_same_weights(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which regions the heads learn from is drawn at random, and is the same after a resume."""
    options = {**SHORT, "iterations": 6, "beside": (), "pictures": 0, "doctor": False}

    def weights(out: Path) -> bytes:
        record = evaluate("finetune_detection", saved, data=data, out=out, **options)
        return (Path(record.result["training"]["folder"]) / "detector.safetensors").read_bytes()

    whole = weights(tmp_path / "whole")
    stop_in_step(monkeypatch, 3)
    with pytest.raises(Stopped):
        weights(tmp_path / "stopped")
    assert weights(tmp_path / "stopped") == whole


def test_labels_are_drawn_first_and_their_faults_refused(tmp_path: Path, saved: Path):
    folder = drawn_objects(tmp_path / "data", train=6, test=2)
    one = {**SHORT, "iterations": 1, "beside": (), "pictures": 0}
    evaluate("finetune_detection", saved, data=folder, out=tmp_path / "good", **one)
    assert (tmp_path / "good" / "evaluation" / "finetune_detection-labels.png").is_file()
    file = folder / "annotations" / "instances_train2017.json"
    labels = json.loads(file.read_text())
    for each in labels["annotations"]:
        each["bbox"][0] += 100  # beyond its image
    file.write_text(json.dumps(labels))
    with pytest.raises(MAEError, match="worthless.*--no-doctor"):
        evaluate("finetune_detection", saved, data=folder, out=tmp_path / "bad", **one)
    assert (tmp_path / "bad" / "evaluation" / "finetune_detection-labels.png").is_file()
    assert not (tmp_path / "bad" / "evaluation" / "finetune_detection").exists()
    evaluate("finetune_detection", saved, data=folder, out=tmp_path / "bad", doctor=False, **one)


def test_copies_that_are_left_out_of_the_test_are_no_fault(tmp_path: Path, saved: Path):
    folder = drawn_objects(tmp_path / "data", train=6, test=2)
    copied, copy = (min((folder / part).glob("*.png")) for part in ("train2017", "val2017"))
    copy.write_bytes(copied.read_bytes())
    asked = {**SHORT, "data": folder, "out": tmp_path / "out", "iterations": 1, "beside": (), "pictures": 0}
    with pytest.raises(UsageError, match="1 test image is among the training images.*--overlap drop"):
        evaluate("finetune_detection", saved, **asked)
    evaluate("finetune_detection", saved, overlap="drop", **asked)
    assert (tmp_path / "out" / "evaluation" / "finetune_detection.json").is_file()


def test_what_cannot_be_trained_is_refused(tmp_path: Path, data: Path, saved: Path):
    with pytest.raises(UsageError, match="mae import"):
        function = by_function(lambda images: images.mean(dim=(2, 3)), img_size=(16, 16))
        evaluate("finetune_detection", function, data=data, out=tmp_path, **SHORT)
    with pytest.raises(UsageError, match="size is 30; expected a multiple of the patch"):
        evaluate("finetune_detection", saved, data=data, out=tmp_path / "uneven", **{**SHORT, "size": 30})
    with pytest.raises(UsageError, match="patches of 8 x 4 pixels; expected square ones"):
        oblong = small_model(img_size=(16, 16), patch_size=(8, 4), **COLOUR)
        evaluate("finetune_detection", oblong, data=data, out=tmp_path / "oblong", **SHORT)
    assert not list(tmp_path.rglob("*-labels.png"))
    folder = Path("../shared/data/bccd")
    for name, value in (("size", 0), ("scales", (2.0, 1.0)), ("layer_decay", 0.0), ("beside", ("scratch", "scratch"))):
        with pytest.raises(UsageError, match=name):
            FinetuneDetection(**{name: value})
    if folder.is_dir():
        with pytest.raises(UsageError, match="outlines"):
            evaluate("finetune_instances", saved, data=folder, out=tmp_path, **SHORT)


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_part_without_an_object_is_refused(tmp_path: Path, saved: Path, part: str):
    folder = drawn_objects(tmp_path / "data", train=6, test=2)
    file = folder / "annotations" / f"instances_{part}2017.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "annotations": []}))
    with pytest.raises(UsageError, match=f"no image of the {part.replace('val', 'test')} part has an object"):
        evaluate("finetune_detection", saved, data=folder, out=tmp_path / "run", doctor=False, **SHORT)


def sample_of(size: tuple[int, int]) -> dict[str, Any]:
    """Two light squares on black, and a crowd."""
    height, width = size
    boxes = [[2.0, 4, 10, 12], [20, 6, 32, 18], [0, 0, 4, 4]]
    outlines = [
        (np.array([[left, top], [right, top], [right, bottom], [left, bottom]], dtype=np.float32),)
        for left, top, right, bottom in boxes
    ]
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    for left, top, right, bottom in np.array(boxes[:2], dtype=int):
        image[:, top:bottom, left:right] = 255
    return {"image": tv_tensors.Image(image), "objects": objects_of(boxes, [0, 1, 1], [False, False, True], outlines)}


@pytest.mark.parametrize("masks", [False, True])
def test_boxes_and_masks_follow_the_image(masks: bool):
    jitter = LargeScaleJitter(size=40, masks=masks, scales=(1.0, 2.0))
    sides = set()
    for seed in range(40):
        with drawing_from(seed):
            changed = jitter(sample_of((24, 40)))
        image = changed["image"].float().mean(dim=0) / 255
        sides.add(tuple(image.shape))
        height, width = image.shape
        assert max(height, width) <= 40
        drawn = torch.zeros(height, width)
        for row, (left, top, right, bottom) in enumerate(changed["boxes"].tolist()):
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            drawn[round(top) : round(bottom), round(left) : round(right)] = 1
            if masks:
                inside = changed["masks"][row].nonzero()
                assert inside.min(dim=0).values.tolist() == [top, left]
                assert (inside.max(dim=0).values + 1).tolist() == [bottom, right]
        # Light where a box is, dark elsewhere, but for edges of a pixel or so.
        assert float((drawn - image).abs().mean()) < 0.06
        assert len(changed["labels"]) == len(changed["boxes"]) <= 2
        assert set(changed["labels"].tolist()) <= {1, 2}
    assert len(sides) > 5


def test_the_jitter_is_mirrored_half_of_the_time_and_scales_are_spread():
    jitter = LargeScaleJitter(size=40, masks=False, scales=(0.1, 2.0))
    widths, mirrored = [], []
    for seed in range(200):
        with drawing_from(seed):
            changed = jitter(sample_of((24, 40)))
        widths.append(changed["image"].shape[2])
        if changed["image"].shape[2] < 40 and len(changed["boxes"]) == 2:
            mirrored.append(bool(changed["boxes"][0, 0] > changed["boxes"][1, 0]))
    assert min(widths) < 8 and 0.4 < np.mean([width == 40 for width in widths]) < 0.65
    assert 0.3 < np.mean(mirrored) < 0.7


def test_images_without_objects_are_learnt_from_too():
    sample = {"image": sample_of((24, 40))["image"], "objects": objects_of([], [], [], [])}
    changed = LargeScaleJitter(size=16, masks=True)(sample)
    assert changed["boxes"].shape == (0, 4) and changed["masks"].shape[0] == 0
    detector = small_detector(masks=True)
    target = {"boxes": changed["boxes"], "labels": changed["labels"], "masks": changed["masks"]}
    assert detector.train()([changed["image"].float() / 255], [target]).loss.isfinite()


def small_detector(*, masks: bool) -> Detector:
    from mae.models.detector import DetectionHead, build_detector

    config = small_model(depth=1, **COLOUR).config
    assert config is not None
    return build_detector(config, DetectionHead(size=32, channels=8, masks=masks), class_names=NAMES, pretrained=None)


def test_the_rate_falls_in_vitdets_steps():
    rate = WarmupSteps(peak=1.0, floor=0.0, warmup_samples=0, total_samples=184_375)
    assert [rate(step) for step in (0, 163_888, 163_890, 177_545, 177_547)] == pytest.approx([1, 1, 0.1, 0.1, 0.01])


def test_the_real_set_is_read():
    folder = Path("../shared/data/bccd")
    if not folder.is_dir():
        pytest.skip("the shared data are not here")
    data = open_detection(folder)
    assert set(data.class_names) == {"WBC", "RBC", "Platelets"}
    assert_close(torch.tensor(len(data.train.source) + len(data.test.source)), torch.tensor(364))
