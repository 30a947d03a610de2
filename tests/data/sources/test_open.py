"""Sources: what is found, in which order, what is left out, and what each error says."""

import os
import re
import tracemalloc
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from data.pictures import SHARED, archive, loaded, names_of, png

from mae.data.decode.limits import UnreadableImage
from mae.data.items import Names
from mae.data.sources import memory as arrays
from mae.data.sources import open as opening
from mae.data.sources.labels import hold_out
from mae.data.sources.open import open_held_out, open_labelled, open_source
from mae.errors import MAEError, UsageError


def test_names_are_kept_as_they_are():
    names = Names(["a.png", "", "ä/ö.png", "bad-\udcff.png"])
    assert list(names) == ["a.png", "", "ä/ö.png", "bad-\udcff.png"]
    assert list(names.take(np.array([3, 0]))) == ["bad-\udcff.png", "a.png"]


def test_folder_is_sorted_nested_and_without_hidden_files(tree, monkeypatch):
    wanted = ["B.PNG", "a.jpg", "deep-1.bmp", "deep/er/z.webp", "deep/x.tiff"]
    others = [".hidden.png", ".git/a.png", "__MACOSX/a.png", "readme.md", "deep/.DS_Store"]
    root = tree({name: png() for name in [*wanted, *others]})
    expected = open_source(str(root), data_root=root)
    assert names_of(expected) == wanted and expected.note == "folder, 5 files"
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))
    assert names_of(open_source(str(root), data_root=root)) == wanted


def test_images_in_formats_that_are_not_read_are_told(tree, tmp_path):
    others = ["b.HEIC", "deep/c.heic", "d.gif", "labels.txt", ".e.gif", "__MACOSX/._b.heic"]
    root = tree({name: png() for name in ["a.png", *others]})
    assert open_source(str(root), data_root=root).note == "folder, 1 file; not read: 2 .heic, 1 .gif"
    place = archive(tmp_path / "all.zip", {name: png() for name in ["a.png", *others]})
    assert open_source(str(place), data_root=root).note == "zip, 1 file; not read: 2 .heic, 1 .gif"


def test_archives_beside_images_are_told(tree, tmp_path):
    files = {name: png() for name in ["a.png", "x.tar", "deep/y.TAR", "z.zip", "masks.tar.gz"]}
    root = tree(files)
    assert open_source(str(root), data_root=root).note == "folder, 1 file; not read: 2 .tar, 1 .gz, 1 .zip"
    place = archive(tmp_path / "all.zip", files)
    assert open_source(str(place), data_root=root).note == "zip, 1 file; not read: 2 .tar, 1 .gz, 1 .zip"


def test_loops_of_links_end(tree):
    root = tree({"a/1.png": png(), "b/2.png": png()})
    (root / "a" / "up").symlink_to(root)
    (root / "a" / "dangling.png").symlink_to(root / "nowhere")
    source = open_source(str(root), data_root=root)
    assert names_of(source) == ["a/1.png", "b/2.png"]
    linked = "1 link to folders listed once already skipped: a/up; 1 link to nothing skipped: a/dangling.png"
    assert source.note == f"folder, 2 files; {linked}"


def test_a_link_through_a_file_leads_nowhere(tree):
    root = tree({"a.png": png(), "readme": b""})
    (root / "b.png").symlink_to("readme/b.png")
    assert names_of(open_source(str(root), data_root=root)) == ["a.png"]


def test_systems_own_folders_are_passed_over(tree):
    root = tree({name: png() for name in ("a.png", "@eaDir/a.png/t.jpg", "$RECYCLE.BIN/b.png", "d/#recycle/c.png")})
    assert names_of(open_source(str(root), data_root=root)) == ["a.png"]


def test_the_folder_with_the_parts_is_named_where_one_above_it_is_given(tree):
    root = tree({"set/train/a.png": png(), "set/test/b.png": png(), "c.png": png()})
    source = open_source(str(root), data_root=root)
    assert len(source) == 3 and source.note.endswith(
        f"; to leave test images out give {root / 'set'}, which holds train/"
    )


