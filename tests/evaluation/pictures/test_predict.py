"""A trained classifier applied to images: the same answers as its evaluation, files, pictures and refusals."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from full import fill
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_task import by_function, make_task, small_model, striped

import mae
from mae.cli import main
from mae.errors import MAEError, UsageError
from mae.evaluation.common import finetuning
from mae.evaluation.pictures.predict import find_classifier
from mae.evaluation.protocol import EvaluationProtocol
from mae.evaluation.protocols.attentive_probe import AttentiveProbe
from mae.evaluation.protocols.linear_probe import LinearProbe
from mae.evaluation.protocols.pooled_probe import PooledProbe
from mae.evaluation.run import evaluate
from mae.models.classifier import Classifier
from mae.models.file import is_classifier, load_with_report, save
from mae.models.kinds import classes_of, kind_of

QUICK = {"device": "cpu", "quiet": True}
CLASSES = ("lying", "standing", "none")


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Stripes, 90 to train on and 45 to test on, in a folder for each class."""
    for part, count, seed in (("train", 90, 0), ("test", 45, 1)):
        images, labels = striped(count, seed=seed)
        for number, (pixels, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = tmp_path / "labelled" / part / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels[..., 0]).save(folder / f"{number}.png")
    return tmp_path / "labelled"


@pytest.fixture
def run(tmp_path: Path, labelled: Path) -> Path:
    """A folder with the record of a linear probe and its classifier."""
    evaluate("linear_probe", small_model(), data=labelled, out=tmp_path / "run", baselines=False, **QUICK)
    return tmp_path / "run"


def test_predictions_are_those_of_the_evaluation(run: Path, labelled: Path, tmp_path: Path):
    record = json.loads((run / "evaluation" / "linear_probe.json").read_text())
    assert record["classifier"] == "linear_probe.safetensors"
    found = mae.predict(run / "evaluation" / "linear_probe.safetensors", labelled, **QUICK)
    right = [name.split("/")[-2] == label for name, label in zip(found.names, found.classes, strict=True)]
    assert np.mean(right) == pytest.approx(record["result"]["this model"]["mean"]["top1"])
    assert np.mean(right) > 0.6, "stripes are told apart by more than their commonest class"
    assert len(found.names) == 45 and found.class_names == tuple(sorted(CLASSES))
    torch.testing.assert_close(found.probabilities.sum(dim=1), torch.ones(45))
    # The folder that holds it stands for the file, and so does the model itself.
    for other in (run, mae.load(run / "evaluation" / "linear_probe.safetensors")):
        assert torch.equal(mae.predict(other, labelled, **QUICK).probabilities, found.probabilities)


@pytest.mark.parametrize("feature", ["cls", "mean", "cls+mean"])
def test_a_stored_probe_gives_the_fits_logits(tmp_path: Path, feature: str, monkeypatch: pytest.MonkeyPatch):
    parts = {"train": striped(60, seed=0), "test": striped(30, seed=1)}
    task = make_task(tmp_path, small_model(), **parts)
    monkeypatch.setattr("mae.evaluation.protocol.headline", lambda by_name: feature)
    result = LinearProbe(baselines=False).run(task)
    assert result.ranked_by == feature
    file = tmp_path / "probe.safetensors"
    finetuning.save(file, result.classifier, task)
    loaded = load_with_report(file)[0]
    assert isinstance(loaded, Classifier) and kind_of(loaded) == "linear_probe" and is_classifier(file)
    assert classes_of(loaded) == classes_of(result.classifier)
    ranking = finetuning.rank(task, loaded, top=1)
    assert torch.equal(ranking[:, 0], result.ranking[:, 0])


@pytest.mark.parametrize(
    ("protocol", "kind"),
    [
        (AttentiveProbe(epochs=2, batch_size=20), "attentive_probe"),
        (PooledProbe(epochs=2, batch_size=20, rates=(0.1,)), "pooled_probe"),
        (LinearProbe(official=True, epochs=2, batch_size=20, base_lr=10.0), "linear_probe"),
    ],
)
def test_other_probes_are_stored_too(tmp_path: Path, protocol: EvaluationProtocol, kind: str):
    task = make_task(tmp_path, small_model(), train=striped(60, seed=0), test=striped(30, seed=1))
    result, file = protocol.run(task), tmp_path / "probe.safetensors"
    finetuning.save(file, result.classifier, task)
    loaded = load_with_report(file)[0]
    assert isinstance(loaded, Classifier) and kind_of(loaded) == kind and is_classifier(file)
    assert torch.equal(finetuning.rank(task, loaded, top=3), result.ranking)
    with safe_open(file, framework="pt") as stored:
        metadata = stored.metadata()
    weights = loaded.state_dict()
    weights["head.head.weight" if "head.head.weight" in weights else "head.weight"][0, 0] += 0.01
    save_file(weights, file, metadata)
    with pytest.raises(MAEError, match="does not reproduce the probe"):  # of the head too, not the encoder alone
        load_with_report(file)


