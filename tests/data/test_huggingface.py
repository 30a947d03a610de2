"""Sets of Hugging Face `datasets`: their pixels, rows in their order, and Parquet a row group at a time."""

import contextlib
import importlib
import itertools
import json
import os
import shutil
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pictures import encoded, noise, png
from PIL import Image

from mae.data import parquet
from mae.data.huggingface import open_rows
from mae.data.images import load_images
from mae.data.limits import UnreadableImage
from mae.data.loaders import TrainingLoader
from mae.data.sources import absolute_source, open_held_out, open_labelled, open_source
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


def parquet_file(path: Path, found: Dataset, rows: int = 4) -> Path:
    """With so many rows a group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = found.with_format("arrow")[:]
    pq.write_table(table.cast(found.features.arrow_schema), path, row_group_size=rows)
    return path


def plain_parquet(path: Path, images: list[bytes | None], name: str = "image", **options) -> Path:
    """As others write it, without the types of `datasets`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({name: pa.array(images, pa.binary())}), path, **options)
    return path


def loader(source, **changes) -> TrainingLoader:
    images = load_images(source, in_chans=3, memory_limit=0, max_unreadable=1.0)
    settings = dict(batch_size=4, accumulate=1, img_size=(8, 8), seed=1, workers=0)
    return TrainingLoader(images=images, **{**settings, **changes})


def taken(source: TrainingLoader, count: int, start_step: int = 0):
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def both(tmp_path: Path) -> list[str]:
    """The same two splits, saved and as Parquet."""
    parts = {"train": labelled(12), "test": labelled(7, 50)}
    for name, part in parts.items():
        parquet_file(tmp_path / "parquet" / f"{name}-00000-of-00001.parquet", part)
    return [saved(tmp_path / "saved", DatasetDict(parts)), f"hf-stream:{tmp_path}/parquet"]


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
    parquet_file(tmp_path / "parquet" / "x.parquet", theirs, rows=3)
    for source in (
        open_source(spec, data_root=tmp_path),
        open_source(f"hf-stream:{tmp_path}/parquet", data_root=tmp_path),
    ):
        assert len(source) == 4
        for index, row in enumerate(theirs):
            pixels = np.asarray(row["img"]).reshape(9, 11, -1)
            assert np.array_equal(source.load(index), pixels)
            assert source.probe(index).channels == pixels.shape[2]


def test_splits_are_parts_as_folders_are(tmp_path):
    for spec in both(tmp_path):
        train, test = (open_source(f"{spec}:{split}", data_root=tmp_path) for split in ("train", "test"))
        assert (len(train), len(test)) == (12, 7)
        source = open_source(spec, data_root=tmp_path)
        assert len(source) == 12 and source.note.startswith("train split, ")
        assert np.array_equal(source.load(3), train.load(3))
        assert source.item_name(3) == f"{spec}[train/3]" and train.item_name(3) == f"{spec}:train[3]"
        held_out = open_held_out(spec, data_root=tmp_path)
        assert len(held_out) == 7 and np.array_equal(held_out.load(6), test.load(6))


def test_classes_are_those_of_the_column(tmp_path):
    for spec in both(tmp_path):
        data = open_labelled(spec, data_root=tmp_path)
        assert data.class_names == ("TV_monitor", "cat")
        assert data.train.labels.tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0]
        assert (len(data.test.source), data.test.labels.tolist()) == (7, [1, 1, 1, 0, 0, 0, 1])
        one = open_labelled(f"{spec}:train", data_root=tmp_path)  # a fifth of each class is held out
        assert (len(one.train.source), len(one.test.source)) == (10, 2)
        two = open_labelled(f"{spec}:train", data_root=tmp_path, test=f"{spec}:test")
        assert torch.equal(two.test.labels, data.test.labels) and len(two.train.source) == 12


