"""Nearest patches and colours of patches, from a folder to the record, page and pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_task import by_function, small_model
from torch import Tensor
from torch.nn.functional import unfold

import mae
from mae.cli import main
from mae.errors import UsageError
from mae.evaluation.pictures import patches as pictures
from mae.evaluation.protocols.neighbours_patches import NeighboursPatches
from mae.evaluation.run import evaluate

QUICK: dict[str, Any] = {"device": "cpu", "quiet": True}
KINDS = 3


def planted(folder: Path, count: int = 12) -> Path:
    """Images of 1 x 8 patches of 4 pixels: one checkered patch, of one of three kinds, among flat ones.

    The place of it goes round, the kind is the image's number modulo three.
    """
    folder.mkdir()
    squares = np.indices((4, 4))
    kinds = [squares[0] % 2, squares[1] % 2, squares.sum(axis=0) % 2]
    for number in range(count):
        pixels = np.full((4, 32), 100, dtype=np.uint8)
        place = number * 3 % 8
        pixels[:, 4 * place : 4 * place + 4] = 60 + 80 * kinds[number % KINDS]
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return folder


def textures(images: Tensor) -> Mapping[str, Tensor]:
    """How strongly each patch changes along both axes: it tells the kinds apart and knows no place."""
    patches = unfold(images, 4, stride=4).mT.unflatten(2, (4, 4))
    return {"patches": torch.stack([patches.diff(dim=axis).abs().mean(dim=(2, 3)) for axis in (2, 3)], dim=2)}


def places(images: Tensor) -> Mapping[str, Tensor]:
    """Where each patch lies, and nothing of what is there."""
    return {"patches": torch.eye(8).expand(len(images), 8, 8)}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The columns of each sheet that is written."""
    written: list[Any] = []
    original = pictures.write_sheet
    monkeypatch.setattr(
        pictures, "write_sheet", lambda columns, **named: (written.append(columns), original(columns, **named))
    )
    return written


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted(tmp_path_factory.mktemp("planted") / "images")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    mae.save(small_model(depth=2, img_size=(8, 32), patch_size=(4, 4)), path)
    return path


def test_patches_of_the_same_kind_are_found_wherever_they_lie(data: Path, tmp_path: Path, drawn: list[Any]):
    """Of two patches an image half are one, so the query is the checkered one."""
    halves = tmp_path / "halves"
    halves.mkdir()
    for path in data.glob("*.png"):
        number = int(path.stem)
        at = 4 * (number * 3 % 8)
        pixels = np.full((4, 8), 100, dtype=np.uint8)
        side = 4 * (number % 2)
        pixels[:, side : side + 4] = np.array(Image.open(path))[:, at : at + 4]
        Image.fromarray(pixels).save(halves / path.name)
    extractor = by_function(textures, img_size=(4, 8))
    record = evaluate("neighbours_patches", extractor, data=halves, out=tmp_path / "out", rows=4, k=3, **QUICK)
    assert record.result["this model"]["mean_cosine"] == pytest.approx(1)
    query, *nearest = drawn[0]
    for row in range(0, len(query.notes), 3):  # of this model, then place removed, then pixels
        assert query.notes[row][0] == "by this model"
        asked, *found = (Path(column.notes[row][1]).stem for column in (query, *nearest))
        assert len({asked, *found}) == 4 and {int(name) % KINDS for name in found} == {int(asked) % KINDS}


def test_a_model_that_knows_places_alone_is_told(data: Path, tmp_path: Path):
    extractor = by_function(places, img_size=(4, 32))
    record = evaluate("neighbours_patches", extractor, data=data, out=tmp_path, **QUICK)
    chance = record.result["same_place_by_chance"]
    assert record.result["this model"]["same_place"] == 1.0 and 2 / 8 <= chance <= 3 / 8
    assert record.result["place removed"]["mean_cosine"] == 0  # nothing is left
    assert sum(record.result["place removed"]["explained"]) == 0
    assert record.result["raw pixels"]["in_common"] == {} and set(record.result["this model"]["in_common"]) == {
        "raw pixels"
    }
    assert (record.result["images"], record.result["queries"], record.result["k"]) == (12, 12, 5)