def test_a_zip_is_read_as_it_would_be_extracted(tmp_path):
    path = archive(tmp_path / "x.zip", {"./a/0.png": png(), "a//1.png": png(), "../b.png": png(), "/c.png": png()})
    with zipfile.ZipFile(path, "a") as writer:
        with pytest.warns(UserWarning, match="Duplicate"):
            writer.writestr("./a/0.png", png(20, 20))
        link = zipfile.ZipInfo("a/2.png")
        link.external_attr = 0o120777 << 16
        writer.writestr(link, b"0.png")
    source = open_source(str(path), data_root=tmp_path)
    assert names_of(source) == ["a/0.png", "a/1.png"] and loaded(source, 0).shape == (20, 20, 3)
    assert source.note == "zip, 2 files; skipped: 1 links, 2 names that lead out, 1 older versions of a file"


def test_splits_are_found_without_lists_of_folders(tree):
    source = open_source(str(tree({"a/b/0.png": png()})), data_root=tree)
    many = 20_000
    names = Names(f"{number % 7}/b/{number:06d}.png" for number in range(many))
    large = replace(source, names=names, sizes=np.zeros(many, np.int64), times=np.zeros(many, np.int64))
    tracemalloc.start()
    kept = opening._training_split(large)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept) == many and peak < 40 * many


def test_a_zip_that_windows_made_has_folders(tmp_path):
    path = archive(tmp_path / "x.zip", {f"{label}\\{n}.png": png() for label in ("cat", "dog") for n in range(5)})
    assert open_labelled(str(path), data_root=tmp_path).class_names == ("cat", "dog")


def test_pipes_are_passed_over(tree):
    root = tree({"1.png": png()})
    os.mkfifo(root / "2.png")
    assert len(open_source(str(root), data_root=root)) == 1


def test_train_directory_alone_is_used(tree):
    root = tree({"train/cat/1.png": png(), "train/dog/1.png": png(), "test/cat/9.png": png(), "top.png": png()})
    source = open_source(str(root), data_root=root)
    assert names_of(source) == ["train/cat/1.png", "train/dog/1.png"]
    assert source.note == "train/ only, 2 files; left out: test/ (1 file), top level (1 file)"


