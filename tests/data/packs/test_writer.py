"""Writing packs: what becomes of an image and its name, the same bytes every time, and what stops it."""

import io
import multiprocessing
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import tifffile
import torch
import webdataset
from data.packs import contents, jpeg, manifest, packed, some_images, turned
from data.pictures import archive, encoded, loaded, noise, png, probed
from PIL import Image
from torchvision.transforms.v2 import functional as F

from mae.data.decode.image import decode
from mae.data.decode.limits import UnreadableImage
from mae.data.packs import workers as pack_workers
from mae.data.packs import writer as packing
from mae.data.packs.encodings import Kept, Original, Raw, ShortSide
from mae.data.packs.inputs import open_input
from mae.data.packs.shard import Job
from mae.data.sources.open import open_labelled, open_source, open_whole
from mae.errors import MAEError, UsageError


def opened(folder: Path):
    return open_whole(str(folder), data_root=folder)


def by_name(source) -> dict[str, np.ndarray]:
    return {source.names[index]: loaded(source, index) for index in range(len(source))}


@pytest.mark.parametrize("form", [ShortSide(side=8), Kept(), Raw(side=8)], ids=lambda form: form.to_json()["kind"])
def test_the_same_input_gives_the_same_bytes(tree, tmp_path, form):
    root = tree(some_images() | {"cat/turned.jpg": turned(), "dog/bad.jpg": jpeg()[:300]})
    one = packed(tmp_path / "one", root, form=form, max_unreadable=0.2)
    two = packed(tmp_path / "two", root, form=form, max_unreadable=0.2, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert (one.images, two.images, one.left_out) == (11, 11, two.left_out)
    files = {"pack.json", "report.json"}
    files |= {f"shard-{n:06d}.{kind}" for n in range(4) for kind in ("tar", "index.npy", "names.txt")}
    assert set(contents(tmp_path / "one")) == files


def in_a_child(work) -> int:
    """How a forked process that does this ends."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_killed_at_any_rename_it_goes_on_and_the_bytes_are_the_same(tree, tmp_path):
    root = tree(some_images(6) | {"bad.jpg": b"none"})
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    packed(whole, root, max_unreadable=1)
    renames = 1 + 3 * 4 + 2  # what is asked for; three shards of tar, index, names and record; report and pack.json

    def killed_before(number: int) -> None:
        replace, seen = Path.replace, []

        def dying(self: Path, target: Path) -> Path:
            if len(seen) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            seen.append(target)
            return replace(self, target)

        Path.replace = dying
        packed(cut, root, max_unreadable=1)

    for number in range(renames):
        assert in_a_child(lambda number=number: killed_before(number)) == -signal.SIGKILL, number
        if number % 2:  # and killed again where it was
            in_a_child(lambda: killed_before(1))
        with pytest.raises(UsageError, match="is an unfinished pack; rerun the same 'mae pack' command"):
            open_source(str(cut), data_root=cut)
        assert not packed(cut, root, max_unreadable=1).was_there
        assert contents(cut) == contents(whole), number
        shutil.rmtree(cut)
    assert in_a_child(lambda: killed_before(renames)) == 0


def test_what_is_done_is_not_done_again(tree, tmp_path, monkeypatch):
    root, cut = tree(some_images(6)), tmp_path / "cut"
    seen: list[int] = []
    write = pack_workers.write_shard

    def failing(job: Job, number: int, **options):
        if number == 1 and len(seen) < 2:
            raise KeyboardInterrupt
        seen.append(number)
        return write(job, number, **options)

    monkeypatch.setattr(pack_workers, "write_shard", failing)
    with pytest.raises(KeyboardInterrupt):
        packed(cut, root)
    seen.append(-1)
    packed(cut, root)
    assert seen == [0, -1, 1]
    assert packed(cut, root).was_there
    assert seen == [0, -1, 1]


def test_half_a_shard_of_a_killed_process_takes_no_room_any_more(tree, tmp_path):
    rest = tmp_path / "pack" / ".packing" / "shard-000000.1.tar"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"half")
    seen: list[bool] = []
    packed(tmp_path / "pack", tree(some_images(3)), progress=lambda done, total: seen.append(rest.exists()))
    assert seen and not any(seen)


def test_a_shard_that_is_not_as_it_was_is_done_again(tree, tmp_path, monkeypatch):
    root = tree(some_images(9))
    packed(tmp_path / "whole", root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_write_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        packed(tmp_path / "cut", root)
    os.truncate(tmp_path / "cut" / "shard-000000.tar", 1000)
    (tmp_path / "cut" / "shard-000001.names.txt").unlink()
    (tmp_path / "cut" / ".packing" / "shard-000002.json").write_text("{")
    packed(tmp_path / "cut", root)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.slow
def test_killed_with_its_processes_at_work_it_goes_on(tree, tmp_path):
    root, cut, whole = tree(some_images(12)), tmp_path / "cut", tmp_path / "whole"

    def slow() -> None:
        pack = Kept.pack
        Kept.pack = lambda *args: (time.sleep(0.1), pack(*args))[1]
        packed(cut, root, form=Kept(), workers=2)

    child = multiprocessing.get_context("fork").Process(target=slow)
    child.start()
    while not list(cut.glob(".packing/shard-000000.json")):
        time.sleep(0.01)
    workers = psutil.Process(child.pid).children()
    child.kill()
    child.join()
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=5)[1]
    packed(cut, root, form=Kept(), workers=2)
    packed(whole, root, form=Kept())
    assert contents(cut) == contents(whole)


def test_other_words_are_refused(tree, tmp_path, monkeypatch):
    root = tree(some_images(6))
    packed(tmp_path / "done", root)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(packing, "_write_report", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        packed(tmp_path / "begun", root)
    for folder in (tmp_path / "done", tmp_path / "begun"):
        for other in ({"form": Kept()}, {"form": ShortSide(quality=91)}, {"per_shard": 4}):
            with pytest.raises(UsageError, match="; give the same options or a new folder"):
                packed(folder, root, **other)
    os.utime(root / "cat" / "00.jpg", ns=(1, 1))
    with pytest.raises(UsageError, match="the images have changed since"):
        packed(tmp_path / "begun", root)
    (root / "new.jpg").write_bytes(jpeg())
    with pytest.raises(UsageError, match="is a pack of other images"):
        packed(tmp_path / "done", root)


def test_folders_that_are_no_pack_are_left_alone(tree, tmp_path):
    root = tree(some_images(4))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    for folder, message in ((tmp_path / "mine", "holds 'thesis.txt' and is not a pack"),
                            (tmp_path / "mine" / "thesis.txt", "cannot be made: .* is not a folder"),
                            (Path("s3://bucket/pack"), "write the pack to one and copy it there"),
                            (root / "cat" / "pack", "is inside .* which is to be packed")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            packed(folder, root)
    for wrong in ({"per_shard": 0}, {"workers": 0}, {"max_unreadable": 2.0}):
        with pytest.raises(UsageError, match="expected"):
            packed(tmp_path / "new", root, **wrong)
    assert not (tmp_path / "new").exists() and contents(tmp_path / "mine") == {"thesis.txt": b""}


def test_two_at_once_are_refused(tree, tmp_path, monkeypatch):
    root = tree(some_images(4))
    monkeypatch.setattr(packing, "_PATIENCE", 0)

    def again(*args) -> None:
        with pytest.raises(MAEError, match="another process is packing into"):
            packed(tmp_path / "pack", root)

    packed(tmp_path / "pack", root, progress=again)


def test_bad_files_are_left_out_and_told(tree, tmp_path):
    bad = {"cat/cut.jpg": jpeg(40, 40)[:400], "cat/text.png": b"no image", "dog/empty.jpg": b""}
    root = tree(some_images(6) | bad)
    with pytest.raises(MAEError, match=r"of 9 images cannot be used, more than .* of 0.001: .*report.json"):
        packed(tmp_path / "pack", root)
    result = packed(tmp_path / "pack", root, max_unreadable=0.5)
    assert {Path(each.name).name for each in result.left_out} == {"cut.jpg", "text.png", "empty.jpg"}
    told = manifest(tmp_path / "pack")
    assert (told.images, told.left_out) == (6, 3) and len(told.shards) == 3
    report = (tmp_path / "pack" / "report.json").read_text()
    assert str(root) not in report  # as little as in pack.json
    assert "starts with b'no image'" in report and "is empty" in report and "cut.jpg is not a whole JPEG" in report
    for names in ("cut", "text", "empty"):
        assert not any(names in name for name in opened(tmp_path / "pack").names)


def test_a_shard_with_files_that_were_broken_is_done_again_once_they_are_not(tree, tmp_path, monkeypatch):
    root = tree(some_images(6))
    read = type(opened(root)).read
    with monkeypatch.context() as patch:  # a disk that was away for a moment
        patch.setattr(type(opened(root)), "read", lambda self, index: b"" if index == 2 else read(self, index))
        with pytest.raises(MAEError, match="1 of 6 images cannot be used"):
            packed(tmp_path / "pack", root)
    packed(tmp_path / "pack", root)
    packed(tmp_path / "whole", root)
    assert contents(tmp_path / "pack") == contents(tmp_path / "whole")


def test_nothing_usable_is_an_error(tree, tmp_path):
    with pytest.raises(MAEError, match="none of 2 images can be used"):
        packed(tmp_path / "pack", tree({"1.jpg": b"a", "2.jpg": b"b"}), max_unreadable=1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_error_and_what_is_done_stays(tree, tmp_path, monkeypatch, workers):
    root, cut = tree(some_images(9)), tmp_path / "pack"
    fsync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 5:  # the second shard's index; in two processes somewhere in the middle
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MAEError, match="cannot be written: No space left on device; finished shards are kept"):
            packed(cut, root, workers=workers)
    assert not (cut / "pack.json").exists() and not list(cut.glob(".packing/*.tar"))
    packed(cut, root)
    packed(tmp_path / "whole", root)
    assert contents(cut) == contents(tmp_path / "whole")


def test_a_process_that_dies_is_explained(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(Kept, "pack", lambda self, original: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(MAEError, match="a packing process died, .* fewer --workers"):
        packed(tmp_path / "pack", tree(some_images(6)), form=Kept(), workers=2)


def test_tar_and_webdataset_read_what_the_index_tells(tree, tmp_path):
    long = "/".join(["a" * 90] * 4)
    names = ["v1.0/a.b.c.jpg", "v1.0/a.b.c.png", "a_b.jpg", f"{long}/x.jpg", "käse/ö.jpg", "UP.JPEG"]
    root = tree({name: png() if name.endswith("png") else jpeg() for name in names})
    packed(tmp_path / "pack", root, form=Kept(), per_shard=100)
    source = opened(tmp_path / "pack")
    with tarfile.open(tmp_path / "pack" / "shard-000000.tar") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == list(source.names)
        for member, row in zip(members, source.index, strict=True):
            assert (member.offset_data, member.size) == (row["offset"], row["length"])
            assert (member.mtime, member.uid, member.gid, member.mode, member.isreg()) == (0, 0, 0, 0o644, True)
            assert tar.extractfile(member).read() == source.read(list(source.names).index(member.name))
    expected = ["v1.0/a_b_c.jpg", "v1.0/a_b_c_2.png", "a_b.jpg", f"{long}/x.jpg", "käse/ö.jpg", "UP.jpg"]
    assert sorted(source.names) == sorted(expected)
    samples = list(webdataset.WebDataset(str(tmp_path / "pack" / "shard-000000.tar"), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == [os.path.splitext(name)[0] for name in source.names]
    for index, sample in enumerate(samples):
        assert source.read(index) in sample.values()


def test_names_lead_nowhere_else(tmp_path):
    for name in ("in/1.jpg", "out.jpg", "in/bad-\udcff.jpg", "in/line\nbreak.jpg", "in/back\\slash.jpg"):
        path = tmp_path / "x" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg())
    lines = ["1.jpg", "../out.jpg", "./1.jpg", str(tmp_path / "x" / "out.jpg"), "back\\slash.jpg"]
    (tmp_path / "x" / "in" / "list.txt").write_text("\n".join(lines))
    packed(tmp_path / "list", tmp_path / "x" / "in" / "list.txt")
    absolute = str(tmp_path / "x" / "out.jpg").lstrip("/")
    expected = ["1.jpg", "out.jpg", "1_2.jpg", absolute, "back%5Cslash.jpg"]
    assert sorted(opened(tmp_path / "list").names) == sorted(expected)
    packed(tmp_path / "folder", tmp_path / "x")
    names = set(opened(tmp_path / "folder").names)
    assert names == {"in/1.jpg", "out.jpg", "in/bad-%FF.jpg", "in/line%0Abreak.jpg", "in/back%5Cslash.jpg"}


def test_a_name_that_is_taken_gets_the_next_number(tree, tmp_path):
    root = tree({"1.jpg": jpeg(), "1.png": png(), "1_2.jpg": jpeg(seed=2)})
    packed(tmp_path / "pack", root, form=Kept())
    assert sorted(opened(tmp_path / "pack").names) == ["1.jpg", "1_2.png", "1_2_2.jpg"]


def test_many_images_of_one_name_are_named_in_no_time(tree, tmp_path):
    (tree({"1.jpg": jpeg()}).parent / "list.txt").write_text("tree/1.jpg\n" * 15_000)
    began = time.process_time()
    keys = open_input(str(tmp_path / "list.txt"), data_root=tmp_path).keys
    assert time.process_time() - began < 5.0
    assert [keys[0], keys[1], keys[14_999]] == ["tree/1", "tree/1_2", "tree/1_15000"]


def test_the_one_folder_of_a_zip_is_looked_through(tmp_path):
    files = {f"top/{part}/{name}/1.png": png(seed=len(name)) for part in ("train", "test") for name in ("a", "bb")}
    packed(tmp_path / "pack", archive(tmp_path / "x.zip", files))
    assert sorted(opened(tmp_path / "pack").names)[0] == "test/a/1.jpg"
    assert len(open_source(str(tmp_path / "pack"), data_root=tmp_path)) == 2


@pytest.mark.parametrize("form", [ShortSide(side=100), Kept(), Raw(side=100)])
def test_images_stand_upright(tree, tmp_path, form):
    root = tree({"turned.jpg": turned(48, 80)})
    original = loaded(opened(root), 0)
    assert original.shape == (80, 48, 3)
    packed(tmp_path / "pack", root, form=form)
    source = opened(tmp_path / "pack")
    info, image = probed(source, 0), loaded(source, 0)
    assert (info.height, info.width) == (80, 48)
    if not isinstance(form, Raw):  # other readers may not know of EXIF; --keep alone leaves it to them
        shown = Image.open(io.BytesIO(source.read(0))).size
        assert shown == ((80, 48) if isinstance(form, Kept) else (48, 80))
    assert np.abs(image.astype(int) - original).mean() < (9 if isinstance(form, ShortSide) else 1e-9)


def test_a_short_side_is_scaled_down_and_never_up(tree, tmp_path):
    files = {"small.jpg": jpeg(20, 30), "large.jpg": jpeg(61, 100), "grey.png": png(40, 50, channels=1)}
    files |= {"cmyk.jpg": encoded(Image.new("CMYK", (20, 20), (10, 20, 30, 0)), "JPEG"), "small.png": png(10, 10)}
    root = tree(files)
    packed(tmp_path / "pack", root, form=ShortSide(side=32))
    images = by_name(opened(tmp_path / "pack"))
    shapes = {name: image.shape for name, image in images.items()}
    assert shapes == {
        "small.jpg": (20, 30, 3), "large.jpg": (32, 52, 3), "grey.jpg": (32, 40, 1), "cmyk.jpg": (20, 20, 3),
        "small_2.jpg": (10, 10, 3),
    }  # fmt: skip
    source = opened(tmp_path / "pack")
    data = {source.names[index]: source.read(index) for index in range(5)}
    assert data["small.jpg"] == files["small.jpg"]
    assert data["large.jpg"] != files["large.jpg"] and data["cmyk.jpg"] != files["cmyk.jpg"]
    scaled = Image.open(root / "large.jpg").resize((52, 32), Image.Resampling.BICUBIC)
    expected = np.asarray(Image.open(io.BytesIO(encoded(scaled, "JPEG", quality=90))), dtype=int)
    assert np.abs(images["large.jpg"] - expected).mean() < 1.5
    packed(tmp_path / "anew", root, form=ShortSide(side=32, quality=40))
    source = opened(tmp_path / "anew")
    sizes = {source.names[index]: len(source.read(index)) for index in range(5)}
    assert all(sizes[name] < len(data[name]) for name in ("small.jpg", "large.jpg"))  # each at the quality asked for


def test_transparency_is_laid_over_white(tree, tmp_path):
    clear = encoded(Image.new("RGBA", (16, 16), (255, 0, 0, 0)))
    packed(tmp_path / "pack", tree({"clear.png": clear}))
    assert (loaded(opened(tmp_path / "pack"), 0) == 255).all()


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
def test_raw_pixels_keep_their_type(tree, tmp_path, kind):
    rng = np.random.default_rng(0)
    scale = {"uint8": 255, "uint16": 65535, "float32": 1}[kind]
    smooth = np.array(Image.fromarray(rng.random((8, 12))).resize((60, 40), Image.Resampling.BICUBIC))
    image = (np.clip(np.stack([smooth] * 4, axis=2), 0, 1) * scale).astype(kind)
    root = tmp_path / "arrays"
    root.mkdir()
    np.save(root / "large.npy", image)
    np.save(root / "small.npy", image[:20, :30])
    packed(tmp_path / "pack", root, form=Raw(side=25))
    images = by_name(opened(tmp_path / "pack"))
    assert images["small.npy"].dtype == kind and (images["small.npy"] == image[:20, :30]).all()
    found = images["large.npy"]
    assert found.dtype == kind and found.shape == (25, 37, 4)
    pixels = torch.from_numpy(image.astype(np.float32)).permute(2, 0, 1)
    expected = F.resize(pixels, [25, 37], interpolation=F.InterpolationMode.BICUBIC, antialias=True)
    if kind != "float32":
        expected = expected.clamp(0, scale)
    away = {"uint8": 1, "uint16": 0.5, "float32": 0}[kind]  # rounded once, or by passes
    assert np.abs(found - expected.permute(1, 2, 0).numpy()).max() <= away


@pytest.mark.parametrize("shape", [(9, 9, 4), (4, 9, 9), (9, 4, 4), (5, 40, 4), (4, 3, 4)])
def test_raw_pixels_of_any_shape_are_read_as_they_were(tree, tmp_path, shape):
    root = tree({})
    root.mkdir(parents=True)
    np.save(root / "x.npy", noise(*shape))
    original = loaded(opened(root), 0)
    packed(tmp_path / "pack", root, form=Raw())
    found = loaded(opened(tmp_path / "pack"), 0)
    assert found.shape == original.shape and (found == original).all()


def test_more_channels_than_rows_are_read_as_they_were_or_refused():
    def original(*shape: int) -> Original:
        return Original(name="x", image=noise(*shape), data=None, nodata=None)

    for shape in ((5, 40, 30), (40, 5, 3), (5, 5, 30)):
        made = Raw().pack(original(*shape))
        assert made.shape == shape and (decode(made.data, name="x") == original(*shape).image).all()
    with pytest.raises(UnreadableImage, match="could not be distinguished from the pixels' axes: use --keep"):
        Raw().pack(original(9, 4, 4))


def test_what_a_jpeg_cannot_hold_is_refused_with_the_way_out(tree, tmp_path):
    for number, image in enumerate((noise(9, 9, 4), noise(9, 9, 3).astype(np.uint16), noise(9, 9, 1) / 3)):
        root = tmp_path / f"arrays{number}"
        root.mkdir()
        np.save(root / "x.npy", image)
        with pytest.raises(UsageError, match=r"a JPEG holds 1 or 3 of uint8: use --keep .* or --raw"):
            packed(tmp_path / f"pack{number}", root)
        assert not (tmp_path / f"pack{number}").exists()
        packed(tmp_path / f"pack{number}", root, form=Kept())
        assert (loaded(opened(tmp_path / f"pack{number}"), 0) == loaded(opened(root), 0)).all()
    for wrong in ({"side": 0}, {"quality": 0}, {"quality": 101}):
        with pytest.raises(UsageError, match="expected"):
            ShortSide(**wrong)


def test_kept_files_keep_their_bytes(tree, tmp_path):
    files = {"1.jpg": turned(), "2.png": png(), "3.webp": encoded(Image.new("RGB", (9, 9)), "WEBP")}
    files |= {"4.tiff": encoded(Image.new("L", (9, 9)), "TIFF"), "5.bmp": encoded(Image.new("RGB", (9, 9)), "BMP")}
    files |= {"6.jpg": png(seed=6)}  # whatever it is called
    packed(tmp_path / "pack", tree(files), form=Kept())
    source = opened(tmp_path / "pack")
    found = {source.names[index]: source.read(index) for index in range(len(source))}
    assert set(found) == {"1.jpg", "2.png", "3.webp", "4.tif", "5.bmp", "6.png"}
    assert sorted(found.values()) == sorted(files.values())


def test_channels_keep_their_names(tmp_path):
    root = tmp_path / "tiles"
    root.mkdir()
    np.save(root / "x.npy", noise(20, 30, 4))
    (root / "channels.txt").write_text("R\nG\nB\nN\n")
    packed(tmp_path / "pack", root, form=Raw())
    source = opened(tmp_path / "pack")
    assert probed(source, 0).names == ("R", "G", "B", "N") == source.channels
    packed(tmp_path / "again", tmp_path / "pack", form=Kept())
    assert probed(opened(tmp_path / "again"), 0).names == ("R", "G", "B", "N")


def tiff(names: str, nodata: str | None = "-9999") -> bytes:
    """A TIFF whose two bands GDAL named."""
    items = "".join(
        f'<Item name="DESCRIPTION" sample="{number}" role="description">{name}</Item>'
        for number, name in enumerate(names)
    )
    tags = [(42112, "s", 0, f"<GDALMetadata>{items}</GDALMetadata>", True)]
    tags += [] if nodata is None else [(42113, "s", 0, nodata, True)]
    stream = io.BytesIO()
    tifffile.imwrite(stream, noise(9, 9, 2).astype(np.float32), extratags=tags, photometric="minisblack",
                     planarconfig="contig")  # fmt: skip
    return stream.getvalue()


def test_names_in_the_files_travel_and_must_agree(tree, tmp_path):
    root = tree({"1.tif": tiff("AB"), "2.tif": tiff("AB")})
    assert probed(opened(root), 0).names == ("A", "B")
    for folder, form in (("keep", Kept()), ("raw", Raw())):
        packed(tmp_path / folder, root, form=form)
        info = probed(opened(tmp_path / folder), 1)
        assert (info.names, info.nodata) == (("A", "B"), "-9999")
    with pytest.raises(UsageError, match="marks -9999 as nodata; scaling would mix it .* --keep"):
        packed(tmp_path / "scaled", root, form=Raw(side=5))
    (root / "3.tif").write_bytes(tiff("BA"))
    with pytest.raises(UsageError, match="has the channels .* in some files and the channels .* channels.txt"):
        packed(tmp_path / "other", root, form=Raw())


def test_names_that_differ_beyond_those_looked_at_are_refused(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "_LOOKED_AT", 1)
    with pytest.raises(UsageError, match=r"has .* others have .* one channels.txt"):
        packed(tmp_path / "other", tree({"1.tif": tiff("AB"), "2.tif": tiff("BA")}), form=Raw())


@pytest.mark.parametrize("first", ["-9999", None])
def test_one_value_means_nodata_in_a_pack_of_pixels(tree, tmp_path, monkeypatch, first):
    monkeypatch.setattr(packing, "_LOOKED_AT", 1)
    root = tree({f"{number}.tif": tiff("AB", first if number else "-32768") for number in range(4)})
    with pytest.raises(UsageError, match=r"marks .* as nodata, others .* use --keep") as refused:
        for number in range(4):  # whichever is looked at
            monkeypatch.setattr(packing, "_ORDER_SEED", number)
            packed(tmp_path / "raw", root, form=Raw())
            shutil.rmtree(tmp_path / "raw")
    assert "-32768" in str(refused.value)
    assert packed(tmp_path / "keep", root, form=Kept()).images == 4


def test_a_small_image_with_nodata_is_no_jpeg_either(tree, tmp_path):
    stream = io.BytesIO()
    tifffile.imwrite(stream, noise(9, 9)[..., 0], extratags=[(42113, "s", 0, "0", True)], photometric="minisblack")
    with pytest.raises(UsageError, match="marks 0 as nodata; JPEG's loss would mix it with measurements: use --keep"):
        packed(tmp_path / "pack", tree({"1.tif": stream.getvalue()}))


def test_more_shards_than_a_pack_can_list_are_refused_before_any_work(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "MAX_MANIFEST", 1100)
    with pytest.raises(UsageError, match="--per-shard is 3, which makes 4 shards; expected 5 images or more"):
        packed(tmp_path / "pack", tree(some_images(10)))
    assert not (tmp_path / "pack").exists()


def test_a_pack_that_lost_a_file_is_not_called_whole(tree, tmp_path):
    root = tree(some_images(4))
    packed(tmp_path / "pack", root)
    path = tmp_path / "pack" / "shard-000001.tar"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MAEError, match=r"shard-000001.tar is missing or cut short; put it back"):
        packed(tmp_path / "pack", root)


def test_what_another_process_has_just_finished_is_not_done_again(tree, tmp_path, monkeypatch):
    root, done = tree(some_images(4)), tmp_path / "done"
    packed(done, root)

    class Waited(packing.FileLock):
        def __enter__(self):
            shutil.copytree(done, tmp_path / "pack", dirs_exist_ok=True)
            return super().__enter__()

    monkeypatch.setattr(packing, "FileLock", Waited)
    assert packed(tmp_path / "pack", root).was_there
    assert contents(tmp_path / "pack") == contents(done)


def test_known_sets_come_with_their_classes(tmp_path):
    packed(tmp_path / "pack", "builtin:digits", per_shard=500)
    packed(tmp_path / "keep", "builtin:digits", per_shard=500, form=Kept())
    data = open_labelled(str(tmp_path / "keep"), data_root=tmp_path)
    expected = open_labelled("builtin:digits", data_root=tmp_path)
    assert data.class_names == expected.class_names
    for part in ("train", "test"):
        found, known = getattr(data, part), getattr(expected, part)
        assert len(found.source) == len(known.source)
        assert torch.bincount(found.labels).tolist() == torch.bincount(known.labels).tolist()
        places = {name: index for index, name in enumerate(found.source.names)}
        for number in range(0, len(known.source), 37):
            index = places[f"{part}/{known.labels[number]}/{number:06d}.png"]
            assert (loaded(found.source, index) == loaded(known.source, number)).all()
    assert open_source(str(tmp_path / "pack"), data_root=tmp_path).note.startswith("train/ only")


def test_arrays_that_png_cannot_hold_are_kept_as_npy():
    for image, extension in ((noise(9, 9, 3), "png"), (noise(9, 9, 1).astype(np.uint16), "png"),
                             (noise(9, 9, 2), "npy"), (noise(9, 9, 1).astype(np.float32), "npy")):  # fmt: skip
        made = Kept().pack(Original(name="x", image=image, data=None, nodata=None))
        assert made.extension == extension
