"""Data sets of Hugging Face `datasets`: pixels, order, splits, classes, and what is refused."""

import contextlib
import itertools
import os
import shutil
import sys
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from data.packs import packed
from data.pictures import encoded, loaded, noise, png, probed
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from PIL import Image

from mae.data.dataset.images import load_images
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.loader import TrainingLoader
from mae.data.sources.huggingface import open_rows
from mae.data.sources.open import absolute_source, open_held_out, open_labelled, open_source
from mae.errors import MAEError, UsageError

IMAGE = datasets.Image()
LABELLED = Features({"image": IMAGE, "label": ClassLabel(names=["cat", "TV/monitor"])})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    monkeypatch.setenv("OPENMAE_CACHE", str(folder))
    datasets.disable_progress_bars()


def pictures(count: int, seed: int = 0) -> list[bytes]:
    return [png(10 + number % 3, 12, seed + number) for number in range(count)]


def labelled(count: int, seed: int = 0) -> Dataset:
    rows = {"image": [{"bytes": data, "path": None} for data in pictures(count, seed)]}
    return Dataset.from_dict({**rows, "label": [n // 3 % 2 for n in range(count)]}, features=LABELLED)


def saved(folder: Path, found: Dataset | DatasetDict) -> str:
    found.save_to_disk(str(folder))
    return f"hf:{folder}"


def loader(source, **changes) -> TrainingLoader:
    images = load_images(source, in_chans=3, memory_limit=0, max_unreadable=1.0)
    settings = dict(batch_size=4, accumulate=1, img_size=(8, 8), seed=1, workers=0)
    return TrainingLoader(images=images, **{**settings, **changes})


def taken(source: TrainingLoader, count: int, start_step: int = 0):
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def two_splits(tmp_path: Path) -> str:
    return saved(tmp_path / "saved", DatasetDict(train=labelled(12), test=labelled(7, 50)))


def test_pixels_and_order_are_those_of_datasets(tmp_path):
    images = [Image.fromarray(noise(9, 11, 3, n)) for n in range(4)]
    files = [
        encoded(images[0], "JPEG"),
        encoded(images[1]),
        encoded(images[2].convert("L")),
        encoded(images[3], "WEBP"),
    ]
    found = Dataset.from_dict(
        {"img": [{"bytes": data, "path": None} for data in files]}, features=Features({"img": IMAGE})
    )
    spec = saved(tmp_path / "saved", found.shuffle(seed=0))
    theirs = datasets.load_from_disk(str(tmp_path / "saved"))
    source = open_source(spec, data_root=tmp_path)
    assert len(source) == 4
    for index, row in enumerate(theirs):
        pixels = np.asarray(row["img"]).reshape(9, 11, -1)
        assert np.array_equal(loaded(source, index), pixels)
        assert probed(source, index).channels == pixels.shape[2]


def test_splits_are_parts_as_folders_are(tmp_path):
    spec = two_splits(tmp_path)
    train, test = (open_source(f"{spec}:{split}", data_root=tmp_path) for split in ("train", "test"))
    assert (len(train), len(test)) == (12, 7)
    source = open_source(spec, data_root=tmp_path)
    assert len(source) == 12 and source.note.startswith("train split, ")
    assert np.array_equal(loaded(source, 3), loaded(train, 3))
    assert source.item_name(3) == f"{spec}[train/3]" and train.item_name(3) == f"{spec}:train[3]"
    held_out = open_held_out(spec, data_root=tmp_path)
    assert len(held_out) == 7 and np.array_equal(loaded(held_out, 6), loaded(test, 6))


def test_classes_are_those_of_the_column(tmp_path):
    spec = two_splits(tmp_path)
    data = open_labelled(spec, data_root=tmp_path)
    assert data.class_names == ("TV/monitor", "cat")
    assert data.train.labels.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert (len(data.test.source), data.test.labels.tolist()) == (7, [1, 1, 1, 0, 0, 0, 1])
    one = open_labelled(f"{spec}:train", data_root=tmp_path)  # a fifth of each class is held out
    assert (len(one.train.source), len(one.test.source)) == (10, 2)
    two = open_labelled(f"{spec}:train", data_root=tmp_path, test=f"{spec}:test")
    assert torch.equal(two.test.labels, data.test.labels) and len(two.train.source) == 12


@pytest.mark.parametrize("names", [["a/b", "a_b"], ["train", "test"], ["a/b", "a/c"]])
def test_classes_are_kept_apart_whatever_their_names(tmp_path, names):
    rows = {"image": [{"bytes": data, "path": None} for data in pictures(6)], "label": [0, 1, 0, 1, 0, 1]}
    found = Dataset.from_dict(rows, features=Features({"image": IMAGE, "label": ClassLabel(names=names)}))
    spec = saved(tmp_path / "saved", DatasetDict(train=found, test=found))
    packed(tmp_path / "pack", spec)
    for each in (open_labelled(f"{spec}:train", data_root=tmp_path), open_labelled(spec, data_root=tmp_path)):
        assert each.class_names == tuple(sorted(names))
        assert set(each.train.labels.tolist()) == set(each.test.labels.tolist()) == {0, 1}
    again = open_labelled(str(tmp_path / "pack"), data_root=tmp_path)
    assert again.class_names == tuple(sorted(name.replace("/", "%2F") for name in names))
    assert sorted(again.train.labels.tolist()) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("names", [["train", "cat"], ["..", "dog"], ["test", "."]])
def test_a_pack_of_rows_without_splits_keeps_all_classes(tmp_path, names):
    rows = {"image": [{"bytes": data, "path": None} for data in pictures(12)], "label": [0, 1] * 6}
    spec = saved(
        tmp_path / "s", Dataset.from_dict(rows, features=Features({"image": IMAGE, "label": ClassLabel(names=names)}))
    )
    packed(tmp_path / "pack", spec)
    assert len(open_source(str(tmp_path / "pack"), data_root=tmp_path)) == 12
    found = open_labelled(str(tmp_path / "pack"), data_root=tmp_path)
    assert len(found.train.source) + len(found.test.source) == 12
    assert found.class_names == tuple(sorted({".": "%2E", "..": "%2E%2E"}.get(name, name) for name in names))


def test_rows_without_a_class_are_told(tmp_path):
    found = labelled(6)
    unknown = found.map(lambda row: {"label": -1}, features=found.features)
    spec = saved(tmp_path / "saved", DatasetDict(train=found, test=unknown))
    with pytest.raises(UsageError, match=r"\[test/0\] is in none; expected a ClassLabel column"):
        open_labelled(spec, data_root=tmp_path)
    assert len(open_source(f"{spec}:test", data_root=tmp_path)) == 6  # which needs no classes


def test_a_split_without_the_column_of_classes_is_told(tmp_path):
    spec = saved(tmp_path / "saved", DatasetDict(train=labelled(6), test=labelled(6).remove_columns("label")))
    with pytest.raises(UsageError, match=r"the column 'label' is not in every split; .* such as .*saved:train$"):
        open_labelled(spec, data_root=tmp_path)
    assert len(open_source(f"{spec}:test", data_root=tmp_path)) == 6


def test_a_class_without_a_name_is_refused(tmp_path):
    rows = {"image": [{"bytes": png(), "path": None}] * 3, "label": [0, 1, 2]}
    schema = labelled(1).features.arrow_schema
    table = pa.table({name: pa.array(values, schema.field(name).type) for name, values in rows.items()}, schema=schema)
    spec = saved(tmp_path / "saved", Dataset(table))
    with pytest.raises(UsageError, match="'label' holds a class number without a name; expected 0 to 1"):
        open_labelled(spec, data_root=tmp_path)


def test_the_column_of_images(tmp_path):
    data = [{"bytes": data, "path": None} for data in pictures(2)]
    raw = pictures(2, 9)
    two = Dataset.from_dict({"a": data, "b": data[::-1]}, features=Features({"a": IMAGE, "b": IMAGE}))
    named = Dataset.from_dict(
        {"x": raw[::-1], "png": raw}, features=Features({"x": Value("binary"), "png": Value("binary")})
    )
    unnamed = Dataset.from_dict({"x": raw}, features=Features({"x": Value("binary")}))
    words = Dataset.from_dict({"image": ["a.png"], "n": [1]})
    for name, found in (("two", two), ("named", named), ("unnamed", unnamed), ("words", words)):
        saved(tmp_path / name, found)
    two, named, unnamed, words = (f"hf:{tmp_path}/{name}" for name in ("two", "named", "unnamed", "words"))
    with pytest.raises(UsageError, match="two.* has several columns of images; name one: #a, #b"):
        open_rows(two)
    assert open_rows(f"{two}#b").read(0) == data[1]["bytes"]
    assert open_rows(named).read(1) == raw[1] and open_rows(f"{named}#x").read(1) == raw[0]
    with pytest.raises(UsageError, match="unnamed.* has no column of images; name one: #x"):
        open_rows(unnamed)
    assert len(open_rows(f"{unnamed}#x")) == 2
    with pytest.raises(UsageError, match="words.* has no column of images; no column holds images or bytes"):
        open_rows(words)
    with pytest.raises(UsageError, match="'n' is not a column of images"):
        open_rows(f"{words}#n")


def test_columns_of_plain_bytes_are_read(tmp_path):
    data = pictures(5)
    kinds = {
        "binary": pa.table({"img": pa.array(data, pa.binary())}),
        "large": pa.table({"img": pa.array(data, pa.large_binary())}),
        "struct": pa.table({"img": pa.array([{"bytes": each, "path": "x"} for each in data])}),
    }
    for name, table in kinds.items():
        source = open_rows(saved(tmp_path / name, Dataset(table)))
        assert [source.read(index) for index in range(5)] == data


def test_loading_resumes_at_any_step(tmp_path):
    spec = two_splits(tmp_path)
    whole = taken(loader(open_source(spec, data_root=tmp_path)), 8)
    assert sorted(torch.cat([batch.ids for batch in whole[:3]]).tolist()) == list(range(12))
    for start, workers, world in ((2, 0, 1), (4, 2, 1), (1, 0, 2)):
        source = open_source(spec, data_root=tmp_path)
        parts = [
            taken(loader(source, workers=workers, rank=rank, world=world), 8 - start, start) for rank in range(world)
        ]
        for number, expected in enumerate(whole[start:]):
            batches = [part[number] for part in parts]
            assert torch.equal(torch.cat([batch.ids for batch in batches]), expected.ids)
            assert torch.equal(torch.cat([batch.images for batch in batches]), expected.images)


def test_rows_of_nothing_or_of_no_image_are_unreadable(tmp_path):
    rows = [None, {"bytes": b"no image", "path": None}, {"bytes": b"", "path": None},
            {"bytes": png(), "path": None}]  # fmt: skip
    features = Features({"image": IMAGE})
    found = Dataset(
        pa.table({"image": pa.array(rows, features.arrow_schema.field("image").type)}, features.arrow_schema)
    )
    source = open_rows(saved(tmp_path / "saved", found))
    for index, why in enumerate(("holds no image", "starts with", "is empty")):
        with pytest.raises(UnreadableImage, match=rf"\[{index}\] {why}"):
            loaded(source, index)
    assert loaded(source, 3).shape == (12, 10, 3)


def test_paths_lead_nowhere_but_into_the_folder(tmp_path):
    names = ["inside.png", str(tmp_path / "set" / "inside.png"), "../out.png", str(tmp_path / "out.png"), "link.png",
             "nothing.png", "pipe.png", "x\0.png", "/etc/passwd"]  # fmt: skip
    type_ = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array([{"bytes": None, "path": name} for name in names], type_)})
    features = Features({"image": IMAGE})
    found = Dataset(table.cast(features.arrow_schema))
    empty = Dataset.from_dict({"image": [None] * len(names)}, features=features)
    spec = saved(tmp_path / "set", empty)
    with pa.OSFile(str(next((tmp_path / "set").glob("*.arrow"))), "wb") as sink:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(found.data.table)
    (tmp_path / "out.png").write_bytes(png())
    (tmp_path / "set" / "inside.png").write_bytes(png())
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "out.png")
    os.mkfifo(tmp_path / "set" / "pipe.png")
    source = open_rows(spec)
    assert loaded(source, 0).shape == loaded(source, 1).shape == (12, 10, 3)
    for index in (2, 3, 4, 8):
        with pytest.raises(UnreadableImage, match=rf"\[{index}\] names the file .* outside the data set"):
            loaded(source, index)
    for index in (5, 6, 7):
        with pytest.raises(UnreadableImage, match=rf"\[{index}\] names .*(not a file|cannot be read)"):
            loaded(source, index)


