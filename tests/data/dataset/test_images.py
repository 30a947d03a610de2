"""Image sets: channels and types, memory and streaming, unreadable files, statistics."""

import os
import tracemalloc

import numpy as np
import pytest
import torch
from data.pictures import SHARED, Pictures, loaded, noise, png

from mae.data.dataset.channel_stats import moments_of
from mae.data.dataset.decoded import num_threads
from mae.data.dataset.images import load_images
from mae.data.decode.limits import UnreadableImage
from mae.data.sources.open import open_source
from mae.errors import MAEError


def pictures(count: int = 6, channels: int = 3, dtype: str = "u1", **options) -> Pictures:
    arrays = [noise(8 + number, 9, channels, number).astype(dtype) for number in range(count)]
    return Pictures(arrays, **options)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({1: 5}, 1), ({3: 5}, 3), ({1: 9, 3: 1}, 3), ({1: 1, 3: 9}, 3), ({13: 6}, 13), ({13: 6, 3: 2}, 13), ({4: 3}, 4)],
)
def test_channels_come_from_the_data(counts, expected):
    arrays = [noise(4, 4, channels) for channels, count in counts.items() for _ in range(count)]
    assert load_images(Pictures(arrays), in_chans=None, max_unreadable=0.5).channels == expected


def test_channels_asked_for_are_kept():
    assert load_images(pictures(channels=1), in_chans=3).get(0).shape == (3, 8, 9)
    with pytest.raises(
        MAEError,
        match=": 6 of 6 images cannot be used.*has 3 channels; expected 13.*Where most are like this",
    ):
        load_images(pictures(), in_chans=13)


@pytest.mark.parametrize("limit", [None, 0])
def test_memory_and_streaming_give_the_same(limit):
    source = pictures()
    images = load_images(source, in_chans=None, memory_limit=limit)
    assert images.in_memory == (limit is None) and len(images) == 6
    for number in range(6):
        assert torch.equal(images.get(number), torch.from_numpy(source.arrays[number]).permute(2, 0, 1))
    assert images.fingerprint() == load_images(source, in_chans=None).fingerprint()
    assert images.size_range() == ((8, 9), (13, 9))
    assert images.readable.tolist() == list(range(6))


def test_memory_limit_is_kept_when_the_estimate_was_wrong(monkeypatch):
    monkeypatch.setattr("mae.data.dataset.survey._SURVEYED", 1)
    monkeypatch.setattr("mae.data.dataset.sampled.permutation", lambda *_: torch.arange(4))
    source = Pictures([noise(2, 2), noise(50, 50), noise(50, 50), noise(50, 50)])
    assert not load_images(source, in_chans=None, memory_limit=5000).in_memory
    assert load_images(source, in_chans=None, memory_limit=50000).in_memory


def test_sixteen_bit_data_is_scaled_and_float_data_is_raw():
    wide = Pictures([np.full((4, 4, 2), 65535, np.uint16), np.full((4, 4, 2), 13107, np.uint16)])
    images = load_images(wide, in_chans=None)
    assert images.get(0).dtype == torch.float32
    assert images.get(0).unique().tolist() == [1.0] and images.get(1).unique().tolist() == [pytest.approx(0.2)]
    raw = load_images(Pictures([np.full((4, 4, 1), -7.5, np.float32)]), in_chans=None)
    assert raw.get(0).unique().tolist() == [-7.5]


def test_one_wide_image_makes_the_set_wide():
    mixed = load_images(Pictures([noise(4, 4, 1), np.full((4, 4, 1), 500, np.uint16)]), in_chans=None)
    assert mixed.dtype == np.uint16 and mixed.get(0).max() <= 1


@pytest.mark.parametrize("limit", [None, 0])
def test_unreadable_files_keep_their_numbers_and_are_listed(tree, limit):
    root = tree({f"{number}.png": png(seed=number) for number in range(5)} | {"2.png": b"text"})
    source = open_source(str(root), data_root=root)
    images = load_images(source, in_chans=None, max_unreadable=0.2, memory_limit=limit)
    assert len(images) == 5 and images.readable.tolist() == [0, 1, 3, 4]
    assert len(images.unreadable) == 1 and "2.png starts with b'text'" in images.unreadable[0]
    assert torch.equal(images.get(3), torch.from_numpy(loaded(source, 3)).permute(2, 0, 1))
    with pytest.raises(UnreadableImage, match="2.png starts with b'text'") as caught:
        images.get(2)
    images.report_unreadable([str(caught.value)])
    assert len(images.unreadable) == 1
    assert images.size_range() == ((12, 10), (12, 10))