def test_rows_without_a_class_are_told(tmp_path):
    found = labelled(6)
    unknown = found.map(lambda row: {"label": -1}, features=found.features)
    specs = [saved(tmp_path / "saved", DatasetDict(train=found, test=unknown))]
    for name, part in (("train", found), ("test", unknown)):
        parquet_file(tmp_path / "parquet" / f"{name}.parquet", part)
    for spec in [*specs, f"hf-stream:{tmp_path}/parquet"]:
        with pytest.raises(UsageError, match=r"\[test/0\] lies in none; expected a ClassLabel column"):
            open_labelled(spec, data_root=tmp_path)
        assert len(open_source(f"{spec}:test", data_root=tmp_path)) == 6  # which needs no classes


def test_a_class_without_a_name_is_refused(tmp_path):
    rows = {"image": [{"bytes": png(), "path": None}] * 3, "label": [0, 1, 2]}
    schema = labelled(1).features.arrow_schema
    table = pa.table({name: pa.array(values, schema.field(name).type) for name, values in rows.items()}, schema=schema)
    (tmp_path / "parquet").mkdir()
    pq.write_table(table, tmp_path / "parquet" / "x.parquet")
    with pytest.raises(UsageError, match="'label' holds a class that it has no name for; expected 0 to 1"):
        open_labelled(f"hf-stream:{tmp_path}/parquet", data_root=tmp_path)


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
        parquet_file(tmp_path / f"{name}-parquet" / "x.parquet", found)
    for form in ("hf:{}/{}", "hf-stream:{}/{}-parquet"):
        two, named, unnamed, words = (form.format(tmp_path, name) for name in ("two", "named", "unnamed", "words"))
        with pytest.raises(UsageError, match="two.* has several columns of images; name one: #a, #b"):
            open_rows(two)
        assert open_rows(f"{two}#b").read(0) == data[1]["bytes"]
        assert open_rows(named).read(1) == raw[1] and open_rows(f"{named}#x").read(1) == raw[0]
        with pytest.raises(UsageError, match="unnamed.* has no column of images; name one: #x"):
            open_rows(unnamed)
        assert len(open_rows(f"{unnamed}#x")) == 2
        with pytest.raises(UsageError, match="words.* has no column of images; no column holds images or bytes"):
            open_rows(words)
        with pytest.raises(UsageError, match="'n' is no column of images"):
            open_rows(f"{words}#n")


def test_what_others_wrote_as_parquet_is_read(tmp_path):
    data = pictures(5)
    kinds = {
        "binary": pa.table({"img": pa.array(data, pa.binary())}),
        "large": pa.table({"img": pa.array(data, pa.large_binary())}),
        "struct": pa.table({"img": pa.array([{"bytes": each, "path": "x"} for each in data])}),
    }
    for name, table in kinds.items():
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "x.parquet", row_group_size=2, compression="zstd")
        source = open_rows(f"hf-stream:{tmp_path}/{name}")
        assert [source.read(index) for index in range(5)] == data and source.block_sizes.tolist() == [2, 2, 1]


def test_row_groups_are_blocks(tmp_path):
    parquet_file(tmp_path / "set" / "train-00000.parquet", labelled(10))
    parquet_file(tmp_path / "set" / "train-00001.parquet", labelled(5, 20), rows=3)
    source = open_source(f"hf-stream:{tmp_path}/set", data_root=tmp_path)
    assert source.block_sizes.tolist() == [4, 4, 2, 3, 2]
    assert "streamed, 5 row groups, 15 rows, images in image" in source.note
    assert [source.read(index) for index in range(15)] == [*pictures(10), *pictures(5, 20)]
    some = source.take(np.array([0, 3, 4, 9, 14]), "some")
    assert some.block_sizes.tolist() == [2, 1, 1, 1] and some.read(4) == pictures(5, 20)[4] and some.note == "some"
    assert len({source.fingerprint(), some.fingerprint(), source.version(), some.version()}) == 4


