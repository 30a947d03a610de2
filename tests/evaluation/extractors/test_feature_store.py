"""The store of features: computed once, right again after whatever happened to it, never half there."""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import Pictures, noise, png
from PIL import Image
from rich.console import Console
from torch import Tensor

from mae.data.inspect.exact_duplicates import contents_of
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.evaluation.extractors.batches import normalised_batches
from mae.evaluation.extractors.extractor import PATCHES, Extractor
from mae.evaluation.extractors.feature_store import FeatureStore
from mae.evaluation.extractors.opened import Opened
from mae.models.preprocess import Preprocessing
from mae.training.distributed import World

CPU = torch.device("cpu")
PLAIN = Preprocessing(img_size=(8, 8))


class Counting:
    """A function that counts how many images it was given."""

    def __init__(self, patches: bool = True) -> None:
        self.count, self.patches = 0, patches

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        self.count += len(images)
        named = {"mean": images.mean(dim=(2, 3)), "first": images[:, :, 0, 0]}
        return {**named, PATCHES: images.flatten(2).transpose(1, 2)} if self.patches else named


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images").mkdir()
    for number in range(7):
        (tmp_path / "images" / f"{number}.png").write_bytes(png(20, 18, seed=number))
    return tmp_path / "images"


def store(tmp_path: Path) -> FeatureStore:
    return FeatureStore(tmp_path / "features", device=CPU, console=Console(quiet=True), world=World())


def opened(folder: Path, **options) -> Opened:
    return Opened(open_source(str(folder), data_root=folder), **options)


def extractor(encode, **changes) -> Extractor:
    return replace(Extractor(name="f", encode=encode, preprocessing=PLAIN, identity="one"), **changes)


def content_entry(features: Path) -> Path:
    """The one folder that tells what the images hold."""
    (key,) = (path for path in features.glob("*/key.json") if '"kind": "content"' in path.read_text())
    assert {path.name for path in key.parent.iterdir()} == {"digests.npy", "numbers.npy", "outlines.npy", "key.json"}
    return key.parent


def beside_content(features: Path) -> list[Path]:
    """All that is kept beside it, whatever it is."""
    return sorted(set(features.iterdir()) - {content_entry(features)})