def test_a_function_leaves_no_classifier(tmp_path: Path):
    parts = {"train": striped(30, seed=0), "test": striped(20, seed=1)}
    function = by_function(lambda images: images[:, 0, ::4].flatten(1), img_size=(16, 16))
    assert LinearProbe(baselines=False).run(make_task(tmp_path, function, **parts)).classifier is None


def test_tables_hold_every_image_and_what_cannot_be_read(run: Path, labelled: Path, tmp_path: Path):
    photos = tmp_path / "photos"
    shutil.copytree(labelled / "test", photos / "all")
    (photos / "broken.png").write_bytes(b"no image")
    (photos / "=odd, name.png").write_bytes((photos / "all" / "none").glob("*.png").__next__().read_bytes())
    table, listing = tmp_path / "p.csv", tmp_path / "p.json"
    found = mae.predict(run, photos, out=table, top=2, **QUICK)
    mae.predict(run, photos, out=listing, top=9, **QUICK)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows[:-1]] == list(found.names) and any(
        name.endswith("=odd, name.png") for name in found.names
    )
    assert [row["class"] for row in rows[:-1]] == found.classes
    assert all(float(row["probability"]) >= float(row["probability_2"]) for row in rows[:-1])
    assert rows[-1]["name"].endswith("broken.png") and rows[-1]["problem"] and rows[-1]["class"] == ""
    told = json.loads(listing.read_text())
    assert len(told["images"]) == 46 and all(len(image["top"]) == 3 for image in told["images"])
    assert list(told["unreadable"]) == [rows[-1]["name"]]


def test_the_command_writes_table_and_picture(run: Path, labelled: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (labelled / "test" / "none" / "broken.png").write_bytes(b"no image")
    assert main(["predict", "run", str(labelled), "--sheet", "s.png", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "45 images: " in said and "1 file cannot be read; see the end of predictions.csv" in said
    with Image.open("s.png") as sheet:
        assert sheet.format == "PNG" and len(np.unique(np.asarray(sheet))) > 50
    assert main(["predict", "run", str(labelled), "--device", "cpu"]) == 2
    assert "predictions.csv exists and is not overwritten" in capsys.readouterr().err


def test_the_command_tells_unusual_values(run: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dim").mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 3000, (20, 30)).astype(np.uint16)).save("dim/0.png")
    assert main(["predict", "run", "dim", "--device", "cpu"]) == 0
    assert "mean little unless they really are like this" in capsys.readouterr().out


def test_what_is_no_classifier_is_refused(run: Path, labelled: Path, tmp_path: Path):
    save(small_model(), tmp_path / "plain.safetensors")
    with pytest.raises(UsageError, match="names no classes; train one: mae evaluate linear_probe"):
        mae.predict(tmp_path / "plain.safetensors", labelled, **QUICK)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="without a trained classifier"):
        find_classifier(tmp_path / "empty")
    shutil.copy(run / "evaluation" / "linear_probe.safetensors", run / "evaluation" / "second.safetensors")
    with pytest.raises(UsageError, match="holds 2 classifiers; name one of"):
        find_classifier(run)
    for options, says in (({"out": "x.txt"}, "end its name with .csv or .json"), ({"top": 0}, "top is 0")):
        with pytest.raises(UsageError, match=says):
            mae.predict(run, labelled, **options, **QUICK)


def test_a_feature_that_the_encoder_does_not_give_is_refused():
    from mae.models.classifier import LinearProbe as Probe

    model = small_model(cls_token=False)
    for feature in ("cls", "patches"):
        with pytest.raises(UsageError, match=f"a probe on the feature '{feature}'"):
            Probe(encoder=model.encoder, feature=feature, num_classes=3)


@pytest.mark.parametrize("room", [0, 8192])  # none for the table, and none for the picture
def test_a_full_disk_leaves_neither_table_nor_picture(run: Path, labelled: Path, disk: Path, room: int):
    files = {"out": disk / "table.csv", "sheet": disk / "sheet.png"}
    wall = fill(disk, leave=room)
    with pytest.raises(MAEError, match="table.csv: No space left" if room == 0 else "sheet.png: No space left"):
        mae.predict(run, labelled, **files, **QUICK)
    assert [path.name for path in disk.iterdir()] == ["wall"]
    wall.unlink()
    mae.predict(run, labelled, **files, **QUICK)
    assert all(path.is_file() for path in files.values())


def test_names_that_are_no_text_are_written_as_they_are(run: Path, labelled: Path, tmp_path: Path):
    (tmp_path / "images").mkdir()
    shutil.copy(next(labelled.rglob("*.png")), tmp_path / "images" / "\udcff.png")
    mae.predict(run, tmp_path / "images", out=tmp_path / "table.csv", **QUICK)
    assert b"/\xff.png," in (tmp_path / "table.csv").read_bytes()
