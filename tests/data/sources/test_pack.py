"""Reading packs: as the folder they were made of; damage is found, and what was made to do harm does none."""

import contextlib
import io
import json
import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from data.packs import as_npy, changed, contents, jpeg, manifest, packed, replaced, some_images
from data.pictures import loaded, png, probed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mae.data.dataset.images import load_images
from mae.data.decode.limits import MAX_BYTES, UnreadableImage
from mae.data.loading.loader import TrainingLoader
from mae.data.packs.encodings import Kept, Raw
from mae.data.packs.verify import verify_pack
from mae.data.remote import storage
from mae.data.remote.storage import MAX_MANIFEST, LocalStorage, Storage, StoredFile
from mae.data.sources.open import open_held_out, open_labelled, open_source
from mae.data.sources.pack import PackSource, open_pack
from mae.data.sources.pack_format import INDEX
from mae.errors import MAEError, UsageError


def opened(folder: Path) -> PackSource:
    return open_pack(LocalStorage(root=folder), "pack")


def faults(folder: Path) -> list[str]:
    return list(verify_pack(LocalStorage(root=folder)))


@pytest.fixture
def folder(tree, tmp_path: Path) -> Path:
    """A pack of ten files in four shards."""
    packed(tmp_path / "pack", tree(some_images()), form=Kept())
    return tmp_path / "pack"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A pack that no test changes, of four images in one shard."""
    root = tmp_path_factory.mktemp("made")
    for name, data in some_images(4).items():
        (root / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "photos" / name).write_bytes(data)
    packed(root / "pack", root / "photos", form=Kept(), per_shard=100)
    return root / "pack"


def test_every_image_is_as_in_its_folder(folder, tmp_path):
    source, plain = opened(folder), open_source(str(tmp_path / "tree"), data_root=tmp_path)
    assert sorted(source.names) == sorted(plain.names) and list(source.names) != sorted(source.names)
    places = {name: index for index, name in enumerate(plain.names)}
    for index, name in enumerate(source.names):
        assert (loaded(source, index) == loaded(plain, places[name])).all()
        assert probed(source, index) == probed(plain, places[name])
        assert source.item_name(index) == f"{folder}/{name}"
    assert source.note == "pack, 10 images in 4 shards"
    assert source.block_sizes.tolist() == [3, 3, 3, 1]


def test_the_parts_of_a_pack_keep_their_blocks(folder):
    source = opened(folder)
    some = source.take(np.array([1, 2, 6, 7, 8, 9]), "some")
    assert some.block_sizes.tolist() == [2, 3, 1] and some.note == "some"
    assert [some.item_name(index) for index in range(6)] == [source.item_name(n) for n in (1, 2, 6, 7, 8, 9)]
    assert (loaded(some, 2) == loaded(source, 6)).all()
    assert source.take(np.array([9, 0, 1, 3, 2]), "mixed").block_sizes.tolist() == [1, 2, 1, 1]
    assert len({source.fingerprint(), some.fingerprint()}) == 2
    assert source.take(np.arange(0), "none").block_sizes.tolist() == []


class Far(LocalStorage):
    """A folder that notes what is asked to be near."""

    def prefetch(self, files):
        self.__dict__.setdefault("asked", []).append([file.name for file in files])


def test_blocks_are_their_tars_where_some_shards_have_no_image_left(folder):
    storage = Far(root=folder)
    source = open_pack(storage, "a pack")
    kept = np.flatnonzero(source.shards != 1)  # none of the second shard
    part = source.take(kept, "part")
    assert part.block_sizes.tolist() == [3, 3, 1]
    part.prefetch([2, 1], then=[0])
    assert storage.__dict__["asked"] == [["shard-000003.tar", "shard-000002.tar", "shard-000000.tar"]]
    (folder / "shard-000002.tar").unlink()
    with pytest.raises(MAEError, match="shard-000002.tar"):
        part.prefetch([1], then=[])


def test_probing_reads_no_tar(folder):
    source = opened(folder)
    for tar in folder.glob("*.tar"):
        tar.unlink()
    assert (probed(source, 0).height, probed(source, 0).width) == (12, 10)
    with pytest.raises(MAEError, match="shard-000000.tar cannot be read: No such file") as error:
        loaded(source, 0)
    assert not isinstance(error.value, UnreadableImage)


def test_version_changes_with_a_file_and_fingerprint_with_names_and_sizes(folder, tmp_path):
    before = opened(folder)
    assert (before.fingerprint(), before.version()) == (opened(folder).fingerprint(), opened(folder).version())
    shutil.copytree(folder, tmp_path / "copy")
    assert opened(tmp_path / "copy").fingerprint() == before.fingerprint()
    version = before.version()
    os.utime(folder / "shard-000001.tar", ns=(1, 1))
    assert opened(folder).version() != version and opened(folder).fingerprint() == before.fingerprint()


def test_a_pack_trains_like_any_source(folder):
    images = load_images(opened(folder), in_chans=None, memory_limit=0)
    assert not images.in_memory and (len(images), images.channels) == (10, 3)
    loader = TrainingLoader(images=images, batch_size=10, accumulate=1, img_size=(8, 8), seed=0, workers=0)
    batches = loader.iterate(0)
    batch = next(batches)
    batches.close()
    assert sorted(batch.ids.tolist()) == list(range(10)) and batch.images.shape == (10, 3, 8, 8)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("sides", [(32, 32), (40, 48)])
def test_small_raw_images_train_alike_from_memory_and_from_files(tree, tmp_path, workers, sides):
    packed(tmp_path / "pack", tree({f"{number:02}.png": png(*sides, seed=number) for number in range(20)}),
           form=Raw(side=min(sides)), per_shard=6)  # fmt: skip
    sets = [load_images(opened(tmp_path / "pack"), in_chans=None, memory_limit=limit) for limit in (None, 0)]
    assert [images.in_memory for images in sets] == [True, False]
    how = dict(batch_size=8, accumulate=2, img_size=(32, 24), seed=3, workers=workers, views=2)
    with contextlib.ExitStack() as stack:
        loaders = [TrainingLoader(images=images, **how) for images in sets]
        memory, files = (stack.enter_context(contextlib.closing(loader.iterate(3))) for loader in loaders)
        for _ in range(6):
            here, there = next(memory), next(files)
            assert all(torch.equal(getattr(here, name), getattr(there, name)) for name in ("images", "keys", "shown"))


def test_parts_and_classes_are_found_by_the_names(tree, tmp_path):
    files = {f"{part}/{name}/{number}.png": png(seed=number) for part in ("train", "val") for name in ("a", "b")
             for number in range(3 if part == "train" else 2)}  # fmt: skip
    packed(tmp_path / "pack", tree(files | {"extra/x.png": png()}))
    spec = str(tmp_path / "pack")
    source = open_source(spec, data_root=tmp_path)
    assert source.note == "train/ only, 6 files; left out: extra/ (1 file), val/ (4 files)"
    assert int(source.block_sizes.sum()) == 6
    data = open_labelled(spec, data_root=tmp_path)
    assert data.class_names == ("a", "b")
    assert torch.bincount(data.train.labels).tolist() == [3, 3]
    assert torch.bincount(data.test.labels).tolist() == [2, 2]
    names = [data.train.source.item_name(index).split("/")[-2] for index in range(6)]
    assert names == [data.class_names[label] for label in data.train.labels]
    assert open_held_out(spec, data_root=tmp_path).note == "test split, 4 files"


def test_a_pack_without_parts_holds_some_of_each_class_out(folder):
    data = open_labelled(str(folder), data_root=folder)
    assert (data.class_names, len(data.train.source), len(data.test.source)) == (("cat", "dog"), 8, 2)


def test_a_whole_pack_has_no_fault(folder):
    assert faults(folder) == []


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_an_image_is_found_by_verifying_and_by_reading(folder):
    source = opened(folder)
    for index in range(len(source)):
        row, tar = source.index[index], folder / source.tars[source.shards[index]].name
        for place in (0, int(row["length"]) // 2, int(row["length"]) - 1):
            flip(tar, int(row["offset"]) + place)
            with pytest.raises(UnreadableImage, match=f"{source.names[index]} does not match its checksum; shard-.*"):
                loaded(source, index)
            assert faults(folder) == [f"{tar}: {source.names[index]} does not match its checksum"]
            flip(tar, int(row["offset"]) + place)
    assert faults(folder) == []


def test_a_flipped_bit_anywhere_is_found_by_verifying(made, tmp_path):
    shutil.copytree(made, tmp_path / "pack")
    rng = np.random.default_rng(0)
    for path in sorted((tmp_path / "pack").glob("shard*")):
        for place in rng.integers(0, path.stat().st_size, 40).tolist():
            flip(path, place)
            assert faults(tmp_path / "pack"), (path, place)
            flip(path, place)
    assert faults(tmp_path / "pack") == []


def test_a_flipped_bit_beside_the_tars_is_found_by_opening(made, tmp_path):
    shutil.copytree(made, tmp_path / "pack")
    for name in ("shard-000000.index.npy", "shard-000000.names.txt"):
        flip(tmp_path / "pack" / name, -3)
        with pytest.raises(UsageError, match=f"{name} does not match its checksum in pack.json"):
            opened(tmp_path / "pack")
        flip(tmp_path / "pack" / name, -3)


def test_files_that_are_gone_or_cut_are_told_one_by_one(folder):
    (folder / "shard-000000.tar").unlink()
    (folder / "shard-000001.index.npy").unlink()
    with (folder / "shard-000002.tar").open("r+b") as tar:
        tar.truncate(2000)
    (folder / "report.json").unlink()
    told = faults(folder)
    assert len(told) == 4
    for fault, message in zip(told, ("shard-000000.tar cannot be read", "shard-000001.index.npy cannot be read",
                                     "shard-000002.tar has 2,000 bytes; expected", "report.json cannot be"),
                              strict=True):  # fmt: skip
        assert message in fault
    with pytest.raises(MAEError, match="shard-000002.tar has 2,000 bytes; expected .* copied incompletely"):
        shutil.copy(folder / "shard-000000.index.npy", folder / "shard-000001.index.npy")
        replaced_index = json.loads((folder / "pack.json").read_text())
        replaced_index["shards"][1]["index"] = replaced_index["shards"][0]["index"]
        (folder / "pack.json").write_text(json.dumps(replaced_index))
        loaded(opened(folder), 6)


def test_headers_of_the_tar_that_disagree_with_the_index_are_told(made, tmp_path):
    shutil.copytree(made, tmp_path / "pack")
    source = opened(tmp_path / "pack")
    tar = tmp_path / "pack" / "shard-000000.tar"
    data = bytearray(tar.read_bytes())
    start = int(source.index[1]["offset"]) - 512
    data[start : start + 3] = b"bad"
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 154] = b"%06o" % sum(data[start : start + 512])
    replaced(tmp_path / "pack", "tar", tar, bytes(data))
    assert any("bad" in fault and "by the index" in fault for fault in faults(tmp_path / "pack"))


def test_a_report_that_lists_another_number_is_told(made, tmp_path):
    shutil.copytree(made, tmp_path / "pack")
    for text, message in (('{"left_out": [1]}', "lists 1 images left out, pack.json 0"),
                          ("[" * 100_000, "does not list what was left out"), ("{}", "does not list")):  # fmt: skip
        (tmp_path / "pack" / "report.json").write_text(text)
        assert len(told := faults(tmp_path / "pack")) == 1 and message in told[0]


ROWS = [
    ("offset beyond the tar", "offset", 1 << 40),
    ("offset that wraps", "offset", (1 << 64) - 512),
    ("offset before the first header", "offset", 0),
    ("offset in another member", "offset", 512),
    ("no length", "length", 0),
    ("length beyond the tar", "length", 1 << 20),
    ("length that wraps", "length", (1 << 64) - 1),
    ("length over the limit", "length", MAX_BYTES + 1),
    ("a type that there is not", "dtype", 3),
]


@pytest.mark.parametrize(("field", "value"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_rows_that_no_pack_has_are_refused(made, tmp_path, field, value):
    shutil.copytree(made, tmp_path / "pack")

    def change(rows: np.ndarray) -> None:
        rows[field][2] = value

    changed(tmp_path / "pack", change)
    with pytest.raises(UsageError, match="shard-000000.index.npy"):
        opened(tmp_path / "pack")
    assert len(faults(tmp_path / "pack")) == 1


def test_members_that_begin_between_blocks_are_refused(made, tmp_path):
    shutil.copytree(made, tmp_path / "pack")

    def change(rows: np.ndarray) -> None:
        rows["offset"][3] += 1
        rows["length"][3] -= 1

    changed(tmp_path / "pack", change)
    with pytest.raises(UsageError, match="overlapping members"):
        opened(tmp_path / "pack")


@pytest.mark.parametrize(("field", "value"), [("width", 0), ("height", 1 << 31), ("channels", 65535), ("width", 11),
                                              ("channels", 1), ("dtype", 1)])  # fmt: skip
def test_shapes_that_are_not_the_images_are_told_for_the_image(made, tmp_path, field, value):
    shutil.copytree(made, tmp_path / "pack")

    def change(rows: np.ndarray) -> None:
        rows[field][2] = value

    changed(tmp_path / "pack", change)
    source = opened(tmp_path / "pack")
    with pytest.raises(UnreadableImage):
        loaded(source, 2)
    if value in (0, 1 << 31):  # what no image can be
        with pytest.raises(UnreadableImage, match="expected|may have"):
            probed(source, 2)
    loaded(source, 1)


def test_indices_that_are_none_are_refused(made, tmp_path):
    rows = np.load(made / "shard-000000.index.npy")
    other = rows.astype([*INDEX.descr[:-1], ("dtype", "<u2")])
    hostile = [as_npy(rows[:3]), as_npy(other), as_npy(rows.reshape(2, 2)), b"", b"\x93NUMPY\x01\x00", rows.tobytes(),
               as_npy(np.array([{}] * 4, dtype=object)), as_npy(rows) + b"more",
               as_npy(rows).replace(b"'shape': (4,)", b"'shape': (-4,)")]  # fmt: skip
    for number, data in enumerate(hostile):
        folder = tmp_path / str(number)
        shutil.copytree(made, folder)
        replaced(folder, "index", folder / "shard-000000.index.npy", data)
        with pytest.raises(UsageError, match="index"):
            opened(folder)


@pytest.mark.parametrize("name", ["../x.jpg", "/etc/passwd", "a/../../x", "a//b.jpg", ".", "", "a/\x1b[2J.jpg", "./a"])
def test_names_that_lead_out_are_refused(made, tmp_path, name):
    shutil.copytree(made, tmp_path / "pack")
    path = tmp_path / "pack" / "shard-000000.names.txt"
    names = path.read_text().splitlines()
    replaced(tmp_path / "pack", "names", path, "".join(f"{each}\n" for each in [*names[:3], name]).encode())
    with pytest.raises(UsageError, match="expected one that stays inside a folder"):
        opened(tmp_path / "pack")
    for data in (b"a.jpg\nb\nc\n", b"a\nb\nc\nd\ne\n", b"a.jpg\nb\n\xff\xfe\nd\n"):
        replaced(tmp_path / "pack", "names", path, data)
        with pytest.raises(UsageError, match="names.txt (holds . names; expected 4|is not UTF-8)"):
            opened(tmp_path / "pack")


MANIFESTS = [
    ({"format": "other"}, "is of format 'other'; expected 'openmae pack'"),
    ({"version": 2}, "is a pack of version 2; this mae reads version 1: use a newer mae"),
    ({"version": "1"}, "is not a whole pack"),
    ({"images": 5}, "lists 5 images, its shards 4"),
    ({"images": -1}, "lists -1 images"),
    ({"images": 1e300}, "is not a whole pack"),
    ({"shards": []}, "its shards 0"),
    ({"shards": None}, "is not a whole pack: pack.json, shards"),
    ({"channel_names": "RGB"}, "is not a whole pack: pack.json, channel_names"),
    ({"left_out": int("9" * 4000)}, "is not a whole pack"),
]


@pytest.mark.parametrize(("change", "message"), MANIFESTS, ids=[str(change)[:30] for change, _ in MANIFESTS])
def test_a_pack_json_that_is_none_is_refused(made, tmp_path, change, message):
    shutil.copytree(made, tmp_path / "pack")
    path = tmp_path / "pack" / "pack.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        open_source(str(tmp_path / "pack"), data_root=tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "../shard-000000"), ("name", "/etc/passwd"), ("name", "shard-000000.tar"), ("images", -4),
     ("images", 1 << 40), ("tar", {"bytes": -1, "sha256": "0" * 64}), ("tar", {"bytes": 1, "sha256": "x"}),
     ("names", {"bytes": 1 << 40, "sha256": "0" * 64}), ("index", {"bytes": 1 << 40, "sha256": "0" * 64}),
     ("tar", {"bytes": 1 << 80, "sha256": "0" * 64})],
)  # fmt: skip
def test_shards_that_there_cannot_be_are_refused(made, tmp_path, key, value):
    shutil.copytree(made, tmp_path / "pack")
    path = tmp_path / "pack" / "pack.json"
    told = json.loads(path.read_text())
    told["shards"][0][key] = value
    path.write_text(json.dumps(told))
    with pytest.raises(UsageError, match="is not a whole pack: pack.json"):
        opened(tmp_path / "pack")


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"a":' * 1_000_000, "[]", "null", "", "\xff", "[" + "[]," * 100_000,
                                  '{"format": "' + "x" * 1_000_000 + '"}'], ids=range(8))  # fmt: skip
def test_a_pack_json_of_nothing_but_brackets_takes_little_memory(tmp_path, text):
    (tmp_path / "pack.json").write_text(text)
    tracemalloc.start()
    with pytest.raises(UsageError) as error:
        opened(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 and len(str(error.value)) < 1000


def test_a_giant_pack_json_is_not_read(tmp_path):
    with (tmp_path / "pack.json").open("wb") as file:
        file.truncate(MAX_MANIFEST + 1)
    with pytest.raises(UsageError, match="pack.json has more than 16,777,216 bytes"):
        opened(tmp_path)


FIELDS = sorted(INDEX.names)
EXTREMES = st.sampled_from([0, 1, 511, 512, 513, 1023, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FIELDS), EXTREMES | st.integers(0, 4096)), min_size=1)
)
@example([(3, "length", (1 << 64) - 512)])
def test_whatever_the_index_tells_ends_in_an_image_or_in_our_error(made, changes):
    folder = made.parent / "fuzzed"
    if not folder.exists():
        shutil.copytree(made, folder)
    (folder / "shard-000000.index.npy").write_bytes((made / "shard-000000.index.npy").read_bytes())

    def change(rows: np.ndarray) -> None:
        for row, field, value in changes:
            rows[field][row] = value & ((1 << 8 * INDEX[field].itemsize) - 1)

    changed(folder, change)
    truth = contents(made)
    tracemalloc.start()
    try:
        source = opened(folder)
        for index in range(len(source)):
            try:
                loaded(source, index)
            except UnreadableImage:
                continue
    except UsageError:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20
    assert contents(made) == truth


class Halting(io.FileIO):
    """A file of a system that gives less at a time than it is asked for, as network file systems may."""

    def read(self, size: int = -1) -> bytes:
        return super().read(min(size, 3))


def test_a_local_store_gives_what_is_asked_for_and_no_less(tmp_path, monkeypatch):
    (tmp_path / "x.tar").write_bytes(b"0123456789")
    store, file = LocalStorage(root=tmp_path), StoredFile(name="x.tar", num_bytes=10, sha256="")
    assert isinstance(store, Storage)
    assert (store.part(file, 3, 4), store.part(file, 10, 0), store.whole("x.tar", limit=10)) == (
        b"3456",
        b"",
        b"0123456789",
    )
    assert store.local(file) == tmp_path / "x.tar" and store.place == str(tmp_path)
    for offset, length in ((3, 8), (-1, 2), (11, 0), (2, -1)):
        with pytest.raises(MAEError, match="reach beyond them"):
            store.part(file, offset, length)
    monkeypatch.setattr(storage, "open", lambda path, mode, buffering: Halting(path), raising=False)
    assert (store.part(file, 3, 4), store.part(file, 0, 10)) == (b"3456", b"0123456789")
    longer = StoredFile(name="x.tar", num_bytes=11, sha256="")
    for read in (lambda: store.local(longer), lambda: store.part(longer, 0, 1)):
        with pytest.raises(MAEError, match="has 10 bytes; expected 11"):
            read()
    os.mkfifo(tmp_path / "pipe")
    for name in ("gone", "pipe"):
        with pytest.raises(MAEError, match="cannot be read|is not a file"):
            store.local(StoredFile(name=name, num_bytes=1, sha256=""))
        with pytest.raises(UsageError, match="cannot be read|is not a file"):
            store.whole(name, limit=1)
    with pytest.raises(UsageError, match="has more than 9 bytes"):
        store.whole("x.tar", limit=9)


@pytest.mark.parametrize("name", ["", "..", "../x", "/x", "a/../x", "a//x", "./x", "C:/x", "a\\x", "a\nb"])
def test_names_that_lead_out_of_a_store_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="is not the name of a file in a pack"):
        StoredFile(name=name, num_bytes=1, sha256="")
    with pytest.raises(UsageError, match="is not the name of a file in a pack"):
        LocalStorage(root=tmp_path).whole(name, limit=1)


def test_a_pack_can_be_packed_again(folder, tmp_path):
    packed(tmp_path / "raw", folder, form=Raw())
    source, again = opened(folder), opened(tmp_path / "raw")
    places = {name.split(".")[0]: index for index, name in enumerate(source.names)}
    for index, name in enumerate(again.names):
        assert (loaded(again, index) == loaded(source, places[name.split(".")[0]])).all()
    assert manifest(tmp_path / "raw").form == {"kind": "raw", "short_side": 256, "per_shard": 3}
    assert again.item_name(0).endswith(".npy") and jpeg()[:2] == source.read(0)[:2]