def test_rows_are_the_images_in_order(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mae.evaluation.extractors.batches.BATCH_SIZE", 3)
    source, encode = opened(folder), Counting()
    found = store(tmp_path).features(extractor(encode), source)
    images = torch.cat(list(normalised_batches(source.images((3, None, None, None)), PLAIN, device=CPU)))
    assert found.numbers.tolist() == list(range(7)) and sorted(found.arrays) == ["first", "mean"]
    torch.testing.assert_close(found.arrays["mean"], images.mean(dim=(2, 3)))
    torch.testing.assert_close(found.arrays["first"], images[:, :, 0, 0])
    patches = store(tmp_path).features(extractor(encode), source, patches=True)
    assert list(patches.arrays) == [PATCHES] and patches.arrays[PATCHES].dtype == torch.float16
    torch.testing.assert_close(patches.arrays[PATCHES], images.flatten(2).transpose(1, 2).half())


def test_computed_once_and_read_again_mapped(folder, tmp_path):
    encode = Counting()
    first = store(tmp_path).features(extractor(encode), opened(folder))
    second = store(tmp_path).features(extractor(encode, name="another name"), opened(folder))
    assert encode.count == 7 and torch.equal(first.arrays["mean"], second.arrays["mean"])
    assert str(tmp_path / "features") in Path("/proc/self/maps").read_text()
    second.arrays["mean"][0] = 9.0  # stays in memory
    assert not (store(tmp_path).features(extractor(encode), opened(folder)).arrays["mean"] == 9).any()
    assert first.arrays["mean"].dtype == torch.float32


@pytest.mark.parametrize(
    "changed",
    [
        {"identity": "two"},
        {"preprocessing": replace(PLAIN, img_size=(7, 8))},
        {"preprocessing": replace(PLAIN, crop_share=1.0)},
        {"preprocessing": replace(PLAIN, interpolation="bilinear")},
        {"preprocessing": replace(PLAIN, in_chans=1, mean=(0.0,), std=(1.0,))},
        {"preprocessing": replace(PLAIN, mean=(0.5,) * 3)},
    ],
)
def test_what_decides_features_makes_new_ones(folder, tmp_path, changed):
    encode = Counting()
    old = store(tmp_path).features(extractor(encode), opened(folder))
    new = store(tmp_path).features(extractor(encode, **changed), opened(folder))
    assert encode.count == 14
    assert "identity" in changed or not torch.equal(old.arrays["first"], new.arrays["first"])
    store(tmp_path).features(extractor(encode), opened(folder))
    assert encode.count == 14


def test_a_changed_file_makes_new_ones(folder, tmp_path):
    encode = Counting()
    old = store(tmp_path).features(extractor(encode), opened(folder)).arrays["mean"]
    path = folder / "3.png"
    before = path.stat()
    path.write_bytes(png(20, 18, seed=99))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    new = store(tmp_path).features(extractor(encode), opened(folder)).arrays["mean"]
    assert encode.count == 14
    assert [row for row in range(7) if not torch.equal(old[row], new[row])] == [3]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


DAMAGE = {
    "cut": lambda folder: truncate(folder / "mean.npy"),
    "emptied": lambda folder: (folder / "mean.npy").write_bytes(b""),
    "no numpy file": lambda folder: (folder / "mean.npy").write_bytes(b"garbage" * 100),
    "gone": lambda folder: (folder / "first.npy").unlink(),
    "no key": lambda folder: (folder / "key.json").unlink(),
    "cut key": lambda folder: truncate(folder / "key.json"),
    "other key": lambda folder: (folder / "key.json").write_text("{}"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_computed_again(folder, tmp_path, damage):
    encode = Counting()
    whole = {name: array.clone() for name, array in _arrays(tmp_path, encode, folder).items()}
    (stored,) = beside_content(tmp_path / "features")
    DAMAGE[damage](stored)
    again = _arrays(tmp_path, encode, folder)
    assert encode.count == 14 and all(torch.equal(whole[name], again[name]) for name in ("mean", "first"))
    assert beside_content(tmp_path / "features") == [stored]


@pytest.mark.parametrize("name", ["digests.npy", "numbers.npy", "key.json"])
def test_damaged_content_is_told_again_and_the_features_stand(folder, tmp_path, name):
    encode = Counting()
    _arrays(tmp_path, encode, folder)
    content = content_entry(tmp_path / "features")
    whole = (content / name).read_bytes()
    truncate(content / name)
    found = store(tmp_path).features(extractor(encode), opened(folder))
    assert encode.count == 7 and found.numbers.tolist() == list(range(7))
    assert content_entry(tmp_path / "features") == content and (content / name).read_bytes() == whole


def _arrays(tmp_path, encode, folder):
    return store(tmp_path).features(extractor(encode), opened(folder)).arrays


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_interrupted_leaves_nothing(folder, tmp_path, monkeypatch, error):
    monkeypatch.setattr("mae.evaluation.extractors.batches.BATCH_SIZE", 3)
    encode = Counting()

    def stopping(images: Tensor) -> dict[str, Tensor]:
        if encode.count >= 3:
            raise error
        return encode(images)

    with pytest.raises(error):
        _arrays(tmp_path, stopping, folder)
    assert beside_content(tmp_path / "features") == []
    assert len(_arrays(tmp_path, Counting(), folder)["mean"]) == 7


def test_leftovers_of_a_killed_process_go_and_those_of_a_living_one_stay(folder, tmp_path):
    _arrays(tmp_path, Counting(), folder)
    (stored,) = beside_content(tmp_path / "features")
    truncate(stored / "mean.npy")
    dead, living = (stored.with_name(f".writing-{stored.name}-{pid}") for pid in (2**22 + 1, os.getppid()))
    for leftover in (dead, living):
        leftover.mkdir()
    _arrays(tmp_path, Counting(), folder)
    assert beside_content(tmp_path / "features") == sorted([stored, living])


def test_a_faster_process_is_believed(folder, tmp_path):
    slow = Counting()

    def encode(images: Tensor) -> dict[str, Tensor]:
        if slow.count == 0:
            _other(tmp_path, folder)
        return slow(images)

    assert len(_arrays(tmp_path, encode, folder)["mean"]) == 7
    assert len(beside_content(tmp_path / "features")) == 1


def _other(tmp_path, folder):
    """Another process that computes the same, whose folder stands under its own name."""
    elsewhere = tmp_path / "elsewhere"
    _arrays(elsewhere, Counting(), folder)
    (stored,) = beside_content(elsewhere / "features")
    stored.rename(tmp_path / "features" / stored.name)


def test_a_full_disk_is_said_and_nothing_stays(tmp_path):
    source = Opened(Pictures([noise(20, 20, seed=number) for number in range(200)]))
    wide = extractor(lambda images: images.flatten(1), preprocessing=Preprocessing(img_size=(20, 20)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a limit on the size of files stands for the full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(MAEError, match=r"could not store features in .*; free space there$"):
            store(tmp_path).features(wide, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert beside_content(tmp_path / "features") == []


def test_a_folder_that_cannot_be_made_is_reported(folder, tmp_path):
    (tmp_path / "features").write_text("a file")
    with pytest.raises(MAEError, match="could not store features"):
        _arrays(tmp_path, Counting(), folder)


def test_a_function_without_identity_is_computed_once_and_stored_nowhere(folder, tmp_path):
    encode = Counting()
    mine, passing = extractor(encode, identity=None), store(tmp_path)
    for _ in range(2):
        assert len(passing.features(mine, opened(folder)).arrays["mean"]) == 7
    assert encode.count == 7 and beside_content(tmp_path / "features") == []
    other = extractor(lambda images: images.flatten(1), identity=None)
    assert list(passing.features(other, opened(folder)).arrays) == ["features"]
    store(tmp_path).features(mine, opened(folder))
    assert encode.count == 14


def test_unreadable_files_have_no_row(folder, tmp_path):
    whole = _arrays(tmp_path, Counting(), folder)["mean"].clone()
    (folder / "2.png").write_bytes(b"no image")
    with pytest.raises(MAEError, match="cannot be used, more than the allowed fraction"):
        _arrays(tmp_path, Counting(), folder)
    found = store(tmp_path).features(extractor(Counting()), opened(folder, max_unreadable=0.5))
    assert found.numbers.tolist() == [0, 1, 3, 4, 5, 6]
    assert torch.equal(found.arrays["mean"], whole[found.numbers])
    digests, numbers = store(tmp_path).digests(opened(folder, max_unreadable=0.5), (3, None, None, None))
    assert numbers.tolist() == found.numbers.tolist() and len(set(digests.tolist())) == 6


@pytest.mark.parametrize(
    ("encode", "patches", "kind", "message"),
    [
        (lambda x: x.flatten(1) / 0, False, MAEError, "hold values that are not finite"),
        (lambda x: {"patches": 1e6 + x.flatten(2), "mean": x[:, :, 0, 0]}, True, MAEError, "over 65504"),
        (
            lambda x: x,
            False,
            UsageError,
            r"gives features of shape \[7, 3, 8, 8\]; expected \[images, width\], one for each of 7 images",
        ),
        (lambda x: x.flatten(1)[:2], False, UsageError, r"shape \[2, 192\]; expected .*, one for each of 7 images"),
        (lambda x: {"patches": x.flatten(1)}, True, UsageError, r"expected \[images, patches, width\]"),
        (lambda x: {"patches": x.flatten(2)}, False, UsageError, "no feature of the whole image"),
        (lambda x: {"mean": x.flatten(1)}, True, UsageError, "gives no patch tokens, only mean"),
    ],
)
def test_what_is_no_feature_is_refused(folder, tmp_path, encode, patches, kind, message):
    with pytest.raises(kind, match=message):
        store(tmp_path).features(extractor(encode), opened(folder), patches=patches)
    assert beside_content(tmp_path / "features") == []


def test_a_width_that_changes_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mae.evaluation.extractors.batches.BATCH_SIZE", 4)
    with pytest.raises(UsageError, match="each image's the same"):
        _arrays(tmp_path, lambda x: x.flatten(1)[:, : len(x)], folder)


def test_the_key_says_what_is_stored(folder, tmp_path):
    _arrays(tmp_path, Counting(), folder)
    (stored,) = beside_content(tmp_path / "features")
    content = content_entry(tmp_path / "features")
    told = json.loads((stored / "key.json").read_text())
    assert told["extractor"] == "one" and told["arrays"] == ["first", "mean"]
    assert json.loads((content / "key.json").read_text())["arrays"] == ["digests", "numbers", "outlines"]
    for path in (*stored.glob("*.npy"), *content.glob("*.npy")):
        assert len(np.load(path)) == 7


def bitmaps(folder: Path, *, seed: int) -> Path:
    """Three files that differ from those of another seed in their pixels alone: same names, sizes and times."""
    folder.mkdir(parents=True)
    for number in range(3):
        path = folder / f"{number}.bmp"
        Image.fromarray(noise(20, 18, seed=seed + number)).save(path)
        os.utime(path, ns=(1, 1))
    return folder


def test_features_are_those_of_the_content(tmp_path):
    encode = Counting()
    one, other = (bitmaps(tmp_path / name / "images", seed=seed) for name, seed in (("a", 0), ("b", 50)))
    first, second = (_arrays(tmp_path, encode, folder)["mean"] for folder in (one, other))
    assert encode.count == 6 and not (first == second).any()
    again = _arrays(tmp_path, encode, bitmaps(tmp_path / "c" / "images", seed=0))["mean"]
    assert encode.count == 6 and torch.equal(again, first)


def test_the_same_content_under_other_numbers(tmp_path):
    images = [png(20, 18, seed=1), png(20, 18, seed=2)]
    found = []
    for name, files in (("a", [images[0], b"broken", images[1]]), ("b", [*images, b"broken"])):
        (tmp_path / name).mkdir()
        for number, content in enumerate(files):
            (tmp_path / name / f"{number}.png").write_bytes(content)
        found.append(store(tmp_path).features(extractor(Counting()), opened(tmp_path / name, max_unreadable=0.5)))
    assert [each.numbers.tolist() for each in found] == [[0, 2], [0, 1]]
    assert torch.equal(found[0].arrays["mean"], found[1].arrays["mean"])


def test_a_feature_may_be_called_as_the_content_is(folder, tmp_path):
    encode = extractor(lambda images: {"numbers": images[:, :, 0, 0], "digests": images[:, :, 1, 1]})
    found = store(tmp_path).features(encode, opened(folder))
    assert found.numbers.tolist() == list(range(7))
    images = torch.cat(list(normalised_batches(opened(folder).images((3, None, None, None)), PLAIN, device=CPU)))
    assert torch.equal(found.arrays["numbers"], images[:, :, 0, 0])


def pictures(broken: set[int], *, keep: bool = False) -> Opened:
    """120 images of which one may be broken; where they are not kept nobody sees before they are read which."""
    return Opened(Pictures([noise(10, 10, seed=number) for number in range(120)], frozenset(broken)), keep=keep)


def test_a_broken_file_in_a_set_that_does_not_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("mae.evaluation.extractors.batches.BATCH_SIZE", 50)
    whole = store(tmp_path / "whole").features(extractor(Counting()), pictures(set(), keep=True)).arrays["mean"]
    source, encode = pictures({57}), Counting()
    assert (
        not source.images((3, None, None, None)).in_memory and len(source.images((3, None, None, None)).readable) == 120
    )
    left = [number for number in range(120) if number != 57]
    found = store(tmp_path).features(extractor(encode), source)
    assert found.numbers.tolist() == left and encode.count == 119
    assert torch.equal(found.arrays["mean"], whole[left])
    for again in (source, pictures({57})):  # from what was stored, too
        assert store(tmp_path).images(again, PLAIN).readable.tolist() == left
    patches = store(tmp_path).features(extractor(Counting()), pictures({57}), patches=True)
    assert patches.arrays[PATCHES].shape == (119, 64, 3) and patches.numbers.tolist() == left


def test_too_many_broken_files_in_a_set_that_does_not_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("mae.evaluation.extractors.feature_store._DIGESTED", 10)
    monkeypatch.setattr("mae.evaluation.extractors.batches.BATCH_SIZE", 10)
    source = pictures({5, 57, 111})
    with pytest.raises(MAEError, match="2 of 120 images cannot be used, .* 0.01: picture-5 is.*picture-57 is"):
        store(tmp_path).features(extractor(Counting()), source)  # it ends at the first part with too many
    assert len(source.images((3, None, None, None)).unreadable) == 2
    assert list((tmp_path / "features").iterdir()) == []


def test_few_images_wait_for_the_threads_at_a_time(tmp_path, monkeypatch):
    """Each image that waits takes memory; a million must not."""
    given: list[int] = []

    def noted(images, numbers):
        given.append(len(numbers))
        return contents_of(images, numbers)

    monkeypatch.setattr("mae.evaluation.extractors.feature_store.contents_of", noted)
    digests, _ = store(tmp_path).digests(Opened(Pictures([noise(2, 2, 1)] * 9000)), (1, None, None, None))
    assert given == [4096, 4096, 808] and len(digests) == 9000 and len(digests.unique()) == 1
