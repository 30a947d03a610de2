"""The whole page, on a folder with planted images."""

import csv
import json
import re
import shutil
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from exploration.planted import EACH, planted_images, planted_model
from PIL import Image

import mae
from mae.cli import main
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.exploration import sections
from mae.exploration.embedding_map import _class_colours
from mae.exploration.explored import UNLABELLED, ExploreRun, labels_of
from mae.exploration.run import explore
from mae.exploration.unusual_images import duplicates

COUNT = 2 * EACH + 3


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a model, the page, its pictures and its list."""
    place = tmp_path_factory.mktemp("explored")
    planted_images(place / "images")
    planted_model(place / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        page = explore(
            "model.safetensors",
            data="images",
            out="page.html",
            pictures="pictures",
            list="list.csv",
            device="cpu",
            quiet=True,
        )
    assert page == Path("page.html")
    return place


def map_data(page: str) -> dict:
    [text] = re.findall(r'<script type="application/json" id="map-data">(.*?)</script>', page)
    return json.loads(text)


def numbers(text: str, kind: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), dtype=kind)


def test_no_class_is_grey_as_those_without_a_colour_are():
    colours = _class_colours(torch.arange(100), 100)
    shown = torch.stack(list(colours.values()))
    assert list(colours) == list(range(18)) and len(shown.unique(dim=0)) == 18
    assert float((shown.amax(dim=1) - shown.amin(dim=1)).min()) > 0.1


def test_the_page_holds_every_section_and_needs_nothing_else(made: Path):
    page = (made / "page.html").read_text(encoding="ascii")
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles == [
        "Map of the images",
        "Nearest images",
        "Nearest patches of other images",
        "Odd images",
        "Near duplicates",
        "What attention looks at",
        "Patches as colours over training",
        "What layers know over training",
        "How far attention reaches",
        "Errors by wavelength",
        "What masks leave to guess",
    ]
    without_data = re.sub(r"base64,[^\"<]*", "", page)
    assert not re.search(r"https?:|url\(|@import|javascript:|<link|<iframe|\sfetch\(|XMLHttpRequest", without_data)
    assert "2 classes" in page and f"{COUNT} of images" in page


def test_each_picture_is_a_file_too(made: Path):
    names = sorted(path.name for path in (made / "pictures").iterdir())
    assert names == [
        "attention_between_patches.png",
        "attention_by_head.png",
        "attention_of_class_token.png",
        "attention_over_training.png",
        "correlation.png",
        "layers.png",
        "map.png",
        "mask_ratios.png",
        "near_duplicates.png",
        "nearest_images.png",
        "nearest_patches_colours.png",
        "nearest_patches_pictures.png",
        "odd_images.png",
        "patch_colours_over_training.png",
        "singular_values.png",
    ]
    for name in names:
        Image.open(made / "pictures" / name).load()


def test_the_list_names_what_was_planted(made: Path):
    rows = list(csv.DictReader((made / "list.csv").open()))
    assert {row["kind"] for row in rows} <= {"odd", "same pixels", "saved anew", "alike to the model"}
    assert [row["name"] for row in rows if row["kind"] == "odd"] == ["images/cold/odd.png"]
    pairs = {frozenset((row["name"], row["other"])): row for row in rows if row["kind"] != "odd"}
    same, anew, first = (f"images/warm/{name}" for name in ("same.png", "anew.jpg", "03.png"))
    assert pairs[frozenset((same, first))]["kind"] == "same pixels"
    assert float(pairs[frozenset((same, first))]["score"]) == pytest.approx(1, abs=1e-6)
    assert {pairs[frozenset((anew, other))]["kind"] for other in (same, first)} == {"saved anew"}
    assert len(pairs) == 3


def test_copies_alone_are_found_though_the_model_tells_nothing_apart(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "copies").mkdir()
    for number in range(5):
        shutil.copyfile(made / "images" / "warm" / "03.png", tmp_path / "copies" / f"{number}.png")
    monkeypatch.setattr("mae.exploration.run.SECTIONS", (duplicates,))
    page = explore(
        made / "model.safetensors",
        data=str(tmp_path / "copies"),
        out=tmp_path / "page.html",
        list=tmp_path / "list.csv",
        device="cpu",
        quiet=True,
    )
    assert "10 pairs of images are nearly the same (10 same pixels): the features of all images are the same" in (
        page.read_text()
    )
    assert [row["kind"] for row in csv.DictReader((tmp_path / "list.csv").open())] == ["same pixels"] * 10


def test_the_map_sets_the_two_kinds_apart(made: Path):
    data = map_data((made / "page.html").read_text())
    assert data["classes"] == ["cold", "warm"] and len(data["names"]) == COUNT
    labels = numbers(data["labels"], "<i4")
    assert [name.startswith("warm/") for name in data["names"]] == (labels == 1).tolist()
    places = numbers(data["places"], "<u2").reshape(COUNT, 2) / 65535
    centres = [places[labels == label].mean(axis=0) for label in (0, 1)]
    spread = [np.linalg.norm(places[labels == label] - centres[label], axis=1).mean() for label in (0, 1)]
    assert np.linalg.norm(centres[0] - centres[1]) > 2 * np.mean(spread)
    assert places.min() >= 0 and places.max() <= 1 and np.ptp(places, axis=0).max() == pytest.approx(1, abs=1e-4)


def test_neighbours_in_the_map_are_those_of_a_slow_loop(made: Path):
    data = map_data((made / "page.html").read_text())
    neighbours = numbers(data["neighbours"], "<u2").reshape(COUNT, -1)
    cosines = numbers(data["cosines"], "<i2").reshape(COUNT, -1) / 10_000
    model = mae.load(made / "model.safetensors")
    images = [np.asarray(Image.open(made / "images" / name)) for name in data["names"]]
    batch = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        features = model.encode((batch - 0.5) / 0.25).mean.double()
    features -= features.mean(dim=0)
    for image in (0, 7, COUNT - 1):
        found = torch.cosine_similarity(features[image], features, dim=1)
        found[image] = -2
        assert cosines[image] == pytest.approx(found.sort(descending=True).values[:12].numpy(), abs=1e-3)
        assert found[neighbours[image].astype(int)].numpy() == pytest.approx(cosines[image], abs=1e-3)


def test_thumbnails_stand_where_the_script_looks_for_them(made: Path):
    data = map_data((made / "page.html").read_text())
    atlas = np.asarray(Image.open(BytesIO(b64decode(data["atlas"].partition(",")[2]))).convert("RGB")).astype(float)
    for image, name in enumerate(data["names"]):
        row, column = divmod(image, data["columns"])
        top, left = row * data["side"], column * data["side"]
        shown = atlas[top : top + data["side"], left : left + data["side"]].mean(axis=(0, 1))
        true = np.asarray(Image.open(made / "images" / name).convert("RGB")).mean(axis=(0, 1))
        assert shown == pytest.approx(true, abs=4 if name != "cold/odd.png" else 8), name  # a pure colour loses more


def test_names_of_images_act_in_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mae.exploration.run.SECTIONS", sections.SECTIONS[:1])
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    hostile = "<img src=x onerror=alert(1)>'\"&\u202e.png"
    (tmp_path / "images" / "warm" / "00.png").rename(tmp_path / "images" / "warm" / hostile)
    (tmp_path / "images" / "cold").rename(tmp_path / "images" / "<b>cold")
    explore(planted_model(tmp_path / "m.safetensors"), data="images", out="p.html", device="cpu", quiet=True)
    page = (tmp_path / "p.html").read_text(encoding="ascii")
    assert "<img src=x" not in page and "<b>cold" not in page
    data = map_data(page)
    assert data["classes"][0] == "<b>cold" and f"warm/{hostile}".replace("\u202e", "\ufffd") in data["names"]


def test_labels_come_by_name_where_there_are_any(tmp_path: Path):
    planted_images(tmp_path / "images")
    spec = str(tmp_path / "images")
    source = open_source(spec, data_root=tmp_path)
    taken = source.take(np.array([3, 20]), "two of them")
    labels, names = labels_of(taken, spec, data_root=tmp_path)
    assert labels is not None and [names[label] for label in labels.tolist()] == ["cold", "warm"]
    flat = str(tmp_path / "images" / "cold")
    assert labels_of(open_source(flat, data_root=tmp_path), flat, data_root=tmp_path) == (None, ())
    other, names = labels_of(source, "builtin:digits", data_root=tmp_path)
    assert other is None and names == () and UNLABELLED == -1


def test_wrong_requests_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    model = str(planted_model(tmp_path / "m.safetensors"))
    (tmp_path / "full").mkdir()
    for name in ("there.html", "there.csv", "full/a.txt"):
        (tmp_path / name).write_text("")
    wrong = {
        (): "comes with no images; name some with --data",
        ("--data", "images", "--images", "2"): "--images is 2; expected 3 to 16,384",
        ("--data", "images", "--out", "page.png"): "expected a name that ends in .html",
        ("--data", "images", "--out", "there.html"): "exists and is not overwritten",
        ("--data", "images", "--list", "odd.txt"): "expected a name that ends in .csv",
        ("--data", "images", "--list", "there.csv"): "exists and is not overwritten",
        ("--data", "images", "--pictures", "full"): "is not an empty folder",
        ("--data", "imagse"): "did you mean 'images'",
    }
    for options, message in wrong.items():
        assert main(["explore", model, *options]) == 2, options
        assert message in capsys.readouterr().err, options
    assert mae.explore is explore


def test_the_same_command_is_taken_after_one_that_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    model = str(planted_model(tmp_path / "m.safetensors"))
    command = ["explore", model, "--data", "images", "--images", "4", "--out", "p.html", "--pictures", "pictures"]

    def stop(explored: ExploreRun) -> None:
        assert [path.name for path in explored.pictures.iterdir()] == ["map.png"]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mae.exploration.run.SECTIONS", (sections.SECTIONS[0], stop))
        assert main(command) == 130
    assert not list((tmp_path / "pictures").iterdir()) and not (tmp_path / "p.html").exists()
    monkeypatch.setattr("mae.exploration.run.SECTIONS", sections.SECTIONS[:1])
    assert main(command) == 0
    assert (tmp_path / "pictures" / "map.png").is_file()


def test_too_few_images_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    for path in sorted((tmp_path / "images" / "cold").iterdir())[2:]:
        path.unlink()
    with pytest.raises(UsageError, match="holds 2 readable images; a map of them takes three or more"):
        explore(planted_model(tmp_path / "m.safetensors"), data="images/cold", device="cpu", quiet=True)


def test_four_images_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    page = explore(
        planted_model(tmp_path / "m.safetensors"), data="images", images=4, out="p.html", device="cpu", quiet=True
    )
    assert len(map_data(page.read_text())["names"]) == 4


def test_images_of_many_channels_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    (tmp_path / "bands").mkdir()
    for number in range(6):
        np.save(tmp_path / "bands" / f"{number}.npy", rng.normal(300, 40, (16, 16, 5)).astype(np.float32))
    model = planted_model(tmp_path / "m.safetensors", in_chans=5, mean=(300.0,) * 5, std=(40.0,) * 5)
    page = explore(model, data="bands", out="p.html", pictures="pictures", device="cpu", quiet=True)
    assert map_data(page.read_text())["names"] == [f"{number}.npy" for number in range(6)]
    assert len(list((tmp_path / "pictures").iterdir())) >= 5


@pytest.mark.slow
def test_a_run_is_explored_on_its_own_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    planted_images(tmp_path / "images")
    mae.pretrain(
        "images",
        model="mae_vit_lesson_patch4",
        img_size=16,
        embed_dim=32,
        steps=4,
        batch_size=4,
        out="run",
        device="cpu",
        workers=0,
        quiet=True,
    )
    monkeypatch.chdir("/")
    assert main(["explore", str(tmp_path / "run"), "--device", "cpu"]) == 0
    assert main(["explore", str(tmp_path / "run"), "--device", "cpu"]) == 0  # written anew
    page = (tmp_path / "run" / "explore.html").read_text()
    assert f"{COUNT} of {tmp_path}/images" in page and "step 4" in page
    (tmp_path / "images").rename(tmp_path / "moved")
    with pytest.raises(UsageError, match="the images of the run .*does not exist.*name others with --data"):
        explore(tmp_path / "run", device="cpu", quiet=True)


def test_of_a_runs_own_images_as_many_may_be_unreadable_as_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted_images(tmp_path / "images")
    (tmp_path / "images" / "broken.png").write_bytes(b"")
    mae.pretrain(
        tmp_path / "images",
        model="mae_vit_lesson_patch4",
        img_size=16,
        embed_dim=32,
        steps=2,
        batch_size=4,
        max_unreadable=0.1,
        out=tmp_path / "run",
        device="cpu",
        workers=0,
        quiet=True,
    )
    monkeypatch.setattr("mae.exploration.run.SECTIONS", ())
    page = explore(tmp_path / "run", device="cpu", quiet=True)
    assert f"{COUNT} of {tmp_path}/images" in page.read_text(encoding="ascii")
    with pytest.raises(MAEError, match="1 of .* images cannot be used"):
        explore(tmp_path / "run", data=tmp_path / "images", out=tmp_path / "p.html", device="cpu", quiet=True)


def test_what_is_asked_for_is_looked_at_below_train_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planted_images(tmp_path / "images" / "train")
    shutil.copytree(tmp_path / "images" / "train", tmp_path / "images" / "test")
    model = planted_model(tmp_path / "model.safetensors")
    monkeypatch.setattr("mae.exploration.run.SECTIONS", ())
    monkeypatch.chdir(tmp_path)

    def told(**options: object) -> str:
        page = explore(model, out="page.html", device="cpu", quiet=True, **options)
        text = page.read_text(encoding="ascii")
        page.unlink()
        return text

    assert f"{2 * COUNT} of images (" in told(data="images") and "left out" not in told(data="images")
    assert "drawn), 2 classes" in told(data="images", images=5)
    monkeypatch.setattr("mae.exploration.run._own_source", lambda *_: "images")  # as of a run on the same folder
    own = told(images=5)
    assert f"train/ only, {COUNT} files; left out: test/ ({COUNT} files); 5 of {COUNT} images, drawn" in own