@pytest.mark.parametrize("top", ["", "CIFAR/"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_is_read_in_place(tmp_path, top, method):
    files = {f"{top}train/{name}.png": png(seed=number) for number, name in enumerate("bac")}
    path = archive(tmp_path / "x.zip", {**files, f"{top}test/t.png": png(), "__MACOSX/train/._a.png": b"x"}, method)
    source = open_source(str(path), data_root=tmp_path)
    assert names_of(source) == sorted(files)
    assert "left out: test/ (1 file)" in source.note
    for index, name in enumerate(sorted(files)):
        (tmp_path / "one.png").write_bytes(files[name])
        assert np.array_equal(loaded(source, index), loaded(open_source(str(tmp_path), data_root=tmp_path), 0))
        assert source.item_name(index) == f"{path}/{name}"
    assert set(os.listdir(tmp_path)) == {"x.zip", "one.png"}


@pytest.mark.parametrize(("says", "told"), [(None, "bomb.png starts with"), (0, "bomb.png is empty")])
def test_zip_bomb_member_is_refused_small(tmp_path, says, told):
    path = archive(tmp_path / "x.zip", {"bomb.png": bytes(100 << 20), "good.png": png()})
    if says is not None:
        raw = bytearray(path.read_bytes())
        entry = raw.index(b"PK\1\2")
        raw[entry + 24 : entry + 28] = says.to_bytes(4, "little")
        path.write_bytes(raw)
    source = open_source(str(path), data_root=tmp_path)
    tracemalloc.start()
    with pytest.raises(UnreadableImage, match=told):
        loaded(source, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert loaded(source, 1).shape == (12, 10, 3)


def test_zip_member_larger_than_it_says_is_refused(tmp_path):
    data = png(64, 64)
    path = archive(tmp_path / "x.zip", {"liar.png": data})
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"PK\1\2")
    raw[entry + 24 : entry + 28] = (len(data) // 2).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UnreadableImage, match="liar.png does not match its checksum"):
        loaded(open_source(str(path), data_root=tmp_path), 0)


def test_zip_member_over_the_limit_is_refused_by_its_entry(tmp_path):
    path = archive(tmp_path / "x.zip", {"huge.png": png()})
    raw = bytearray(path.read_bytes())
    entry = raw.rindex(b"PK\1\2")
    raw[entry + 24 : entry + 28] = (600 << 20).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UnreadableImage, match="huge.png has 600 MiB; expected 512 MiB"):
        loaded(open_source(str(path), data_root=tmp_path), 0)


def test_damaged_zip_member_is_found_by_its_checksum(tmp_path):
    data = png(64, 64)
    path = archive(tmp_path / "x.zip", {"a.png": data}, zipfile.ZIP_STORED)
    raw = bytearray(path.read_bytes())
    raw[raw.index(data) + len(data) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UnreadableImage, match="a.png does not match its checksum"):
        loaded(open_source(str(path), data_root=tmp_path), 0)


def test_zip_errors(tmp_path):
    (tmp_path / "broken.zip").write_bytes(b"PK\3\4 and nothing more")
    with pytest.raises(UsageError, match="broken.zip is not a whole zip archive"):
        open_source(str(tmp_path / "broken.zip"), data_root=tmp_path)
    path = archive(tmp_path / "secret.zip", {"a.png": png()})
    raw = bytearray(path.read_bytes())
    raw[raw.rindex(b"PK\1\2") + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(UsageError, match="secret.zip is encrypted"):
        open_source(str(path), data_root=tmp_path)
    with pytest.raises(UsageError, match=r"text.zip holds no images: looked for .jpg .*; found 1 .txt"):
        open_source(str(archive(tmp_path / "text.zip", {"a.txt": b"x"})), data_root=tmp_path)


def test_unknown_zip_method_is_an_unreadable_image(tmp_path):
    path = archive(tmp_path / "x.zip", {"a.png": png()}, zipfile.ZIP_LZMA)
    with pytest.raises(UnreadableImage, match="zip method 14; expected stored or deflate"):
        loaded(open_source(str(path), data_root=tmp_path), 0)


def test_list_file(tree):
    root = tree({"pictures/b.png": png(seed=1), "pictures/a.png": png(seed=2), "sets/list.txt": b""})
    listing = root / "sets" / "list.txt"
    listing.write_text(f"# two\n\n../pictures/b.png\n{root}/pictures/a.png\n")
    source = open_source(str(listing), data_root=root)
    assert len(source) == 2 and source.note == "list, 2 files"
    assert loaded(source, 0).shape == (12, 10, 3)
    listing.write_text("# none\n")
    with pytest.raises(UsageError, match="lists no images"):
        open_source(str(listing), data_root=root)
    listing.write_text("../pictures/b.png\n\nmissing.png\n")
    with pytest.raises(UsageError, match="line 3: missing.png is not a file"):
        open_source(str(listing), data_root=root)


def test_list_file_as_find_writes_it(tree):
    root = tree({f"{part}/{kind}/a.png": png() for part in ("train", "test") for kind in ("cat", "dog")})
    names = [f"./{path.relative_to(root)}" for path in sorted(root.rglob("*.png"))]
    (root / "list.txt").write_text("\n".join(names))
    assert open_labelled(str(root / "list.txt"), data_root=root).class_names == ("cat", "dog")


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("parts", [("train/", "test/"), ("",)])
def test_the_class_in_a_list_is_the_folder_in_which_its_paths_differ(tree, absolute, parts):
    images = [f"images/{part}{kind}/{n}.png" for part in parts for kind in ("cat", "dog") for n in (0, 1)]
    root = tree({**dict.fromkeys(images, png()), "sets/list.txt": b""})
    above = str(root) if absolute else ".."
    (root / "sets" / "list.txt").write_text("\n".join(f"{above}/{image}" for image in images))
    data = open_labelled(str(root / "sets" / "list.txt"), data_root=root)
    assert data.class_names == ("cat", "dog") and len(data.train.source) == len(data.test.source) == 2 * len(parts)
    assert len(open_source(str(root / "sets" / "list.txt"), data_root=root)) == 4


def test_images_of_a_list_that_lie_in_one_folder_are_of_one_class(tree):
    root = tree({**dict.fromkeys(("images/cat/0.png", "images/cat/1.png"), png()), "list.txt": b""})
    (root / "list.txt").write_text("images/cat/0.png\nimages/cat/1.png")
    with pytest.raises(UsageError, match="only the class 'cat'"):
        open_labelled(str(root / "list.txt"), data_root=root)


def test_list_file_with_a_byte_order_mark(tree):
    root = tree({"a.png": png(), "list.txt": b"\xef\xbb\xbfa.png\r\n"})
    assert names_of(open_source(str(root / "list.txt"), data_root=root)) == ["a.png"]


def test_zip_with_an_impossible_size_is_an_error(tmp_path):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as writer:
        entry = zipfile.ZipInfo("a.png")
        writer.writestr(entry, png())
        entry.file_size = 2**64 - 1
    with pytest.raises(UsageError, match="x.zip is not a whole zip archive: a.png has an impossible size"):
        open_source(str(path), data_root=tmp_path)


def test_what_is_missing_in_a_folder_that_cannot_be_listed_is_told(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(type(tmp_path), "iterdir", refuse)  # as the folder of all homes may be
    with pytest.raises(UsageError, match="nodes does not exist; expected a path or one of cifar10"):
        open_source(str(tmp_path / "nodes"), data_root=tmp_path)


def test_usage_errors_say_what_was_found(tree):
    root = tree({"notes/a.txt": b"x", "notes/b.txt": b"x", "notes/c": b"x"})
    with pytest.raises(UsageError, match=r"notes holds no images: looked for .*\.png.*; found 2 .txt, 1 without ext"):
        open_source(str(root / "notes"), data_root=root)
    root = tree({"phone/IMG_1.HEIC": b"x"})
    with pytest.raises(UsageError, match=r"found 1 \.heic; convert those to PNG, JPEG or TIFF first"):
        open_source(str(root / "phone"), data_root=root)
    with pytest.raises(UsageError, match="cifar does not exist; did you mean 'cifar10'"):
        open_source("cifar", data_root=root)
    with pytest.raises(UsageError, match=f"did you mean '{root}/notes'"):
        open_source(f"{root}/nodes", data_root=root)
    with pytest.raises(UsageError, match="a.txt"):
        open_source(str(root / "notes" / "a.txt"), data_root=root)
    with pytest.raises(UsageError, match="c is a file, not a source of images"):
        open_source(str(root / "notes" / "c"), data_root=root)
    with pytest.raises(UsageError, match=f"imagenet is expected in {root}/imagenet"):
        open_source("imagenet", data_root=root)


def test_vanished_file_is_an_unreadable_image(tree):
    root = tree({"a.png": png()})
    source = open_source(str(root), data_root=root)
    (root / "a.png").unlink()
    with pytest.raises(UnreadableImage, match="a.png cannot be read: No such file"):
        loaded(source, 0)


def test_hold_out_takes_a_fifth_of_each_class_by_name_alone():
    names = [f"{label}/{number}.png" for label in range(3) for number in range(20)]
    labels = np.repeat(np.arange(3), 20)
    test = hold_out(names, labels)
    assert [int(test[labels == label].sum()) for label in range(3)] == [4, 4, 4]
    order = np.random.default_rng(0).permutation(60)
    assert np.array_equal(hold_out([names[i] for i in order], labels[order]), test[order])
    assert hold_out(["a", "b", "c"], np.array([0, 1, 1])).tolist()[0] is False


def test_hold_out_does_not_go_through_all_labels_for_each_class():
    passes: list[object] = []

    class Labels(np.ndarray):
        def __eq__(self, other):
            passes.append(other)
            return super().__eq__(other)

    labels = np.repeat(np.arange(200), 5)
    names = [str(number) for number in range(len(labels))]
    found = hold_out(names, labels.view(Labels))
    assert np.array_equal(found, hold_out(names, labels)) and len(passes) <= 1
    assert np.bincount(labels[found]).tolist() == [1] * 200


def test_labelled_tree_with_and_without_a_test_part(tree):
    files = {f"{part}/{name}/{n}.png": png() for part in ("train", "val") for name in ("dog", "cat") for n in range(3)}
    root = tree(files)
    data = open_labelled(str(root), data_root=root)
    assert data.class_names == ("cat", "dog")
    for split, part in ((data.train, "train"), (data.test, "val")):
        assert names_of(split.source) == [f"{part}/{name}/{n}.png" for name in ("cat", "dog") for n in range(3)]
        assert split.labels.tolist() == [0, 0, 0, 1, 1, 1]
    halves = open_labelled(str(root / "train"), data_root=root)
    assert "a fifth of each class is held out" in halves.note
    train, test = names_of(halves.train.source), names_of(halves.test.source)
    assert len(train) == 4 and len(test) == 2 and not set(train) & set(test)
    for split in (halves.train, halves.test):
        named = [halves.class_names[label] for label in split.labels.tolist()]
        assert [name.split("/")[0] for name in names_of(split.source)] == named


def test_labelled_zip(tmp_path):
    files = {f"set/{part}/{name}/1.png": png() for part in ("train", "test") for name in ("b", "a")}
    data = open_labelled(str(archive(tmp_path / "x.zip", files)), data_root=tmp_path)
    assert data.class_names == ("a", "b") and data.test.labels.tolist() == [0, 1]
    assert names_of(data.train.source) == ["set/train/a/1.png", "set/train/b/1.png"]


@pytest.mark.parametrize("part", ["test", "val", "Validation"])
def test_images_to_judge_by_are_the_test_part_where_there_is_one(tree, tmp_path, part):
    files = {f"{top}/{name}/1.png": png() for top in ("train", part) for name in ("b", "a")}
    wanted = [f"{part}/{name}/1.png" for name in "ab"]
    root = tree(files | {"top.png": png()})
    source = open_held_out(str(root), data_root=root)
    assert names_of(source) == wanted and source.note == "test split, 2 files"
    packed = archive(tmp_path / "x.zip", {f"set/{name}": data for name, data in files.items()})
    assert names_of(open_held_out(str(packed), data_root=tmp_path)) == [f"set/{name}" for name in wanted]


def test_images_to_judge_by_are_all_where_no_part_is_told(tree):
    """Also where the classes could not be divided, as a class of one image: no labels are needed."""
    root = tree({"flat/2.png": png(), "flat/1.png": png(), "one/cat/1.png": png(), "unlabelled/test/1.png": png(),
                 "unlabelled/2.png": png(), "half/train/cat/1.png": png(), "notes/a.txt": b"x"})  # fmt: skip
    cases = {"flat": ["1.png", "2.png"], "one": ["cat/1.png"], "unlabelled": ["test/1.png"]}
    for name, wanted in (cases | {"half": ["train/cat/1.png"]}).items():
        assert names_of(open_held_out(str(root / name), data_root=root)) == wanted
    (root / "list.txt").write_text("flat/2.png\nflat/1.png\n")
    assert len(open_held_out(str(root / "list.txt"), data_root=root)) == 2
    with pytest.raises(UsageError, match="notes holds no images"):
        open_held_out(str(root / "notes"), data_root=root)
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        open_held_out("cifar", data_root=root)


def test_images_to_judge_by_of_known_sets(monkeypatch, tmp_path):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", _Downloaded)
    assert open_held_out("cifar10", data_root=tmp_path).note == "test split, 2 images"
    for name in ("builtin:digits", "builtin:photos"):
        expected = open_labelled(name, data_root=tmp_path).test.source
        assert open_held_out(name, data_root=tmp_path).version() == expected.version()


def test_images_outside_class_folders_are_counted(tree):
    root = tree({"mixed/cat/1.png": png(), "mixed/dog/1.png": png(), "mixed/loose.png": png()})
    with pytest.raises(UsageError, match="mixed has 1 of 3 images outside class folders: .*loose.png is in none"):
        open_labelled(str(root / "mixed"), data_root=root)


def test_labelled_errors(tree):
    root = tree({"flat/1.png": png(), "one/cat/1.png": png(), "odd/train/cat/1.png": png(),
                 "odd/train/dog/1.png": png(), "odd/test/cow/1.png": png()})  # fmt: skip
    with pytest.raises(UsageError, match="flat has no class folders: .*1.png is in none"):
        open_labelled(str(root / "flat"), data_root=root)
    with pytest.raises(UsageError, match="only the class 'cat'.*two or more"):
        open_labelled(str(root / "one"), data_root=root)
    with pytest.raises(UsageError, match="test class 'cow' is not among"):
        open_labelled(str(root / "odd"), data_root=root)


def test_parts_must_hold_the_same_classes(tree):
    files = {f"{name}/{number}.png": png() for name in ("cat", "dog") for number in range(3)}
    whole, odd = ({f"{top}/{name}": data for name, data in files.items()} for top in ("whole", "odd/train"))
    root = tree(whole | {"whole/elk/0.png": png()} | odd | {"odd/test/cat/9.png": png()})
    with pytest.raises(UsageError, match="whole: the class 'elk' has one image; expected at least two, .*add some"):
        open_labelled(str(root / "whole"), data_root=root)
    with pytest.raises(UsageError, match="odd: the training class 'dog' has no test image; add some, or remove the cl"):
        open_labelled(str(root / "odd"), data_root=root)


@pytest.mark.parametrize(
    ("trained", "tested"), [("Cat", "cat"), ("caf\u00e9", "cafe\u0301"), ("STRASSE", "stra\u00dfe")]
)
def test_classes_that_differ_in_case_or_unicode_form_alone_are_named_in_plain_letters(tree, trained, tested):
    root = tree({f"train/{trained}/0.png": png(), "train/dog/0.png": png(), f"test/{tested}/0.png": png()})
    wanted = f"{ascii(trained)} is, and {ascii(tested)} differs from it in case or Unicode form: give both the same"
    with pytest.raises(UsageError, match=re.escape(wanted)):
        open_labelled(str(root), data_root=root)


def test_two_specs_are_training_and_test_part(tree, tmp_path):
    def below(top: str, classes: tuple[str, ...], count: int) -> dict[str, bytes]:
        return {f"{top}{name}/{number}.png": png() for name in classes for number in range(count)}

    both = ("cat", "dog")
    root = tree(below("plain/", both, 2) | below("full/train/", both, 3) | below("full/validation/", both, 1)
                | below("fewer/", ("cat",), 2) | below("more/", (*both, "elk"), 1) | {"flat/1.png": png()})  # fmt: skip
    packed = str(archive(tmp_path / "x.zip", below("set/train/", both, 1) | below("set/test/", both, 2)))
    plain, full, fewer, more = (str(root / name) for name in ("plain", "full", "fewer", "more"))
    whole, train, test = ([f"{top}{name}/{n}.png" for name in both for n in range(count)]
                          for top, count in (("", 2), ("train/", 3), ("validation/", 1)))  # fmt: skip
    cases = [(plain, full, whole, test), (full, plain, train, whole), (full, full, train, test)]
    cases += [(plain, packed, whole, [f"set/test/{name}" for name in whole])]
    cases += [(packed, plain, ["set/train/cat/0.png", "set/train/dog/0.png"], whole)]
    for first, second, trained, tested in cases:
        data = open_labelled(first, data_root=root, test=second)
        assert names_of(data.train.source) == trained and names_of(data.test.source) == tested
        for split in (data.train, data.test):
            named = [data.class_names[label] for label in split.labels.tolist()]
            assert named == [name.split("/")[-2] for name in names_of(split.source)]
        assert data.note == f"{len(trained)} training and {len(tested)} test images"
    with pytest.raises(UsageError, match="fewer: the training class 'dog' has no test image"):
        open_labelled(plain, data_root=root, test=fewer)
    with pytest.raises(UsageError, match="more: the test class 'elk' is not among the training classes; remove it"):
        open_labelled(plain, data_root=root, test=more)
    with pytest.raises(UsageError, match="fewer holds only the class 'cat'"):
        open_labelled(fewer, data_root=root, test=plain)
    with pytest.raises(UsageError, match="flat has no class folders"):
        open_labelled(plain, data_root=root, test=str(root / "flat"))
    for pair in (("cifar10", plain), (plain, "builtin:digits")):
        with pytest.raises(UsageError, match="(cifar10|digits) has its own test split; give it alone"):
            open_labelled(pair[0], data_root=root, test=pair[1])


class _Downloaded:
    data = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    targets = [1, 0]
    classes = ["a", "b"]

    def __init__(self, root: str, *, train: bool, download: bool) -> None:
        assert download


def test_downloaded_set(monkeypatch, tmp_path):
    monkeypatch.setattr("torchvision.datasets.CIFAR10", _Downloaded)
    source = open_source("cifar10", data_root=tmp_path)
    assert len(source) == 2 and source.item_name(1) == "cifar10 train[1]"
    assert np.array_equal(loaded(source, 1), _Downloaded.data[1])
    data = open_labelled("cifar10", data_root=tmp_path)
    assert data.train.labels.tolist() == [1, 0] and data.class_names == ("a", "b")
    assert arrays.cifar10(tmp_path, train=False)[0].note == "test split, 2 images"


def test_failed_download_says_where_the_files_should_lie(monkeypatch, tmp_path):
    def fails(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fails)
    monkeypatch.setattr("torchvision.datasets.STL10", fails)
    for name, file in (("cifar10", "cifar-10-python.tar.gz"), ("stl10", "stl10_binary.tar.gz")):
        with pytest.raises(MAEError, match=f"no network.*put {file} into {tmp_path}"):
            open_source(name, data_root=tmp_path)


@pytest.mark.skipif(not (SHARED / "cifar10.zip").exists(), reason="needs shared/data/cifar10.zip")
def test_cifar10_zip():
    data = open_labelled(str(SHARED / "cifar10.zip"), data_root=SHARED)
    assert data.train.labels.bincount().tolist() == [5000] * 10
    assert data.test.labels.bincount().tolist() == [1000] * 10
    assert loaded(data.train.source, 49_999).shape == (32, 32, 3)
