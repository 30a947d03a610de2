"""Test images that nearly show a training image are told wherever a score is, and scores are given without them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import Pictures
from light import forget_images
from PIL import Image
from rich.console import Console
from tiny_task import evaluator, make_task

import mae
from mae.evaluation.common.near_duplicates import accuracy_without_near_copies, count_near_copies, remark, warning
from mae.evaluation.protocol import ProtocolResult
from mae.evaluation.protocols.knn import Knn
from mae.evaluation.run import evaluate

QUICK = {"device": "cpu", "quiet": True}


def scene(seed: int, side: int = 24) -> np.ndarray:
    """A smooth random picture `[side, side, 3]`, uint8."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """Of each class twelve random pictures to train on; to test on three of these as JPEG, and two new ones."""
    for label, name in enumerate(("left", "right")):
        for part in ("train", "test"):
            (tmp_path / "split" / part / name).mkdir(parents=True)
        for number in range(12):
            picture = Image.fromarray(scene(100 * label + number))
            picture.save(tmp_path / "split" / "train" / name / f"{number}.png")
            if number < 3:
                picture.save(tmp_path / "split" / "test" / name / f"again{number}.jpg", quality=97)
        for number in (12, 13):
            Image.fromarray(scene(100 * label + number)).save(tmp_path / "split" / "test" / name / f"new{number}.png")
    return tmp_path / "split"


@pytest.fixture
def pixels() -> mae.Extractor:
    """Copies are nearest to their originals by any features, and nothing else of these pictures tells the class."""
    return mae.Extractor(
        name="pixels", encode=lambda images: images.flatten(1), preprocessing=mae.Preprocessing(img_size=(24, 24))
    )


def test_record_counts_near_copies_and_accuracy_without_them(pixels, split, tmp_path):
    found = evaluate("knn", pixels, data=split, out=tmp_path / "out", ks=[1], baselines=False, **QUICK)
    told = found.near_copies
    assert (told["test_images"], told["of"], told["ranked_by"]) == (6, 10, "features, k=1")
    names = [tuple(Path(name).stem for name in pair) for pair in told["examples"]]
    assert names == [("again0", "0"), ("again1", "1"), ("again2", "2")]
    # Pictures and classes have nothing to do with each other: only copies are right by more than chance.
    top1 = found.result["this model"]["features"]["1"]["top1"]
    assert told["top1"] == top1 == 0.6 + 0.4 * told["top1_without"]
    written = json.loads((tmp_path / "out" / "evaluation" / "knn.json").read_text())
    assert written["near_copies"] == told


@pytest.mark.parametrize(
    ("protocol", "options"),
    [("linear_probe", {}), ("linear_probe", {"official": True, "epochs": 1, "batch_size": 4}),
     ("attentive_probe", {"epochs": 1}), ("pooled_probe", {"epochs": 1}),
     ("finetune", {"epochs": 1, "batch_size": 4})],
)  # fmt: skip
def test_every_protocol_with_labels_tells(protocol, options, split, tmp_path):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    model = mae.create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)
    found = evaluate(protocol, model, data=split, out=tmp_path / "out", **options, **QUICK)
    told = found.near_copies
    assert (told["test_images"], told["of"]) == (6, 10) and 0 <= told["top1_without"] <= 1
    scores = found.result.get("this model", found.result)
    scores = scores.get("mean", scores.get("patches", scores))
    assert told["top1"] == scores["top1"]


def test_terminal_and_page_warn_once_and_say_what_is_left(split, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    model = mae.create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)
    judging = evaluator(model, split, tmp_path / "out")
    judging.console = Console(width=300)
    page = judging.run_all()
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("6 of 10 test images have a near copy among the training images") == 1
    assert "again0.jpg ~ " in said and "left/0.png" in said
    assert said.count("Of the 4 test images without a near copy in training") == 2  # k-NN and probe
    text = page.read_text()
    assert "6 of 10 test images have a near copy" in text and text.count("Of the 4 test images without") == 2


def test_a_clean_split_says_nothing(pixels, split, tmp_path, capsys):
    for copy in split.glob("test/*/again*"):
        copy.unlink()
    judging = evaluator(pixels, split, tmp_path / "out")
    judging.console = Console(width=300)
    record = judging.run(Knn(ks=(1,)))
    bench_note = judging.labelled_task().data.note
    assert record.near_copies["test_images"] == 0 and record.near_copies["top1_without"] == record.near_copies["top1"]
    said = capsys.readouterr().out
    assert "near cop" not in said and bench_note in said
    assert evaluate("label_free", pixels, data=split, out=tmp_path / "free", **QUICK).near_copies is None


def test_known_images_are_compared_once(pixels, split, tmp_path, monkeypatch):
    """The comparison is stored with the features, and images are decoded for it no second time."""
    asked = {"data": split, "out": tmp_path / "out", "ks": [1], "baselines": False, **QUICK}
    first = evaluate("knn", pixels, **asked)
    monkeypatch.setattr("mae.evaluation.extractors.feature_store.near_copies", None)
    monkeypatch.setattr("mae.evaluation.extractors.feature_store.contents_of", None)
    assert evaluate("knn", pixels, **asked).near_copies == first.near_copies


def test_with_exact_copies_dropped_the_others_are_told(pixels, split, tmp_path):
    (split / "test" / "left" / "same.png").write_bytes((split / "train" / "left" / "9.png").read_bytes())
    found = evaluate("knn", pixels, data=split, out=tmp_path / "out", ks=[1], overlap="drop", **QUICK)
    assert (found.near_copies["test_images"], found.near_copies["of"]) == (6, 10)


def colours() -> mae.Extractor:
    preprocessing = mae.Preprocessing(img_size=(8, 8))
    return mae.Extractor(name="colours", encode=lambda images: images.mean(dim=(2, 3)), preprocessing=preprocessing)


class Others(Pictures):
    """Another source than `Pictures`."""

    def version(self) -> str:
        return "d" * 16


def test_rows_and_names_stay_together_where_a_file_is_broken(tmp_path, monkeypatch):
    """The tenth of 120 test images cannot be read, and so of the training images; the 31st is a copy of the 8th."""
    forget_images(monkeypatch)
    trained, tested = [scene(k, 8) for k in range(120)], [scene(500 + k, 8) for k in range(120)]
    tested[30], labels = np.uint8(trained[14] * 0.9), torch.arange(120) % 3
    task = make_task(
        tmp_path,
        colours(),
        train=(Pictures(trained, broken=frozenset({9})), labels),
        test=(Others(tested, broken=frozenset({9})), labels),
    )
    assert {row: of for row, of in enumerate(task.near_copies.tolist()) if of >= 0} == {29: 13}
    counted = count_near_copies(task)
    assert counted == {"test_images": 1, "of": 119, "examples": [["picture-30", "picture-14"]]}
    ranking = task.labels("test")[:, None].clone()
    ranking[29:31] = (ranking[29:31] + 1) % 3  # the copy and the image after it are wrong
    found = accuracy_without_near_copies(task, ProtocolResult(numbers={}, header=(), rows=(), ranking=ranking))
    assert (found["top1"], found["top1_without"]) == (pytest.approx(117 / 119), pytest.approx(117 / 118))
    assert remark(found) == "Of the 118 test images without a near copy in training 99.2% are right, of all 98.3%."
    assert warning(counted).startswith("1 of 119 test images have a near copy")
    no_ranking = accuracy_without_near_copies(task, ProtocolResult(numbers={}, header=(), rows=()))
    assert no_ranking["top1"] is None and remark(no_ranking) == ""


def test_where_every_test_image_has_a_near_copy(tmp_path):
    images = [scene(k) for k in range(4)]
    darker = [np.uint8(image * 0.8) for image in images]
    labels = torch.tensor([0, 1, 2, 0])
    task = make_task(tmp_path, colours(), train=(Pictures(images), labels), test=(Others(darker), labels))
    found = accuracy_without_near_copies(task, ProtocolResult(numbers={}, header=(), rows=(), ranking=labels[:, None]))
    assert (found["test_images"], found["top1"], found["top1_without"]) == (4, 1.0, None)
    assert remark(found).startswith("Every test image has a near copy")


def test_another_division_of_the_same_images_is_compared_anew(pixels, tmp_path):
    for number in range(12):
        (tmp_path / f"{number % 2}").mkdir(exist_ok=True)
        Image.fromarray(scene(number)).save(tmp_path / f"{number % 2}" / f"{number}.png")
    names = [f"{number % 2}/{number}.png" for number in range(12)]
    for cut in (6, 8):
        (tmp_path / "train.txt").write_text("\n".join(names[:cut]))
        (tmp_path / "test.txt").write_text("\n".join(names[cut:]))
        data = {"data": tmp_path / "train.txt", "test": tmp_path / "test.txt"}
        found = evaluate("knn", pixels, out=tmp_path / "out", ks=[1], baselines=False, **data, **QUICK)
        assert found.near_copies["of"] == 12 - cut
