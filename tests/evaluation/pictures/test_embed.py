"""Features as files and neighbours as pictures."""

import csv
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from data.pictures import noise, png
from PIL import Image
from safetensors import safe_open

import mae
from mae.data.dataset.images import load_images
from mae.errors import UsageError
from mae.evaluation.pictures import nearest as module
from mae.evaluation.pictures import pooling
from mae.models.presets import create_model

QUICK = {"device": "cpu", "quiet": True}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # features of models without a run go to runs/


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Seven images without labels, one of them turned by its EXIF, two of them the same."""
    folder = tmp_path / "photos"
    (folder / "sub").mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}.png").write_bytes(png(9, 8 + number, seed=number))
    (folder / "sub" / "0.png").write_bytes(png(9, 8, seed=50))
    (folder / "sub" / "same.png").write_bytes(png(9, 9, seed=1))
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(noise(20, 30)).save(folder / "turned.jpg", exif=exif)
    return folder


NAMES = ["0.png", "1.png", "2.png", "3.png", "sub/0.png", "sub/same.png", "turned.jpg"]


@pytest.fixture
def model():
    torch.manual_seed(5)
    sizes = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 1, "decoder_depth": 1}
    return create_model("mae_vit_lesson_patch4", **sizes, mean=(0.5,) * 3, std=(0.3,) * 3)


def read(path: Path) -> tuple[list[str], np.ndarray, dict[str, np.ndarray]]:
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        shapes = json.loads(table.schema.metadata[b"shapes"])
        arrays = {name: np.array(table[name].to_pylist()).reshape(-1, *shape) for name, shape in shapes.items()}
        return table["name"].to_pylist(), np.stack([table["height"], table["width"]], axis=1), arrays
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        columns = {name: [key for key in rows[0] if key.startswith(f"{name}_")] for name in ("cls", "mean")}
        arrays = {name: np.float32([[row[key] for key in keys] for row in rows]) for name, keys in columns.items()}
        return (
            [row["name"] for row in rows],
            np.array([[int(row["height"]), int(row["width"])] for row in rows]),
            arrays,
        )
    if path.suffix == ".npz":
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files if name not in ("names", "sizes", "about")}
            return file["names"].tolist(), file["sizes"], arrays
    with safe_open(path, framework="np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys() if name != "sizes"}
        return json.loads(file.metadata()["names"]), file.get_tensor("sizes"), arrays


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".npz", ".safetensors"])
def test_a_row_an_image_in_every_format(photos, model, tmp_path, suffix):
    out = mae.embed(model, photos, out=tmp_path / f"f{suffix}", **QUICK)
    names, sizes, arrays = read(out)
    assert names == [str(photos / name) for name in NAMES]
    assert sizes.tolist() == [[9, 8], [9, 9], [9, 10], [9, 11], [9, 8], [9, 9], [30, 20]]
    assert {name: array.shape for name, array in arrays.items()} == {"cls": (7, 32), "mean": (7, 32)}
    assert np.array_equal(arrays["mean"][1], arrays["mean"][5])
    assert len({row.tobytes() for row in arrays["mean"]}) == 6
    exact = model.encode(torch.zeros(1, 3, 8, 8))
    assert arrays["mean"].dtype in (np.float32, np.float64) and exact.mean.shape[1] == 32


def test_every_image_has_a_row_beside_train_too(photos, model, tmp_path):
    names = ["test/t.png", "top.png", "train/a.png", "train/b.png"]
    for number, name in enumerate(names):
        path = tmp_path / "parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(9, 8, seed=number))
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"parts/{name}\n" for name in names[::-1]))
    asked = [str(tmp_path / "parts" / name) for name in names]
    for source, wanted in ((tmp_path / "parts", asked), (listed, asked[::-1])):
        assert read(mae.embed(model, source, out=tmp_path / f"{source.stem}.csv", **QUICK))[0] == wanted
    drawn = mae.neighbours(model, listed, out=tmp_path / "n.csv", queries=["test/t.png"], k=9, **QUICK)
    with drawn.open(newline="") as file:
        assert {row["neighbour"] for row in csv.DictReader(file)} == {*asked} - {asked[0]}


def test_a_set_known_by_name_tells_which_part_is_taken(tmp_path, capsys):
    mine, _ = counted(both)
    names, _, _ = read(mae.embed(mine, "builtin:digits", out=tmp_path / "f.npz", device="cpu"))
    told = " ".join(capsys.readouterr().out.split())
    assert f"builtin:digits: {len(names):,} of 400 scanned digits, the training split; its test images are left" in told


def test_a_csv_holds_the_same_values(photos, model, tmp_path):
    _, _, table = read(mae.embed(model, photos, out=tmp_path / "f.csv", **QUICK))
    _, _, arrays = read(mae.embed(model, photos, out=tmp_path / "f.npz", **QUICK))
    assert all(np.array_equal(table[name], arrays[name]) for name in ("cls", "mean"))


def test_neighbours_as_a_table(photos, model, tmp_path):
    _, _, arrays = read(mae.embed(model, photos, out=tmp_path / "f.npz", **QUICK))
    out = mae.neighbours(model, photos, out=tmp_path / "n.csv", queries=["1.png", "sub/0.png"], k=3, **QUICK)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and [row["rank"] for row in rows] == ["1", "2", "3"] * 2

    def cosine(values: np.ndarray, row: dict[str, str]) -> float:
        one, other = (
            values[NAMES.index(Path(row[end]).relative_to(photos).as_posix())] for end in ("query", "neighbour")
        )
        return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))

    centred = arrays["mean"] - arrays["mean"].mean(axis=0)
    for row in rows:
        assert float(row["cosine"]) == pytest.approx(cosine(arrays["mean"], row), abs=1e-5)
        assert float(row["centred_cosine"]) == pytest.approx(cosine(centred, row), abs=1e-4)
    assert rows[0]["neighbour"].endswith("same.png") and float(rows[0]["centred_cosine"]) == pytest.approx(1)
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        mae.neighbours("not even looked for", photos, out=out, **QUICK)
    with pytest.raises(UsageError, match="ends in .png or .csv"):
        mae.neighbours("not even looked for", photos, out=tmp_path / "n.txt", **QUICK)
    with pytest.raises(UsageError, match="--seed is -1"):
        mae.neighbours("not even looked for", photos, out=tmp_path / "new.png", seed=-1, **QUICK)


def test_patches_and_chosen_features(photos, model, tmp_path):
    _, _, arrays = read(mae.embed(model, photos, out=tmp_path / "f.npz", features=["cls", "patches"], **QUICK))
    assert list(arrays) == ["cls", "patches"] and arrays["patches"].shape == (7, 16, 32)
    assert arrays["patches"].dtype == np.float16
    _, _, whole = read(mae.embed(model, photos, out=tmp_path / "g.npz", features=["mean"], **QUICK))
    np.testing.assert_allclose(arrays["patches"].astype(np.float32).mean(axis=1), whole["mean"], atol=2e-3)


def counted(encode) -> tuple[mae.Extractor, list[int]]:
    """A function as an extractor, and how many images it is given at a time."""
    counts: list[int] = []

    def counting(images):
        counts.append(len(images))
        return encode(images)

    preprocessing = mae.Preprocessing(img_size=(8, 8))
    return mae.Extractor(name="f", encode=counting, preprocessing=preprocessing, identity="one"), counts


def both(images: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mean": images.mean(dim=(2, 3)), "patches": images.flatten(2).transpose(1, 2)}


def kinds() -> list[str]:
    """Of what was stored beside the content."""
    told = [json.loads(path.read_text())["kind"] for path in Path("runs").rglob("key.json")]
    return sorted(kind for kind in told if kind != "content")


@pytest.mark.parametrize(
    ("features", "given", "stored", "written"),
    [
        (["patches"], [1, 7], ["patches"], ["patches"]),
        ("patches", [1, 7], ["patches"], ["patches"]),
        (["mean"], [1, 7], ["pooled"], ["mean"]),
        ((), [1, 7], ["pooled"], ["mean"]),
        (["patches", "mean"], [1, 7, 7], ["patches", "pooled"], ["patches", "mean"]),
    ],
)
def test_only_what_is_asked_for_is_computed(photos, tmp_path, features, given, stored, written):
    mine, counts = counted(both)
    names, _, arrays = read(mae.embed(mine, photos, out=tmp_path / "f.npz", features=features, **QUICK))
    assert counts == given and kinds() == stored and list(arrays) == written
    assert len(names) == 7 and all(len(array) == 7 for array in arrays.values())


@pytest.mark.parametrize("features", [["cls"], ["mean", "cls"], "cls"])
def test_a_feature_that_is_not_given_is_known_by_one_image(photos, tmp_path, features):
    mine, counts = counted(both)
    with pytest.raises(UsageError, match="the model gives no feature 'cls'; it gives mean, patches"):
        mae.embed(mine, photos, out=tmp_path / "f.npz", features=features, **QUICK)
    assert counts == [1] and kinds() == [] and not (tmp_path / "f.npz").exists()


def test_a_broken_file_among_many_has_no_row(tmp_path, monkeypatch, capsys):
    """Its header is whole, so that nothing but reading it shows that it is broken; the set does not fit in memory."""
    monkeypatch.setattr("mae.evaluation.extractors.opened.load_images", partial(load_images, memory_limit=0))
    (tmp_path / "many").mkdir()
    for number in range(110):
        content = png(8, 8 + number % 3, seed=number)
        (tmp_path / "many" / f"{number:03}.png").write_bytes(content[: len(content) // 2] if number == 9 else content)
    mine, _ = counted(both)
    names, sizes, arrays = read(mae.embed(mine, tmp_path / "many", out=tmp_path / "f.npz", device="cpu"))
    told = " ".join(capsys.readouterr().out.split())
    assert "1 of 110 images cannot be read and have no row:" in told and "009.png" in told
    mae.embed(mine, tmp_path / "many", out=tmp_path / "again.csv", device="cpu")  # of features that are kept
    assert "1 of 110 images cannot be read" in capsys.readouterr().out
    left = [number for number in range(110) if number != 9]
    assert [Path(name).stem for name in names] == [f"{number:03}" for number in left]
    assert sizes[:, 1].tolist() == [8 + number % 3 for number in left] and len(arrays["mean"]) == 109


def test_one_name_may_come_as_plain_text(photos, model, tmp_path, drawn):
    _, _, arrays = read(mae.embed(model, photos, out=tmp_path / "f.npz", features="cls", **QUICK))
    assert list(arrays) == ["cls"]
    mae.neighbours(model, photos, out=tmp_path / "n.png", queries="sub/0.png", k=2, **QUICK)
    assert drawn[0]["query_names"] == ["sub/0.png"]


def test_what_cannot_be_embedded(photos, model, tmp_path):
    with pytest.raises(UsageError, match="no feature 'pooled'; it gives cls, mean, patches"):
        mae.embed(model, photos, out=tmp_path / "f.npz", features=["pooled"], **QUICK)
    with pytest.raises(UsageError, match=r"a .csv has no place for patches of many tokens"):
        mae.embed(model, photos, out=tmp_path / "f.csv", features=["patches"], **QUICK)
    for name in ("f.tsv", "photos"):
        with pytest.raises(UsageError, match="end its name with"):
            mae.embed(model, photos, out=tmp_path / name, **QUICK)
    (tmp_path / "f.npz").write_text("old")
    with pytest.raises(UsageError, match="exists and is not overwritten"):
        mae.embed("not even looked for", photos, out=tmp_path / "f.npz", **QUICK)
    with pytest.raises(UsageError, match="nowhere does not exist"):
        mae.embed(model, "nowhere", out=tmp_path / "g.npz", **QUICK)
    assert (tmp_path / "f.npz").read_text() == "old" and not (tmp_path / "g.npz").exists()


@pytest.fixture
def drawn(monkeypatch) -> list[dict]:
    """What the sheet is told."""
    calls: list[dict] = []

    def draw(queries, neighbours, similarities, **told):
        calls.append({"queries": queries, "neighbours": neighbours, "similarities": similarities, **told})

    monkeypatch.setattr(module, "draw_neighbours", draw)
    return calls


def test_the_image_itself_is_no_neighbour_but_its_copy_is(photos, model, tmp_path, drawn):
    mae.neighbours(model, photos, out=tmp_path / "n.png", queries=7, k=3, **QUICK)
    (told,) = drawn
    assert sorted(told["query_names"]) == NAMES
    for query, found, cosines in zip(told["query_names"], told["neighbour_names"], told["similarities"], strict=True):
        assert query not in found and len(set(found)) == 3
        assert cosines.tolist() == sorted(cosines.tolist(), reverse=True)
    nearest = {query: found[0] for query, found in zip(told["query_names"], told["neighbour_names"], strict=True)}
    assert (nearest["1.png"], nearest["sub/same.png"]) == ("sub/same.png", "1.png")
    assert told["similarities"].max() == pytest.approx(1)


def test_pictures_belong_to_their_names(photos, model, tmp_path, drawn):
    mae.neighbours(model, photos, out=tmp_path / "n.png", queries=["1.png"], k=2, **QUICK)
    (told,) = drawn
    assert torch.equal(told["queries"][0], told["neighbours"][0, 0])  # the copy
    assert told["neighbours"].shape == (1, 2, 3, 8, 8) and not torch.equal(told["queries"][0], told["neighbours"][0, 1])


def test_what_is_drawn_is_what_the_model_saw(photos, tmp_path, drawn):
    seen = []

    def encode(images):
        seen.extend(images)
        return both(images)

    unscaled = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    preprocessing = mae.Preprocessing(img_size=(8, 8), crop_share=None, interpolation="bilinear", **unscaled)
    mine = mae.Extractor(name="f", encode=encode, preprocessing=preprocessing, identity="one")
    mae.neighbours(mine, photos, out=tmp_path / "n.png", queries=7, k=2, **QUICK)
    for crop in drawn[0]["queries"]:
        assert any(torch.allclose(crop, image, atol=1e-6) for image in seen)


def test_fewer_neighbours_than_asked_for_are_told(photos, model, tmp_path, drawn, capsys):
    loud = {**QUICK, "quiet": False}
    for k in (6, 9):
        mae.neighbours(model, photos, out=tmp_path / f"{k}.png", queries=2, k=k, **loud)
        assert drawn.pop()["neighbours"].shape[:2] == (2, 6)
        assert ("7 images have only 6 neighbours each" in capsys.readouterr().out) == (k > 6)


def test_a_set_of_copies(model, tmp_path, drawn):
    (tmp_path / "photos").mkdir()
    for number in range(12):
        (tmp_path / "photos" / f"{number:02}.png").write_bytes(png(9, 9, seed=1))
    mae.neighbours(model, tmp_path / "photos", out=tmp_path / "n.png", queries=12, k=4, **QUICK)
    for query, found in zip(drawn[0]["query_names"], drawn[0]["neighbour_names"], strict=True):
        assert query not in found and len(set(found)) == 4


def test_more_neighbours_than_there_are(photos, model, tmp_path, drawn):
    mae.neighbours(model, photos, out=tmp_path / "n.png", queries=["3.png"], k=100, **QUICK)
    assert sorted(drawn[0]["neighbour_names"][0]) == sorted(set(NAMES) - {"3.png"})


def test_queries_by_the_end_of_a_name(photos, model, tmp_path, drawn):
    queries = ["sub/0.png", "turned.jpg", str(photos / "2.png")]
    mae.neighbours(model, photos, out=tmp_path / "n.png", queries=queries, **QUICK)
    assert drawn[0]["query_names"] == ["sub/0.png", "turned.jpg", "2.png"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"queries": ["0.png"]}, "'0.png': .* holds 2 images of that name; give the end"),
        ({"queries": ["7.png"]}, "holds no readable image of that name"),
        ({"queries": "7.png"}, "'7.png': .* holds no readable image of that name"),
        ({"queries": ["urned.jpg"]}, "holds no readable image of that name"),
        ({"queries": []}, "0 images to start from"),
        ({"queries": 0}, "0 images to start from"),
        ({"queries": -3}, "-3 images to start from"),
        ({"k": 0}, "0 neighbours of each; expected 1 or more"),
        ({"feature": "pooled"}, "no feature 'pooled'; it gives cls, mean"),
    ],
)
def test_what_cannot_be_drawn(photos, model, tmp_path, asked, message):
    with pytest.raises(UsageError, match=message):
        mae.neighbours(model, photos, out=tmp_path / "n.png", **asked, **QUICK)
    assert not (tmp_path / "n.png").exists()


def test_one_image_has_no_neighbour(model, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "a.png").write_bytes(png(9, 9))
    with pytest.raises(UsageError, match="neighbours need two or more"):
        mae.neighbours(model, tmp_path / "one", out=tmp_path / "n.png", **QUICK)


def test_the_sheet_is_drawn_and_the_draw_follows_the_seed(photos, model, tmp_path):
    first, second, other = (
        mae.neighbours(model, photos, out=tmp_path / f"{name}.png", queries=2, k=2, seed=seed, **QUICK).read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == second != other and first.startswith(b"\x89PNG")


@pytest.fixture
def probed(tmp_path: Path, photos: Path, model) -> Path:
    """The file of a model, with a pooled probe beside its other results."""
    for number in range(12):
        path = tmp_path / "labelled" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(9, 9, seed=number))
    mae.save(model, "model.safetensors")
    mae.evaluate("pooled_probe", "model.safetensors", data=tmp_path / "labelled", rates=(0.1,), epochs=5, **QUICK)
    return tmp_path / "runs" / "evaluate-model.safetensors" / "evaluation" / "pooled_probe.safetensors"


def test_where_a_learned_pooling_looks_is_drawn(probed, tmp_path, monkeypatch):
    assert probed.with_name("pooled_probe-pooling.png").read_bytes().startswith(b"\x89PNG")
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(pooling, "draw_heat", lambda *given, **named: drawn.update(named, given=given))
    labelled = tmp_path / "labelled"
    mae.evaluate("pooled_probe", "model.safetensors", data=labelled, rates=(0.1,), epochs=5, **QUICK)
    (pixels, weights), classifier = drawn["given"], mae.load(probed)
    assert len(weights) == len(drawn["notes"]) > 1
    shown = pixels * torch.tensor(drawn["std"])[:, None, None] + torch.tensor(drawn["mean"])[:, None, None]
    assert shown.min() >= 0 and shown.max() <= 1
    files = [labelled / note[0] for note in drawn["notes"]]
    with torch.no_grad():
        torch.testing.assert_close(pixels, classifier.preprocess(files))
        patches = classifier.encode(classifier.preprocess(files)).patches
    expected = torch.softmax(patches @ classifier.pooling.score, dim=1)
    torch.testing.assert_close(weights.flatten(1), expected, rtol=1e-4, atol=1e-6)


def test_a_learned_pooling_is_kept_for_use(probed, photos, tmp_path):
    classifier = mae.load(probed)
    _, _, arrays = read(mae.embed("model.safetensors", photos, out=tmp_path / "a.npz", pool="learned", **QUICK))
    assert list(arrays) == ["learned"] and classifier.pooling.score.abs().max() > 0.01
    files = [photos / name for name in NAMES]
    np.testing.assert_allclose(arrays["learned"], classifier.pool(files).numpy(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        patches = classifier.encode(classifier.preprocess(files)).patches.double()
    weights = torch.softmax(patches @ classifier.pooling.score.detach().double(), dim=1)
    expected = (weights[:, :, None] * patches).sum(dim=1)
    np.testing.assert_allclose(arrays["learned"], expected.numpy(), rtol=1e-4, atol=1e-5)
    for name, which, options in (
        ("b.npz", "model.safetensors", {"pool": probed}),
        ("c.npz", probed, {"pool": "learned"}),
        ("d.npz", probed, {}),
        ("e.npz", "model.safetensors", {"pool": "learned", "features": ("cls",)}),
    ):
        _, _, found = read(mae.embed(which, photos, out=tmp_path / name, **options, **QUICK))
        assert np.array_equal(found["learned"], arrays["learned"]), name
    assert list(found) == ["cls", "learned"]
    out = mae.neighbours("model.safetensors", photos, out=tmp_path / "n.csv", queries=1, feature="learned", **QUICK)
    assert len(out.read_text().splitlines()) == 7


def test_a_pooling_that_is_not_there_or_of_another_model_is_refused(probed, photos, model, tmp_path):
    asked = {"out": tmp_path / "x.npz", **QUICK}
    other = create_model("mae_vit_lesson_patch4", img_size=8, patch_size=2, mean=(0.5,) * 3, std=(0.3,) * 3)
    mae.save(other, "other.safetensors")
    how = "make one: mae evaluate pooled_probe other.safetensors --data LABELLED$"
    for pool, said in (
        ("learned", f"^there is no learned pooling in runs/evaluate-other.safetensors; {how}"),
        ("model.safetensors", f"^there is no learned pooling in model.safetensors; {how}"),
        (probed, f"was learned on an encoder with other weights than this one's; {how}"),
    ):
        with pytest.raises(UsageError, match=said):
            mae.embed("other.safetensors", photos, pool=pool, **asked)
    (probed.parent / "second.safetensors").write_bytes(probed.read_bytes())
    with pytest.raises(UsageError, match="holds 2 learned poolings; name one of .*pooled_probe.safetensors, .*second"):
        mae.embed("model.safetensors", photos, pool="learned", **asked)
    function = mae.Extractor(name="f", encode=lambda x: x.flatten(1), preprocessing=mae.Preprocessing(img_size=(8, 8)))
    with pytest.raises(UsageError, match="^f is no model of this package"):
        mae.embed(function, photos, pool="learned", **asked)
    with pytest.raises(UsageError, match="gives no feature 'learned'"):
        mae.neighbours(function, photos, feature="learned", out=tmp_path / "n.png", **QUICK)
    assert not (tmp_path / "x.npz").exists()