@pytest.mark.parametrize("which", [0, 1])
def test_a_run_goes_on_where_it_was(tmp_path, which):
    spec = both(tmp_path)[which]
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


def counted(monkeypatch) -> list[int]:
    """Numbers of the row groups that are fetched from now on."""
    fetched: list[int] = []
    fetch = parquet.ParquetRows._fetched

    def noted(self, number: int) -> bytes:
        fetched.append(number)
        return fetch(self, number)

    monkeypatch.setattr(parquet.ParquetRows, "_fetched", noted)
    return fetched


def test_a_row_group_is_fetched_once_for_all_processes_and_starts(tmp_path, monkeypatch):
    spec = both(tmp_path)[1]
    fetched = counted(monkeypatch)
    for _ in range(2):
        source = open_source(spec, data_root=tmp_path)
        for index in (5, 4, 7, 5, 0):
            source.read(index)
    assert fetched == [1, 0]
    cache = Path(os.environ["OPENMAE_CACHE"])
    for path in cache.iterdir():
        if path.is_file():
            path.unlink()  # as the cache does where it needs room
    assert open_source(spec, data_root=tmp_path).read(5) == pictures(12)[5] and fetched == [1, 0, 1]
    for path in (cache / "row-groups").glob("*.json"):
        path.write_text(json.dumps({"num_bytes": "?"}))
    assert open_source(spec, data_root=tmp_path).read(5) == pictures(12)[5] and fetched == [1, 0, 1, 1]


def test_what_is_kept_is_known_by_its_content(tmp_path):
    """A changed file is another one; one that changes under a run stops it."""
    path = plain_parquet(tmp_path / "set" / "x.parquet", pictures(6))
    before = open_rows(f"hf-stream:{tmp_path}/set")
    assert before.read(0) == pictures(6)[0]
    plain_parquet(path, pictures(6, 30))
    os.utime(path, ns=(0, 5))
    after = open_rows(f"hf-stream:{tmp_path}/set")
    assert after.read(0) == pictures(6, 30)[0] and after.version() != before.version()
    for kept in Path(os.environ["OPENMAE_CACHE"]).iterdir():
        if kept.is_file():
            kept.unlink()
    parquet._footer.cache_clear()
    with pytest.raises(MAEError, match="row group 0 was changed since it was first read"):
        before.read(0)


def test_rows_of_nothing_or_of_no_image_are_unreadable(tmp_path):
    rows = [None, {"bytes": b"no image", "path": None}, {"bytes": b"", "path": None},
            {"bytes": png(), "path": None}]  # fmt: skip
    features = Features({"image": IMAGE})
    found = Dataset(
        pa.table({"image": pa.array(rows, features.arrow_schema.field("image").type)}, features.arrow_schema)
    )
    parquet_file(tmp_path / "parquet" / "x.parquet", found)
    for spec in (saved(tmp_path / "saved", found), f"hf-stream:{tmp_path}/parquet"):
        source = open_rows(spec)
        for index, why in enumerate(("holds no image", "starts with", "is empty")):
            with pytest.raises(UnreadableImage, match=rf"\[{index}\] {why}"):
                source.load(index)
        assert source.load(3).shape == (12, 10, 3)


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
    assert source.load(0).shape == source.load(1).shape == (12, 10, 3)
    for index in (2, 3, 4, 8):
        with pytest.raises(UnreadableImage, match=rf"\[{index}\] names the file .* outside of the data set"):
            source.load(index)
    for index in (5, 6, 7):
        with pytest.raises(UnreadableImage, match=rf"\[{index}\] names .*(no file|cannot be read)"):
            source.load(index)
    parquet_file(tmp_path / "parquet" / "x.parquet", found)
    with pytest.raises(UnreadableImage, match=r"\[0\] holds no image"):
        open_rows(f"hf-stream:{tmp_path}/parquet").load(0)