def test_the_package_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    spec = two_splits(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'openmae\[datasets\]'"):
        open_source(spec, data_root=tmp_path)


def test_without_a_network_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for spec in ("hf:nobody/nothing", "hf:nobody/nothing@v1:train"):
        with pytest.raises(MAEError, match="cannot be downloaded from the Hugging Face hub: .*") as told:
            open_source(spec, data_root=tmp_path)
        assert "\n" not in str(told.value) and not isinstance(told.value, UsageError)
    for spec in ("hf:/no/folder", "hf:", "hf:a/b/c", "hf:../nothing", "hf:a b"):
        with pytest.raises(UsageError, match="is neither an existing folder nor a name"):
            open_source(spec, data_root=tmp_path)


def test_splits_that_are_not_there(tmp_path):
    parts = DatasetDict({"fold1": labelled(3), "fold2": labelled(4)})
    spec = saved(tmp_path / "saved", parts)
    with pytest.raises(UsageError, match="there is no split 'train'; expected one of fold1, fold2"):
        open_rows(f"{spec}:train")
    with pytest.raises(UsageError, match="has the splits fold1, fold2, and none is train; name one, such as .*:fold1"):
        open_rows(spec)
    assert len(open_rows(f"{spec}:fold2#image")) == 4
    more = saved(tmp_path / "more", DatasetDict({**parts, "train": labelled(5)}))
    assert open_rows(more).note.endswith("left out: fold1, fold2") and len(open_rows(more)) == 5


def test_downloads_ask_for_the_revision_and_never_for_code(tmp_path, monkeypatch):
    asked = []
    found = DatasetDict(train=labelled(4), validation=labelled(3))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **named: asked.append((args, named)) or found)
    source = open_source("hf:some/set@abc", data_root=tmp_path)
    assert asked == [(("some/set",), {"revision": "abc"})] and len(source) == 4
    assert len(open_rows("hf:some/set:validation")) == 3