def test_what_could_be_read_changes_neither_fingerprint_nor_statistics_by_memory():
    broken = pictures(6, broken=frozenset({4}))
    memory, streamed = (load_images(broken, in_chans=None, max_unreadable=0.2, memory_limit=n) for n in (None, 0))
    assert memory.in_memory and not streamed.in_memory
    assert memory.fingerprint() == streamed.fingerprint() == load_images(pictures(6), in_chans=None).fingerprint()
    assert memory.statistics() == streamed.statistics()


def test_a_header_that_cannot_be_read_counts_once_by_the_message_of_loading():
    class Headless(Pictures):
        def recorded(self, index: int):
            if index in (1, 2):
                raise UnreadableImage(f"{index} has no header")
            return super().recorded(index)

    source = Headless(pictures(6).arrays, broken=frozenset({1}))
    for limit in (None, 0):
        images = load_images(source, in_chans=None, max_unreadable=0.2, memory_limit=limit)
        assert images.unreadable == ["picture-1 is broken for this test"]
        assert images.readable.tolist() == [0, 2, 3, 4, 5]


def test_images_over_the_memory_limit_are_given_up_after_16_for_each_thread_and_16_more(monkeypatch):
    monkeypatch.setattr("mae.data.dataset.survey._SURVEYED", 1)
    monkeypatch.setattr("mae.data.dataset.sampled.permutation", lambda *_: torch.arange(600))
    source, loaded = Pictures([noise(2, 2), *[noise(50, 50)] * 599]), []
    monkeypatch.setattr(source, "read", lambda index: loaded.append(index) or source.arrays[index])
    assert not load_images(source, in_chans=None, memory_limit=50_000).in_memory
    assert len(loaded) == 16 * (num_threads() + 1)


def test_how_many_are_unreadable_is_not_told_of_images_that_were_not_tried(tree):
    root = tree({f"{number:03}.png": b"text" for number in range(600)} | {"000.png": png()})
    with pytest.raises(MAEError, match="at least [0-9]+ of 600 images cannot be used"):
        load_images(open_source(str(root), data_root=root), in_chans=None)


@pytest.mark.parametrize("limit", [None, 0])
def test_too_many_unreadable_files_are_an_error(tree, limit):
    root = tree({f"{number}.png": png() for number in range(8)} | {"2.png": b"text", "5.png": b"words"})
    with pytest.raises(MAEError, match="2 of 8 images cannot be used.*2.png starts.*5.png starts.*--max-unreadable"):
        load_images(open_source(str(root), data_root=root), in_chans=None, max_unreadable=0.24, memory_limit=limit)


def test_a_share_is_allowed_up_to_itself():
    source = pictures(10, broken=frozenset({4}))
    assert len(load_images(source, in_chans=None, max_unreadable=0.1).readable) == 9
    with pytest.raises(MAEError, match="1 of 10"):
        load_images(source, in_chans=None, max_unreadable=0.09)


def test_nothing_readable_is_an_error(tree):
    root = tree({"1.png": b"text", "2.png": b"text"})
    with pytest.raises(MAEError, match="none of the 2 sampled images can be read: .*(1.png|2.png)"):
        load_images(open_source(str(root), data_root=root), in_chans=None, max_unreadable=1.0)


def test_where_no_image_has_the_channels_asked_for_the_reason_is_told():
    with pytest.raises(MAEError, match="none of 4 images can be read: picture-0 has 3 channels; expected 13"):
        load_images(pictures(4), in_chans=13, max_unreadable=1.0)