def test_the_package_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    specs = both(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for spec in specs:
        with pytest.raises(UsageError, match=r"pip install 'openmae\[datasets\]'"):
            open_source(spec, data_root=tmp_path)


def test_without_a_network_one_line_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    for spec in ("hf:nobody/nothing", "hf-stream:nobody/nothing@v1:train"):
        with pytest.raises(MAEError, match="cannot be had from the Hugging Face hub: .*") as told:
            open_source(spec, data_root=tmp_path)
        assert "\n" not in str(told.value) and not isinstance(told.value, UsageError)
    for spec in ("hf:/no/folder", "hf:", "hf:a/b/c", "hf-stream:../nothing", "hf:a b"):
        with pytest.raises(UsageError, match="is neither a folder that is there nor a name"):
            open_source(spec, data_root=tmp_path)


def test_splits_that_are_not_there(tmp_path):
    parts = DatasetDict({"fold1": labelled(3), "fold2": labelled(4)})
    spec = saved(tmp_path / "saved", parts)
    with pytest.raises(UsageError, match="there is no split 'train'; there are fold1, fold2"):
        open_rows(f"{spec}:train")
    with pytest.raises(UsageError, match="has the splits fold1, fold2, and none is train; name one, as in .*:fold1"):
        open_rows(spec)
    assert len(open_rows(f"{spec}:fold2#image")) == 4
    more = saved(tmp_path / "more", DatasetDict({**parts, "train": labelled(5)}))
    assert open_rows(more).note.endswith("left out: fold1, fold2") and len(open_rows(more)) == 5


def test_what_is_no_parquet_set_says_what_to_do(tmp_path):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(png())
    with pytest.raises(UsageError, match="not stored as Parquet but as imagefolder.*; download it: hf:"):
        open_rows(f"hf-stream:{tmp_path}/pictures")
    (tmp_path / "empty").mkdir()
    for form in ("hf", "hf-stream"):
        with pytest.raises(UsageError, match=r"empty cannot be read: \w+"):
            open_rows(f"{form}:{tmp_path}/empty")


def test_a_description_may_not_name_files_elsewhere(tmp_path):
    plain_parquet(tmp_path / "elsewhere" / "x.parquet", pictures(2))
    plain_parquet(tmp_path / "set" / "y.parquet", pictures(2))
    text = f"---\nconfigs:\n- config_name: default\n  data_files: {tmp_path}/elsewhere/x.parquet\n---\n"
    (tmp_path / "set" / "README.md").write_text(text)
    with pytest.raises(UsageError, match="x.parquet outside of itself"):
        open_rows(f"hf-stream:{tmp_path}/set")


def test_the_hub_is_read_by_its_own_file_system(tmp_path, monkeypatch):
    """The same files behind the hub's URLs: only the parts that are needed are asked for."""
    plain_parquet(tmp_path / "a.parquet", [bytes(2000)] + pictures(39), row_group_size=10)
    size = (tmp_path / "a.parquet").stat().st_size
    places, parts = [], []

    class Hub:
        def open(self, place, mode, cache_type):
            assert (mode, cache_type) == ("rb", "none")
            places.append(place)
            return Noted(tmp_path / "a.parquet")

    class Noted:
        def __init__(self, path):
            self.file, self.closed = path.open("rb"), False

        def read(self, length=-1):
            data = self.file.read(length)
            parts.append(len(data))
            return data

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    url = "hf://datasets/some/set@0123abc/a.parquet"
    builder = SimpleNamespace(name="parquet", config=SimpleNamespace(data_files={"train": [url]}))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *args, **named: asked.append((args, named)) or builder)
    monkeypatch.setattr("huggingface_hub.HfFileSystem", Hub)
    monkeypatch.setattr(parquet, "_TAIL", 100)
    source = open_source("hf-stream:some/set@v2", data_root=tmp_path)
    assert asked == [(("some/set",), {"revision": "v2"})]
    assert len(source) == 40 and source.block_sizes.tolist() == [10] * 4 and set(places) == {url}
    assert source.read(25) == pictures(39)[24]
    assert sum(parts) < size * 0.75  # of four row groups one
    monkeypatch.setattr(Hub, "open", lambda *args, **named: (_ for _ in ()).throw(ConnectionError("no route to host")))
    with pytest.raises(MAEError, match="row group 3 cannot be read: no route to host") as told:
        source.load(35)
    assert not isinstance(told.value, UnreadableImage)  # which would count as a damaged image
    assert source.read(25) == pictures(39)[24]  # kept
    builder.config.data_files = {"train": ["https://elsewhere/x.parquet"]}
    with pytest.raises(UsageError, match="outside of itself"):
        open_rows("hf-stream:some/set")