def test_a_damaged_saved_set_is_read_or_refused(tmp_path):
    spec = saved(tmp_path / "set", labelled(6))
    path = next((tmp_path / "set").glob("*.arrow"))
    good, kept = path.read_bytes(), tmp_path / "kept"
    shutil.copytree(tmp_path / "set", kept)
    for cut in (0, 7, 100, len(good) // 2):
        path.write_bytes(good[:cut])
        with contextlib.suppress(UsageError):
            for index in range(6):
                loaded(open_rows(spec), index)
    for name in ("state.json", "dataset_info.json"):
        shutil.rmtree(tmp_path / "set")
        shutil.copytree(kept, tmp_path / "set")
        (tmp_path / "set" / name).write_text('{"_data_files": 5, "features": 7}')
        with pytest.raises(UsageError, match="cannot be read"):
            open_rows(spec)


def test_a_name_means_the_same_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for spec in ("hf:here", "hf:here:train", "hf:here:train#image", "hf:here#image"):
        form, rest = spec.split(":", 1)
        assert absolute_source(spec) == f"{form}:{tmp_path}/{rest}"
        assert absolute_source(absolute_source(spec)) == absolute_source(spec)
    for spec in ("hf:owner/name@v1:train#image", "hf:name", "https://host/pack", "cifar10", ""):
        assert absolute_source(spec) == spec
    assert absolute_source("set/{0..3}.tar") == f"{tmp_path}/set/{{0..3}}.tar"