def test_raw_pixels_as_the_model_have_all_neighbours_in_common(data: Path, tmp_path: Path):
    def pixels(images: Tensor) -> Mapping[str, Tensor]:
        return {"patches": unfold(images, 4, stride=4).mT}

    record = evaluate("neighbours_patches", by_function(pixels, img_size=(4, 32)), data=data, out=tmp_path, **QUICK)
    found, other = record.result["this model"], record.result["raw pixels"]
    assert found["in_common"] == {"raw pixels": 1.0} and found["mean_cosine"] == other["mean_cosine"]
    assert found["same_place"] == other["same_place"] and found["explained"] == pytest.approx(other["explained"])


def test_the_command_writes_record_table_page_and_pictures(
    data: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = ["evaluate", "neighbours_patches", str(saved), "--data", str(data), "--out", str(tmp_path)]
    assert main([*asked, "--rows", "2", "--k", "3"]) == 0
    shown = capsys.readouterr().out
    assert "random weights" in shown and "12 patches, each on another image, and the 3 nearest" in shown
    folder = tmp_path / "evaluation"
    record = json.loads((folder / "neighbours_patches.json").read_text())
    assert record["pictures"] == {
        "pictures": "neighbours_patches-pictures.png",
        "colours": "neighbours_patches-colours.png",
    }
    assert all((folder / name).stat().st_size > 1000 for name in record["pictures"].values())
    assert (folder / "neighbours_patches.html").read_text().count("data:image/png") == 2
    assert "neighbours_patches,random weights / same_place," in (folder / "neighbours_patches.csv").read_text()
    assert set(record["result"]["random weights"]["in_common"]) == {"raw pixels"}


def test_fewer_images_than_asked_and_images_of_other_shapes(saved: Path, tmp_path: Path, drawn: list[Any]):
    folder = planted(tmp_path / "images", count=3)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 7), dtype=np.uint8)).save(folder / "tall.png")
    record = evaluate("neighbours_patches", saved, data=folder, out=tmp_path, rows=99, k=50, **QUICK)
    assert (record.result["images"], record.result["queries"], record.result["k"]) == (4, 4, 3)
    nearest, colours = drawn
    assert len(nearest) == 1 + 3 and len(nearest[0].notes) == 4 * 4 and len(colours[0].pictures) == 4
    assert nearest[0].pictures.shape[1] * 4 == nearest[0].pictures.shape[2]


def test_models_see_whole_images(tmp_path: Path):
    """A central crop of so wide an image would hold nothing of its bright end."""
    seen = []

    def watching(images: Tensor) -> Mapping[str, Tensor]:
        seen.append(float(images.max()))
        return textures(images)

    (tmp_path / "wide").mkdir()
    for number in range(2):
        pixels = np.zeros((8, 64), dtype=np.uint8)
        pixels[:, :8] = 250 - number
        Image.fromarray(pixels).save(tmp_path / "wide" / f"{number}.png")
    evaluate(
        "neighbours_patches", by_function(watching, img_size=(8, 8)), data=tmp_path / "wide", out=tmp_path, **QUICK
    )
    assert max(seen) > 0.5


def test_stored_tokens_give_the_same_and_another_seed_asks_for_other_patches(
    data: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: dict[str, Any] = {"data": data, "out": tmp_path, "rows": 1, "k": 2, **QUICK}
    first = evaluate("neighbours_patches", saved, **asked)
    pixels = [(tmp_path / "evaluation" / name).read_bytes() for name in first.pictures.values()]
    monkeypatch.setattr("mae.evaluation.extractors.feature_store.computed_batches", None)
    again = evaluate("neighbours_patches", saved, **asked)
    assert again.result == first.result
    assert [(tmp_path / "evaluation" / name).read_bytes() for name in first.pictures.values()] == pixels
    assert evaluate("neighbours_patches", saved, seed=1, **asked).result != first.result


def test_one_image_alone_and_a_model_without_patches_are_refused(data: Path, saved: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="holds 1 image; neighbours need two or more"):
        evaluate("neighbours_patches", saved, data=planted(tmp_path / "one", count=1), out=tmp_path, **QUICK)
    flat = by_function(lambda images: images.flatten(1), img_size=(8, 8))
    with pytest.raises(UsageError, match="gives no patch tokens"):
        evaluate("neighbours_patches", flat, data=data, out=tmp_path, **QUICK)


@pytest.mark.parametrize("options", [{"rows": 0}, {"k": 0}, {"rows": -1, "k": 3}])
def test_wrong_options_are_refused(options: dict[str, int]):
    with pytest.raises(UsageError, match="expected 1 or more of each"):
        NeighboursPatches(**options)


def test_it_is_no_part_of_all():
    assert not NeighboursPatches.cheap and NeighboursPatches.labels == "none"