def test_downloads_ask_for_the_revision_and_never_for_code(tmp_path, monkeypatch):
    asked = []
    found = DatasetDict(train=labelled(4), validation=labelled(3))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **named: asked.append((args, named)) or found)
    source = open_source("hf:some/set@abc", data_root=tmp_path)
    assert asked == [(("some/set",), {"revision": "abc"})] and len(source) == 4
    assert len(open_rows("hf:some/set:validation")) == 3


def hostile(folder: Path, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "x.parquet").write_bytes(data)
    parquet._footer.cache_clear()
    rows, counts = parquet.open_parquet([[str(folder / "x.parquet")]], lambda schema: ("image", None, ()), name="x")
    assert counts == [len(rows)] and len(rows) <= len(data)
    for row in range(min(len(rows), 50)):
        with contextlib.suppress(UnreadableImage):
            rows.cell(row)


def test_a_bomb_of_one_image_again_and_again_stays_small(tmp_path, monkeypatch):
    """A dictionary holds it once and names it a thousand times."""
    monkeypatch.setattr(parquet, "MAX_GROUP", 40 << 20)
    one = pa.array([bytes(1 << 20)], pa.binary())
    table = pa.table({"image": pa.DictionaryArray.from_arrays(pa.array(np.zeros(3000, np.int32)), one)})
    (tmp_path / "set").mkdir()
    pq.write_table(table, tmp_path / "set" / "x.parquet", compression="none", store_schema=False)
    assert (tmp_path / "set" / "x.parquet").stat().st_size < 2 << 20
    parquet._footer.cache_clear()
    source = open_rows(f"hf-stream:{tmp_path}/set")
    assert len(source) == 3000
    before = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    with pytest.raises(UnreadableImage, match=r"\[7\]: .*row group 0 holds more than it claims"):
        source.load(7)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert pa.default_memory_pool().max_memory() - before < 64 << 20


