"""Tar sets: the same images as webdataset's own reader gives, from any place, and nothing that leads elsewhere."""

import contextlib
import io
import itertools
import os
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import webdataset
from braceexpand import braceexpand
from data.pictures import loaded, png, probed
from hostile.mutations import KINDS, mutated
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mae.data.dataset.images import load_images
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.loader import TrainingLoader
from mae.data.sources import webdataset as tar_sets
from mae.data.sources.open import open_held_out, open_labelled, open_source
from mae.data.sources.tar_index import members
from mae.data.sources.webdataset import expand_braces, open_tars
from mae.errors import UsageError

USTAR, GNU, PAX = tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENMAE_CACHE", str(tmp_path_factory.mktemp("cache")))


def tarred(files: list[tuple[str | tarfile.TarInfo, bytes]], tar_format: int = GNU) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name) if isinstance(name, str) else name
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def written(path: Path, files: list[tuple[str | tarfile.TarInfo, bytes]], tar_format: int = GNU) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tarred(files, tar_format))
    return path


def special(name: str, kind: bytes, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def names_of(source) -> list[str]:
    return [source.names[index] for index in range(len(source))]


def shards(folder: Path, count: int = 3, each: int = 5) -> Path:
    """Written by webdataset, with a class and a text beside each image."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(count):
        with webdataset.TarWriter(str(folder / f"set-{shard:06d}.tar")) as writer:
            for number in range(each + shard):
                seed = 10 * shard + number
                sample = {"png": png(10 + number, 12, seed), "cls": str(seed % 3).encode(), "txt": b"a caption"}
                writer.write({"__key__": f"{shard}/{9 - number}", **sample})
    return folder


def test_the_images_are_those_of_webdatasets_own_reader_in_its_order(tmp_path):
    folder = shards(tmp_path / "set")
    urls = sorted(map(str, folder.glob("*.tar")))
    theirs = list(webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8"))
    ours = open_source(str(folder), data_root=tmp_path)
    assert names_of(ours) == [f"{sample['__key__']}.png" for sample in theirs]
    for index, sample in enumerate(theirs):
        assert np.array_equal(loaded(ours, index), sample["png"])
        info = probed(ours, index)
        assert (info.height, info.width, info.channels) == sample["png"].shape
    assert ours.block_sizes.tolist() == [5, 6, 7]
    assert ours.note == "3 tars, 18 files" and ours.item_name(5) == f"{urls[1]}/1/9.png"
    pattern = open_source(f"{folder}/set-{{000000..000002}}.tar", data_root=tmp_path)
    assert names_of(pattern) == names_of(ours) and pattern.fingerprint() == ours.fingerprint()
    one = open_source(urls[2], data_root=tmp_path)
    assert names_of(one) == names_of(ours)[11:]
    assert sorted(os.listdir(folder)) == [os.path.basename(url) for url in urls]


@pytest.mark.parametrize("tar_format", [USTAR, GNU, PAX])
def test_names_of_every_form_of_tar(tmp_path, tar_format):
    wanted = ["a.jpg", "./b.img.PNG", "c/ä.webp", "deep/" * 15 + "d" * 60 + ".png"]
    if tar_format != USTAR:
        wanted += ["e" * 300 + ".png", "bad-\udcff.png"]
    others = ["._a.jpg", "c/.hidden.png", "__MACOSX/a.png", "readme.txt", "noextension"]
    path = written(tmp_path / "x.tar", [(name, png(seed=n)) for n, name in enumerate([*wanted, *others])], tar_format)
    source = open_source(str(path), data_root=tmp_path)
    assert names_of(source) == [name.removeprefix("./") for name in wanted]
    with tarfile.open(path, errors="surrogateescape") as archive:
        offsets = {info.name: info.offset_data for info in archive}
    assert source.table["offset"].tolist() == [offsets[name] for name in wanted]
    for index in range(len(wanted)):
        (tmp_path / "one.png").write_bytes(png(seed=index))
        assert np.array_equal(loaded(source, index), loaded(open_source(str(tmp_path), data_root=tmp_path), 0))


def test_a_large_size_in_binary_is_understood():
    info = tarfile.TarInfo("a.png")
    info.size = 9 << 30
    head = info.tobuf(GNU)
    found = list(
        members(
            lambda at, length: (head + bytes(1024))[at : at + length] if at == 0 else b"", (9 << 30) + 1536, name="x"
        )
    )
    assert found == [("a.png", "file", 512, 9 << 30)]


def test_what_is_no_plain_file_is_passed_over_and_told(tmp_path):
    found = [
        ("a.png", png()),
        (special("link.png", tarfile.SYMTYPE, linkname="/etc/passwd"), b""),
        (special("hard.png", tarfile.LNKTYPE, linkname="a.png"), b""),
        (special("device.png", tarfile.CHRTYPE), b""),
        (special("pipe.png", tarfile.FIFOTYPE), b""),
        (special("folder.png", tarfile.DIRTYPE), b""),
        ("/etc/up.png", png()),
        ("../../up.png", png()),
        ("b.png", png(seed=1)),
    ]
    source = open_source(str(written(tmp_path / "x.tar", found)), data_root=tmp_path)
    assert names_of(source) == ["a.png", "b.png"]
    told = "2 devices and the like, 2 links, 2 names that lead out"
    assert source.note == f"1 tar, 2 files; skipped: {told}"


def test_parts_and_classes_of_names(tmp_path):
    """As in a folder; a part may also stand in the tar's own folder or name."""
    cats_and_dogs = [(f"{kind}/{number}.png", png(seed=number)) for kind in ("cat", "dog") for number in range(3)]
    inside = [(f"train/{name}", data) for name, data in cats_and_dogs] + [
        ("test/cat/9.png", png()),
        ("test/dog/9.png", png()),
    ]
    for place in ("in", "in2"):
        written(
            tmp_path / place / "x.tar",
            inside if place == "in" else [(f"./top/{name}", data) for name, data in cats_and_dogs],
        )
    for place, train, test in (("folders", "train/a.tar", "val/a.tar"), ("words", "my-train-0.tar", "my-val-0.tar")):
        written(tmp_path / place / train, cats_and_dogs)
        written(tmp_path / place / test, cats_and_dogs[:4])
    for place, counts in (("in", (6, 2)), ("in2", (4, 2)), ("folders", (6, 4)), ("words", (6, 4))):
        data = open_labelled(str(tmp_path / place), data_root=tmp_path)
        assert data.class_names == ("cat", "dog")
        assert (len(data.train.source), len(data.test.source)) == counts, place
    source = open_source(str(tmp_path / "words"), data_root=tmp_path)
    assert len(source) == 6 and source.note == "train/ only, 6 files; left out: val/ (4 files)"
    assert source.block_sizes.tolist() == [6]
    assert len(open_held_out(str(tmp_path / "words"), data_root=tmp_path)) == 4


def test_classes_of_cls_members(tmp_path):
    files = [
        (f"s.1/{n}.{kind}", data)
        for n in range(12)
        for kind, data in (("cls", b"%d\n" % (n // 6 * 10)), ("img.png", png(seed=n)))
    ]
    path = written(tmp_path / "x.tar", files)
    data = open_labelled(str(path), data_root=tmp_path)
    assert data.class_names == ("0", "10")
    for split, count in ((data.train, 10), (data.test, 2)):
        numbers = [int(split.source.names[index][4:-8]) for index in range(len(split.source))]
        assert split.labels.tolist() == [number // 6 for number in numbers] and len(numbers) == count
    two = open_labelled(str(path), data_root=tmp_path, test=str(written(tmp_path / "y.tar", files[::-1])))
    assert (len(two.train.source), len(two.test.source)) == (12, 12)
    assert two.test.labels.tolist() == [1] * 6 + [0] * 6


@pytest.mark.parametrize("content", [b"", b"cat", b"-1", b"1" * 30, b"0x1", "１".encode(), b"1\0"])
def test_what_is_no_class_is_refused(tmp_path, content):
    files = [("a.png", png()), ("a.cls", b"1"), ("b.png", png(seed=1)), ("b.cls", content)]
    with pytest.raises(UsageError, match="b.png has no .cls" if content == b"" else "b.png: its .cls holds"):
        open_labelled(str(written(tmp_path / "x.tar", files)), data_root=tmp_path)
    assert len(open_source(str(tmp_path / "x.tar"), data_root=tmp_path)) == 2  # which reads no classes


def test_some_images_without_a_class_are_refused(tmp_path):
    files = [("a.png", png()), ("a.cls", b"1"), ("b.png", png(seed=1))]
    with pytest.raises(UsageError, match=r"x.tar/b.png has no .cls file"):
        open_labelled(str(written(tmp_path / "x.tar", files)), data_root=tmp_path)


def loader(source, **changes) -> TrainingLoader:
    images = load_images(source, in_chans=3, memory_limit=0, max_unreadable=1.0)
    settings = dict(batch_size=4, accumulate=1, img_size=(8, 8), seed=1, workers=0)
    return TrainingLoader(images=images, **{**settings, **changes})


def taken(source: TrainingLoader, count: int, start_step: int = 0):
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def test_a_run_over_tars_goes_on_where_it_was(tmp_path):
    source = open_source(str(shards(tmp_path / "set")), data_root=tmp_path)
    whole = taken(loader(source), 10)
    assert sorted(torch.cat([batch.ids for batch in whole[:4]]).tolist()) != list(range(16))
    assert len(set(torch.cat([batch.ids for batch in whole[:4]]).tolist())) == 16
    for start, workers in ((3, 0), (5, 2)):  # in the first epoch, and in the second
        rest = taken(loader(open_source(str(tmp_path / "set"), data_root=tmp_path), workers=workers), 10 - start, start)
        for one, other in zip(rest, whole[start:], strict=True):
            assert torch.equal(one.ids, other.ids) and torch.equal(one.images, other.images)


def test_taking_some_keeps_the_blocks(tmp_path):
    source = open_source(str(shards(tmp_path / "set")), data_root=tmp_path)
    some = source.take(np.array([0, 2, 4, 11, 13, 17]), "some")
    assert some.block_sizes.tolist() == [3, 3] and some.note == "some"
    assert [some.item_name(n) for n in (2, 3)] == [source.item_name(n) for n in (4, 11)]
    assert np.array_equal(loaded(some, 4), loaded(source, 13))
    assert source.take(np.array([17, 0]), "").block_sizes.tolist() == [1, 1]
    assert len({source.fingerprint(), some.fingerprint(), source.version(), some.version()}) == 4


def test_a_reader_may_be_given(tmp_path):
    """Of tars that lie elsewhere."""
    source = open_source(str(shards(tmp_path / "set", 1)), data_root=tmp_path)
    data = (tmp_path / "set" / "set-000000.tar").read_bytes()
    asked = []

    def read(path: str, offset: int, length: int) -> bytes:
        asked.append((path, offset, length))
        return data[offset : offset + length]

    elsewhere = tar_sets.TarSource(**{**vars(source), "tars": ("https://a/b.tar",), "reader": read})
    assert np.array_equal(loaded(elsewhere, 3), loaded(source, 3))
    assert asked == [("https://a/b.tar", int(source.table["offset"][3]), int(source.table["length"][3]))]


def test_a_second_start_reads_the_kept_index(tmp_path, monkeypatch):
    folder = shards(tmp_path / "set")
    for path in folder.glob("*.tar"):
        os.utime(path, ns=(0, 10**18))
    first = open_source(str(folder), data_root=tmp_path)
    kept = sorted((Path(os.environ["OPENMAE_CACHE"]) / "indexes").iterdir())
    assert len(kept) == 3 and all(path.suffix == ".npz" for path in kept)
    walks = []
    monkeypatch.setattr(tar_sets, "members", lambda *args, name: walks.append(name) or members(*args, name=name))

    def again():
        walks.clear()
        source = open_source(str(folder), data_root=tmp_path)
        assert names_of(source) == names_of(first) and np.array_equal(source.table, first.table)
        assert source.note == first.note and source.version() == first.version()
        return len(walks)

    assert again() == 0
    whole = kept[0].read_bytes()
    for damaged in (b"", whole[:-30], whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], b"text"):
        kept[0].write_bytes(damaged)
        assert again() == 1 and again() == 0
    with np.load(kept[0]) as stored:
        arrays = dict(stored)
    arrays["table"]["offset"][2] = 2**64 - 5  # its end would wrap around
    np.savez(kept[0], **arrays)
    assert again() == 1
    arrays["table"] = np.array([None, 1], dtype=object)  # which NumPy pickles
    np.savez(kept[0], **arrays)
    assert again() == 1


def test_an_archive_that_was_changed_is_walked_again(tmp_path):
    path = written(tmp_path / "x.tar", [("a.png", png())])
    os.utime(path, ns=(0, 10**18))
    before = open_source(str(path), data_root=tmp_path)
    written(path, [("b.png", png())])
    os.utime(path, ns=(0, 10**18 + 1))
    after = open_source(str(path), data_root=tmp_path)
    assert (names_of(before), names_of(after)) == (["a.png"], ["b.png"])
    assert before.version() != after.version()
    # One that was written a moment ago may change again at the same time of its clock: nothing is kept of it.
    written(path, [("c.png", png())])
    open_source(str(path), data_root=tmp_path)
    now = path.stat()
    written(path, [("d.png", png())])
    os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    assert names_of(open_source(str(path), data_root=tmp_path)) == ["d.png"]


def test_a_cache_that_may_not_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("OPENMAE_CACHE", str(tmp_path / "file"))
    path = written(tmp_path / "x.tar", [("a.png", png())])
    os.utime(path, ns=(0, 10**18))
    assert len(open_source(str(path), data_root=tmp_path)) == 1


def test_patterns_are_those_of_the_shell():
    for pattern in (
        "a-{000..012}.tar",
        "a{8..11}",
        "{b,a}/{3..1}-{x,}.tar",
        "plain.tar",
        "{09..10}",
        "{1..1}",
        "a{}b",
        "{x}",
        "{a,{b,c}}",
        "x{a{d,e},{1..3}}y-{f,g}",
        "{{a,b},c}",
        "{x{a,b}}",
    ):
        assert list(map(str, expand_braces(pattern))) == list(braceexpand(pattern)), pattern
    for pattern in ("{0..999999999999}", "{0..99999}" * 3, "{a,b}" * 30):
        with pytest.raises(UsageError, match="stands for more than 100,000 files"):
            expand_braces(pattern)


def test_what_cannot_be_a_tar_set_says_why(tmp_path):
    shards(tmp_path / "set")
    pattern = f"{tmp_path}/set/set-{{000001..000004}}.tar"
    with pytest.raises(UsageError, match=r"2 of 4 tars are missing, such as .*set-000003.tar"):
        open_source(pattern, data_root=tmp_path)
    gz = tmp_path / "gz"
    gz.mkdir()
    with tarfile.open(gz / "x.tar.gz", "w:gz"):
        pass
    for spec in (gz, gz / "x.tar.gz"):
        with pytest.raises(UsageError, match=r"x.tar.gz is a compressed tar.*; decompress it"):
            open_source(str(spec), data_root=tmp_path)
    (tmp_path / "renamed.tar").write_bytes((gz / "x.tar.gz").read_bytes())
    with pytest.raises(UsageError, match="renamed.tar is compressed with gzip"):
        open_source(str(tmp_path / "renamed.tar"), data_root=tmp_path)
    path = written(tmp_path / "text.tar", [("a.txt", b"x"), ("b.txt", b"x"), ("c", b"")])
    with pytest.raises(UsageError, match="text.tar holds no images: .*; found 2 .txt, 1 without extension"):
        open_source(str(path), data_root=tmp_path)
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(UsageError, match="is a file, not a source of images"):
        open_source(str(tmp_path / "pipe.tar"), data_root=tmp_path)


def test_a_folder_of_images_is_one_whatever_tars_lie_in_it(tmp_path):
    written(tmp_path / "set" / "originals.tar", [("a.png", png())])
    (tmp_path / "set" / "train").mkdir()
    (tmp_path / "set" / "train" / "1.png").write_bytes(png())
    assert open_source(str(tmp_path / "set"), data_root=tmp_path).note == "folder, 1 file; not read: 1 .tar"


def claiming(length: int, name: str = "a.png", kind: bytes = tarfile.REGTYPE) -> bytes:
    info = special(name, kind, size=length)
    return info.tobuf(GNU)


def test_every_number_is_compared_with_the_archive(tmp_path):
    good = tarred([("a.png", png()), ("b.png", png(seed=1))])
    sparse_pax = special("s.png", tarfile.REGTYPE, pax_headers={"GNU.sparse.major": "1"})
    cases = [
        (claiming(1 << 40) + bytes(1024), "a.png claims 1,099,511,627,776 bytes where 1,024 can be"),
        (claiming(50 << 20, "long", tarfile.XHDTYPE) + bytes(60 << 20), "bytes where 1,048,576 can be"),
        (claiming(50 << 20, "long", tarfile.GNUTYPE_LONGNAME) + bytes(60 << 20), "claims 52,428,800 bytes"),
        (claiming(99, "s.png", tarfile.GNUTYPE_SPARSE) + bytes(1024), "holds the sparse file s.png"),
        (tarred([(sparse_pax, png())], PAX), "holds the sparse file s.png"),
        (good[:1200], "claims|truncated"),
        (good[:600], "a.png claims"),
        (good[:100], "is truncated"),
        (b"no tar at all" * 100, "not a whole tar archive"),
        (good[:150] + b"9" + good[151:], "not a whole tar archive"),
        (good[:5] + b"x" + good[6:], "does not match its checksum"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "compressed with zstd"),
        (tarred([(special("g", b"g"), b"20 path=/etc/passwd\n"), ("a.png", png())]), "one name or size to all"),
        (tarred([(special("x", b"x"), b"0 path=a.png\n"), ("a.png", png())]), "not a line of a pax header"),
        (tarred([(special("x", b"x"), b"99999999 path=a.png\n"), ("a.png", png())]), "not a line of a pax header"),
        (tarred([(special("x", b"x"), b"15 size=999999\n"), ("a.png", png())]), "claims 999,999 bytes"),
        (b"", "holds no images: .*; found nothing"),
        (bytes(10240), "holds no images: .*; found nothing"),
    ]  # fmt: skip
    tracemalloc.start()
    for number, (data, why) in enumerate(cases):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(data)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        with pytest.raises(UsageError, match=why):
            open_source(str(path), data_root=tmp_path)
        assert tracemalloc.get_traced_memory()[1] - before < 3 << 20, why
    tracemalloc.stop()


def test_a_tar_without_its_end_is_read(tmp_path):
    data = tarred([("a.png", png()), ("b.png", png(seed=1))])
    end = len(data.rstrip(b"\0"))
    (tmp_path / "x.tar").write_bytes(data[:end])  # even the last member's padding is missing
    source = open_source(str(tmp_path / "x.tar"), data_root=tmp_path)
    assert loaded(source, 1).shape == (12, 10, 3)
    assert source.note == "1 tar, 2 files; 1 tar without its end, perhaps truncated"


@pytest.mark.parametrize("more", [bytes(2 << 20), tarred([("c.png", png())])])
def test_what_stands_behind_the_end_is_told(tmp_path, more):
    (tmp_path / "x.tar").write_bytes(tarred([("a.png", png()), ("b.png", png(seed=1))]) + more)
    source = open_source(str(tmp_path / "x.tar"), data_root=tmp_path)
    assert source.note == "1 tar, 2 files; 1 tar with bytes behind its end, which are not read"


def test_images_in_formats_that_are_not_read_are_told_of_tars_too(tmp_path):
    for name, others in (("1", ["b.HEIC", "c.json", ".d.gif"]), ("2", ["b.heic", "c.gif", "c"])):
        written(tmp_path / f"{name}.tar", [(f"{name}.png", png()), *((other, b"x") for other in others)])
    for _ in range(2):  # from the tars, then from their kept indexes
        source = open_source(str(tmp_path), data_root=tmp_path)
        assert source.note == "2 tars, 2 files; not read: 2 .heic, 1 .gif"


def test_the_last_file_of_a_name_counts(tmp_path):
    path = written(tmp_path / "x.tar", [("a.png", png()), ("b.png", png()), ("./a.png", png(20, 20))])
    source = open_source(str(path), data_root=tmp_path)
    assert names_of(source) == ["b.png", "a.png"] and loaded(source, 1).shape == (20, 20, 3)
    assert source.note == "1 tar, 2 files; skipped: 1 older versions of a file"


def test_an_index_with_odd_names_is_kept(tmp_path, monkeypatch):
    path = written(tmp_path / "x.tar", [("a.png", png()), ("b.\udce9t", b"?")])
    os.utime(path, (0, 0))  # old enough to be kept
    first = open_source(str(path), data_root=tmp_path)
    monkeypatch.setattr(tar_sets, "members", None)  # read once
    assert open_source(str(path), data_root=tmp_path).note == first.note == "1 tar, 1 file"


def test_damage_within_a_member_is_that_image_alone(tmp_path):
    path = written(tmp_path / "x.tar", [("a.png", png()), ("b.png", b"no picture"), ("c.png", b""), ("d.png", png())])
    source = open_source(str(path), data_root=tmp_path)
    assert loaded(source, 3).shape == loaded(source, 0).shape
    with pytest.raises(UnreadableImage, match="x.tar/b.png starts with"):
        loaded(source, 1)
    with pytest.raises(UnreadableImage, match="x.tar/c.png is empty"):
        loaded(source, 2)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UnreadableImage, match="x.tar/d.png is gone"):
        loaded(source, 3)
    path.unlink()
    with pytest.raises(UnreadableImage, match="x.tar/d.png cannot be read: No such file"):
        loaded(source, 3)


SEEDS = [
    tarred([("s/1.png", png()), ("s/1.cls", b"1"), ("n" * 200 + ".png", png(seed=1)), ("s/2.txt", b"x")], each)
    for each in (GNU, PAX)
] + [tarred([("a.png", png()), (special("l.png", tarfile.SYMTYPE, linkname="/etc/passwd"), b"")], USTAR)]
SHARE = st.integers(0, (1 << 16) - 1)


def with_checksums(data: bytes) -> bytes:
    """Of headers that stand where they did: nothing would be read behind a wrong one."""
    changed = bytearray(data)
    for at in range(0, len(changed) - 511, 512):
        if changed[at + 257 : at + 262] == b"ustar":
            changed[at + 148 : at + 156] = b" " * 8
            changed[at + 148 : at + 156] = b"%06o\0 " % sum(changed[at : at + 512])
    return bytes(changed)


@settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(which=SHARE, other=SHARE, mended=st.booleans(), done=st.lists(
    st.tuples(st.integers(0, KINDS - 1), SHARE, SHARE), min_size=1, max_size=4))  # fmt: skip
def test_a_damaged_tar_is_read_or_refused(tmp_path, which, other, mended, done):
    path = tmp_path / "x.tar"
    data = mutated(SEEDS[which % len(SEEDS)], SEEDS[other % len(SEEDS)], done)
    path.write_bytes(with_checksums(data) if mended else data)
    tracemalloc.start()
    with contextlib.suppress(UsageError):
        source = open_tars([path], name="x")
        for index in range(len(source)):
            assert ".." not in source.names[index].split("/") and not source.names[index].startswith("/")
            assert source.table["offset"][index] + source.table["length"][index] <= len(data)
            with contextlib.suppress(UnreadableImage):
                loaded(source, index)
        source.classes()
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