def test_reported_files_count_once():
    images = load_images(pictures(20), in_chans=None, max_unreadable=0.1, memory_limit=0)
    for _ in range(5):
        images.report_unreadable(["a is broken", "b is broken"])
    assert images.unreadable == ["a is broken", "b is broken"]
    with pytest.raises(MAEError, match="3 of 20 .*: a is broken; b is broken; c is broken. Remove"):
        images.report_unreadable(["c is broken"])


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize(("dtype", "unit"), [("u1", 255), ("u2", 65535), ("f4", 1)])
def test_statistics_are_those_of_all_pixels(dtype, unit, limit):
    source = pictures(7, dtype=dtype)
    mean, std = load_images(source, in_chans=None, memory_limit=limit).statistics()
    pixels = np.concatenate([array.reshape(-1, 3) for array in source.arrays]).astype(np.float64) / unit
    assert mean == pytest.approx(pixels.mean(axis=0).tolist(), rel=1e-6)
    assert std == pytest.approx(pixels.std(axis=0).tolist(), rel=1e-6)


def test_statistics_of_large_values_do_not_cancel():
    values = 1e6 + np.random.default_rng(0).normal(size=(5, 30, 30, 1))
    arrays = list(values.astype(np.float32))
    _, (std,) = load_images(Pictures(arrays), in_chans=None).statistics()
    assert std == pytest.approx(np.std(np.stack(arrays), dtype=np.float64), rel=1e-9)


def test_statistics_take_a_fixed_sample():
    images = load_images(pictures(40), in_chans=None)
    assert images.statistics(limit=5) == images.statistics(limit=5) != images.statistics(limit=6)


@pytest.mark.parametrize("dtype", ["u1", "f4"])
def test_moments_need_little_memory_beside_the_image(dtype):
    pixels = noise(3000, 1000).astype(dtype)
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    tracemalloc.start()
    number, mean, squares = moments_of(image)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    unit = 255 if dtype == "u1" else 1
    values = pixels.reshape(-1, 3).astype(np.float64) / unit
    assert (number == 3_000_000).all() and mean == pytest.approx(values.mean(axis=0), rel=1e-12)
    assert squares / number == pytest.approx(values.var(axis=0), rel=1e-10)


def test_statistics_skip_unreadable_files():
    source = pictures(6)
    images = load_images(source, in_chans=None, memory_limit=0)
    source.broken = frozenset({1})
    pixels = np.concatenate([source.arrays[n].reshape(-1, 3) for n in (0, 2, 3, 4, 5)]) / 255
    assert images.statistics()[0] == pytest.approx(pixels.mean(axis=0).tolist())
    with pytest.raises(UnreadableImage):
        images.get(1)


def test_constant_channels_get_the_deviation_of_the_others():
    arrays = [noise(5, 5) for _ in range(3)]
    for array in arrays:
        array[..., 1] = 30
    std = load_images(Pictures(arrays), in_chans=None).statistics()[1]
    assert std[1] == pytest.approx((std[0] + std[2]) / 2) and std[0] != std[2]
    with pytest.raises(MAEError, match="pictures: every sampled pixel has the same value"):
        load_images(Pictures([np.full((3, 3, 3), 9, np.uint8)] * 2), in_chans=None).statistics()


@pytest.mark.skipif(not (SHARED / "photos").exists(), reason="needs shared/data/photos")
def test_real_photographs():
    source = open_source(str(SHARED / "photos"), data_root=SHARED)
    images = load_images(source, in_chans=None, memory_limit=0)
    assert len(images) == 200 and images.channels == 3 and not images.unreadable
    mean, std = images.statistics(limit=20)
    assert all(0.3 < value < 0.6 for value in mean) and all(0.15 < value < 0.4 for value in std)
    assert os.path.exists(source.item_name(0))


def test_version_is_of_the_source_and_of_what_is_made_of_it():
    source = pictures()
    images = load_images(source, in_chans=None)
    others = load_images(source, in_chans=1), load_images(pictures(dtype="f4"), in_chans=None)
    fingerprint, found = images.fingerprint(), [each.version() for each in (images, *others)]
    source.version = lambda: "d" * 16
    assert images.fingerprint() == fingerprint
    assert len({fingerprint, images.version(), *found}) == 5 and len(found[0]) == 16


def test_names_are_hashed_once(monkeypatch):
    source = pictures()
    images, asked = load_images(source, in_chans=None), []
    monkeypatch.setattr(source, "fingerprint", lambda: asked.append(1) or "a" * 16, raising=False)
    assert images.fingerprint() == images.fingerprint() and len(asked) == 1