def test_what_a_footer_claims_is_compared_with_the_file(tmp_path, monkeypatch):
    path = plain_parquet(tmp_path / "set" / "x.parquet", pictures(6))
    good = path.read_bytes()
    for data, why in (
        (good[:-1], "not a whole Parquet file"),
        (good[: len(good) // 2], "not a whole Parquet file"),
        (good[:-8] + (1 << 30).to_bytes(4, "little") + b"PAR1", "not a whole Parquet file"),
        (good[:-8] + (40).to_bytes(4, "little") + b"PAR1", "cannot be read as Parquet"),
        (b"PAR1", "not a whole Parquet file"),
        (b"", "not a whole Parquet file"),
        (b"PAR1" + good[-8 - int.from_bytes(good[-8:-4], "little") :], "claims .* bytes of images, more than it has"),
    ):
        with pytest.raises(UsageError, match=why):
            hostile(tmp_path / "set", data)
    plain_parquet(path, [None] * 100_000)
    with pytest.raises(UsageError, match="row group 0 claims 100,000 images, which it cannot hold"):
        hostile(tmp_path / "set", path.read_bytes())
    monkeypatch.setattr(parquet, "MAX_GROUP", 1 << 20)
    plain_parquet(path, [bytes(2 << 20)], compression="zstd", use_dictionary=False)
    with pytest.raises(UsageError, match="row group 0 has 2 MiB of images; expected 1 at most: download"):
        hostile(tmp_path / "set", path.read_bytes())
    plain_parquet(path, pictures(2))
    plain_parquet(tmp_path / "set" / "y.parquet", pictures(2), name="other")
    with pytest.raises(UsageError, match="y.parquet has no column 'image' of images, as the first file has"):
        open_rows(f"hf-stream:{tmp_path}/set")
    plain_parquet(path, [])
    (tmp_path / "set" / "y.parquet").unlink()
    with pytest.raises(UsageError, match="has no rows"):
        hostile(tmp_path / "set", path.read_bytes())


def test_checksums_are_compared_where_a_file_has_them(tmp_path):
    data = pictures(6)
    for checksums, found in ((True, 0), (False, 6)):
        path = plain_parquet(tmp_path / "set" / "x.parquet", data, write_page_checksum=checksums, compression="none")
        raw = bytearray(path.read_bytes())
        raw[raw.index(data[2]) + 200] ^= 1
        path.write_bytes(raw)
        parquet._footer.cache_clear()
        source, readable = open_rows(f"hf-stream:{tmp_path}/set"), 0
        for index in range(6):
            with contextlib.suppress(UnreadableImage):
                readable += len(source.read(index)) > 0
        assert readable == found


def test_a_damaged_saved_set_is_read_or_refused(tmp_path):
    spec = saved(tmp_path / "set", labelled(6))
    path = next((tmp_path / "set").glob("*.arrow"))
    good, kept = path.read_bytes(), tmp_path / "kept"
    shutil.copytree(tmp_path / "set", kept)
    for cut in (0, 7, 100, len(good) // 2):
        path.write_bytes(good[:cut])
        with contextlib.suppress(UsageError):
            for index in range(6):
                open_rows(spec).load(index)
    for name in ("state.json", "dataset_info.json"):
        shutil.rmtree(tmp_path / "set")
        shutil.copytree(kept, tmp_path / "set")
        (tmp_path / "set" / name).write_text('{"_data_files": 5, "features": 7}')
        with pytest.raises(UsageError, match="cannot be read"):
            open_rows(spec)


SHARE = st.integers(0, (1 << 16) - 1)


@settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(done=st.lists(st.tuples(st.integers(0, 5), SHARE, SHARE), min_size=1, max_size=3), footer=st.booleans())
def test_damaged_parquet_is_read_or_refused(tmp_path, done, footer):
    mutated = importlib.import_module("hostile.mutations").mutated
    good = plain_parquet(tmp_path / "good.parquet", pictures(6), row_group_size=3, compression="zstd").read_bytes()
    length = int.from_bytes(good[-8:-4], "little")
    if footer:  # most of what is believed stands there
        changed = mutated(good[-8 - length : -8], good, done)
        data = good[: -8 - length] + changed + len(changed).to_bytes(4, "little") + b"PAR1"
    else:
        data = mutated(good[: -8 - length], good, done) + good[-8 - length :]
    with contextlib.suppress(MAEError):
        hostile(tmp_path / "set", data)


def test_a_name_means_the_same_from_every_folder(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    for spec in ("hf:here", "hf:here:train", "hf-stream:here:train#image", "hf:here#image"):
        form, rest = spec.split(":", 1)
        assert absolute_source(spec) == f"{form}:{tmp_path}/{rest}"
        assert absolute_source(absolute_source(spec)) == absolute_source(spec)
    for spec in ("hf:owner/name@v1:train#image", "hf-stream:name", "https://host/pack", "cifar10", ""):
        assert absolute_source(spec) == spec
    assert absolute_source("set/{0..3}.tar") == f"{tmp_path}/set/{{0..3}}.tar"
