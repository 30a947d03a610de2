"""Loaders: what a step sees depends on the seed and the step alone, and failures are reported."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import pytest
import torch
from data.pictures import Pictures, encoded, noise
from PIL import Image
from torch.utils.data import Dataset, SequentialSampler

from mae.data.dataset.images import ImageSet, load_images
from mae.data.loading.loader import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    RawBatch,
    TrainingLoader,
    default_workers,
    evaluation_batches,
    explained_worker_failure,
    loaded_pieces,
    normalise,
)
from mae.data.loading.sampler import AllBut, BlockShuffle, RankOrder
from mae.data.loading.worker import CropDataset
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.modalities.images.crop import (
    Augmentation,
    central_crop,
    change_colours,
    colour_changes,
    rand_augment,
    random_crop_boxes,
    resized_crop,
)
from mae.randomness import Stream, permutation, sample_keys, seeds, uniform


class Blocks(Pictures):
    """A source whose images lie in blocks."""

    block_sizes = np.array([5, 7, 0, 6, 4])


def block_set(broken: frozenset[int] = frozenset()) -> ImageSet:
    """The images of `image_set` in blocks."""
    source = Blocks([noise(20 + number % 3, 24, 3, number) for number in range(22)])
    images = load_images(source, in_chans=None, memory_limit=0, max_unreadable=0.5)
    source.broken = broken
    return images


def image_set(count: int = 22, broken: frozenset[int] = frozenset(), max_unreadable: float = 0.001) -> ImageSet:
    """Images of several sizes; broken ones are met while training only."""
    source = Pictures([noise(20 + number % 3, 24, 3, number) for number in range(count)])
    images = load_images(source, in_chans=None, memory_limit=0 if broken else None, max_unreadable=max_unreadable)
    source.broken = broken
    return images


def loader(images: ImageSet, **changes) -> TrainingLoader:
    settings = dict(batch_size=8, accumulate=2, img_size=(16, 12), seed=5, workers=0)
    return TrainingLoader(images=images, **{**settings, **changes})


def taken(source: TrainingLoader, count: int, start_step: int = 0) -> list[RawBatch]:
    with contextlib.closing(source.iterate(start_step)) as batches:
        return list(itertools.islice(batches, count))


def same(first: list[RawBatch], second: list[RawBatch]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a.ids, b.ids) and torch.equal(a.keys, b.keys) and torch.equal(a.images, b.images)
        and torch.equal(a.shown, b.shown) and a.unreadable == b.unreadable
        for a, b in zip(first, second, strict=True)
    )  # fmt: skip


def test_an_epoch_follows_the_permutation_and_drops_the_rest():
    batches = taken(loader(image_set()), 8)
    assert [batch.images.shape for batch in batches] == [(4, 3, 16, 12)] * 8
    for epoch in (0, 1):
        ids = torch.cat([batch.ids for batch in batches[4 * epoch : 4 * epoch + 4]])
        assert torch.equal(ids, permutation(5, epoch, 22)[:16])
        keys = torch.cat([batch.keys for batch in batches[4 * epoch : 4 * epoch + 4]])
        assert torch.equal(keys, sample_keys(5, epoch, ids))


def test_an_epoch_that_divides_covers_every_image_once():
    batches = taken(loader(image_set(24), batch_size=6), 8)
    assert torch.cat([batch.ids for batch in batches]).sort().values.tolist() == list(range(24))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("broken", [frozenset(), frozenset({3, 7, 11})])
def test_workers_change_nothing(workers, broken):
    expected = taken(loader(image_set(broken=broken, max_unreadable=0.5)), 10)
    assert same(taken(loader(image_set(broken=broken, max_unreadable=0.5), workers=workers), 10), expected)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_each_micro_batch_in_order(world):
    images = image_set()
    whole = taken(loader(images), 9)
    parts = [taken(loader(images, rank=rank, world=world), 9) for rank in range(world)]
    for number, batch in enumerate(whole):
        for field in ("images", "keys", "ids", "shown"):
            joined = torch.cat([getattr(part[number], field) for part in parts])
            assert torch.equal(joined, getattr(batch, field))


def test_accumulation_changes_only_where_a_step_is_cut():
    images = image_set()
    once, fourfold = taken(loader(images, accumulate=1), 3), taken(loader(images, accumulate=4), 12)
    assert torch.equal(torch.cat([b.images for b in once]), torch.cat([b.images for b in fourfold]))


@pytest.mark.parametrize("start_step", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_gives_the_tail(start_step, workers):
    images = image_set()
    whole = taken(loader(images), 14)
    assert same(taken(loader(images, workers=workers), 14 - 2 * start_step, start_step), whole[2 * start_step :])


def test_epochs_and_seeds_differ_in_order_and_crops():
    images = image_set(8)
    first, second = taken(loader(images, accumulate=1), 2)
    other = taken(loader(images, accumulate=1, seed=6), 1)[0]
    for batch in (second, other):
        assert not torch.equal(batch.ids, first.ids)
        assert not torch.equal(batch.images[batch.ids.argsort()], first.images[first.ids.argsort()])


@pytest.mark.parametrize("start_step", [0, 2])
def test_an_unreadable_image_is_replaced_the_same_way_each_time(start_step):
    broken = frozenset({3, 7, 11})
    images = image_set(broken=broken, max_unreadable=0.5)
    clean = taken(loader(image_set()), 8, start_step)
    found = taken(loader(images), 8, start_step)
    assert same(found, taken(loader(images, accumulate=2), 8, start_step))
    for batch, intact in zip(found, clean, strict=True):
        assert torch.equal(batch.ids, intact.ids) and torch.equal(batch.keys, intact.keys)
        differs = [not torch.equal(a, b) for a, b in zip(batch.images, intact.images, strict=True)]
        assert differs == [int(number) in broken for number in batch.ids]
        assert bool(batch.unreadable) == any(differs)
    assert images.unreadable and all("is broken for this test" in message for message in images.unreadable)
    assert len(images.unreadable) == len(set(images.unreadable)) <= 3


def test_the_replacement_is_the_one_its_key_names():
    images = image_set(broken=frozenset({3, 7, 11}), max_unreadable=0.5)
    replaced = 0
    for batch in taken(loader(images, accumulate=1), 2):
        told = batch.shown.tolist()
        for number, said, key, image in zip(batch.ids.tolist(), told, batch.keys, batch.images, strict=True):
            drawn = (uniform(key.reshape(1), 16, Stream.REPLACEMENT).squeeze(0) * 22).long().tolist()
            assert said == next(n for n in [number, *drawn] if n not in {3, 7, 11})
            shown = images.get(said)
            (box,), (flip,) = random_crop_boxes(
                key.reshape(1), *torch.tensor(shown.shape[1:]).reshape(2, 1), Augmentation()
            )
            replaced += number in {3, 7, 11}
            assert torch.equal(image, resized_crop(shown, tuple(box.tolist()), bool(flip), (16, 12)))
    assert replaced


@pytest.mark.parametrize("broken", [frozenset(), frozenset({3, 7, 11})])
def test_views_of_an_image_stand_together_and_it_is_decoded_once(monkeypatch, broken):
    images = image_set(broken=broken, max_unreadable=0.5)
    once = taken(loader(images, batch_size=4, accumulate=1), 5)
    asked: list[int] = []
    get = ImageSet.get
    monkeypatch.setattr(ImageSet, "get", lambda self, number: asked.append(number) or get(self, number))
    found = taken(loader(images, batch_size=12, accumulate=1, views=3), 5)  # 22 images are 5 steps of 4
    assert len(asked) == 20 if not broken else len(asked) > 20
    for plain, batch in zip(once, found, strict=True):
        assert batch.ids.tolist() == plain.ids.repeat_interleave(3).tolist()
        assert batch.shown.tolist() == plain.shown.repeat_interleave(3).tolist()
        assert torch.equal(batch.keys[::3], plain.keys) and len(set(batch.keys.tolist())) == 12
        assert torch.equal(batch.images[::3], plain.images), "the first view is the one there would be alone"
        for shown, key, image in zip(batch.shown, batch.keys, batch.images, strict=True):
            pixels = get(images, int(shown))
            sides = torch.tensor(pixels.shape[1:]).reshape(2, 1)
            (box,), (flip,) = random_crop_boxes(key.reshape(1), *sides, Augmentation())
            assert torch.equal(image, resized_crop(pixels, tuple(box.tolist()), bool(flip), (16, 12)))


@pytest.mark.parametrize("broken", [frozenset(), frozenset({3, 7, 11})])
@pytest.mark.parametrize("piece", [4, 64])
def test_views_are_the_same_however_a_batch_is_divided(monkeypatch, broken, piece):
    monkeypatch.setattr("mae.data.loading.loader._PIECE", piece)  # of 4 samples: an image and its three views at a time
    images = image_set(broken=broken, max_unreadable=0.5)
    settings = dict(batch_size=12, views=3)
    whole = taken(loader(images, **settings, accumulate=1), 6)
    assert same(taken(loader(images, **settings, accumulate=1, workers=2), 4, start_step=2), whole[2:])
    halves = [taken(loader(images, **settings, accumulate=2, rank=rank, world=2), 12) for rank in range(2)]
    for number, batch in enumerate(whole):
        for field in ("images", "keys", "ids", "shown"):
            parts = [getattr(halves[rank][2 * number + half], field) for half in range(2) for rank in range(2)]
            assert torch.equal(torch.cat(parts), getattr(batch, field))


def test_nothing_is_drawn_for_an_image_that_can_be_read(monkeypatch):
    monkeypatch.setattr("mae.data.loading.worker.uniform", None)
    assert len(taken(loader(image_set()), 3)) == 3


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("numbers", [None, torch.tensor([20, 3, 7, 11, 5, 9, 2, 0, 1])], ids=["all", "some"])
def test_images_in_blocks_come_in_their_own_order_however_it_is_divided(numbers):
    """As images: whole and in slices, with and without workers, from the start and resumed."""
    images = block_set(broken=frozenset({3, 7}))
    expected = taken(loader(images, numbers=numbers, accumulate=1), 6)
    ids = AllBut(22) if numbers is None else numbers
    shuffle = BlockShuffle(ids, torch.from_numpy(Blocks.block_sizes), batch_size=8, seed=5)
    order = RankOrder(shuffle=shuffle, accumulate=1, rank=0, world=1)
    assert [batch.ids.tolist() for batch in expected] == [ids for ids, _ in itertools.islice(order.from_step(0), 6)]
    parts = [
        taken(loader(images, numbers=numbers, rank=rank, world=2, workers=rank), 4, start_step=4) for rank in (0, 1)
    ]
    for step, batch in enumerate(expected[4:]):
        slices = [part[2 * step + micro] for micro in (0, 1) for part in parts]
        for field in ("images", "keys", "ids", "shown"):
            assert torch.equal(torch.cat([getattr(each, field) for each in slices]), getattr(batch, field))
    one = loader(images, numbers=numbers, rank=1, world=2).order()
    stretch = next(one.stretches(4))
    read = torch.cat([batch.ids for batch in parts[1]][: 2 * stretch.steps])
    bounds = torch.from_numpy(Blocks.block_sizes).cumsum(0)
    assert set(torch.searchsorted(bounds, read, right=True).tolist()) <= set(stretch.blocks)


@pytest.mark.parametrize(("accumulate", "start"), [(1, 0), (2, 1), (2, 3)])
def test_blocks_are_brought_near_before_their_images_are_read(monkeypatch: pytest.MonkeyPatch, accumulate, start):
    """And the next ones meanwhile; what is read was asked for."""
    images, told, read = block_set(), [], []
    bounds = torch.from_numpy(Blocks.block_sizes).cumsum(0)
    read_item = Blocks.read

    def noted(self: Blocks, index: int) -> np.ndarray:
        read.append((len(told), int(torch.searchsorted(bounds, torch.tensor(index), right=True))))
        return read_item(self, index)

    monkeypatch.setattr(Blocks, "read", noted)
    monkeypatch.setattr(
        Blocks, "prefetch", lambda self, *asked, **then: told.append((*asked, *then.values())), raising=False
    )
    steps = 5
    taken(loader(images, accumulate=accumulate), steps * accumulate, start_step=start)
    expected = [
        stretch.blocks
        for stretch in itertools.islice(loader(images, accumulate=accumulate).order().stretches(start), 8)
    ]
    assert [now for now, _ in told] == expected[: len(told)] and len(told) > 1
    assert [later for _, later in told] == expected[1 : len(told) + 1]
    assert all(calls and block in told[calls - 1][0] for calls, block in read)


@pytest.mark.parametrize("workers", [0, 2])
def test_labels_looked_up_by_what_is_shown_are_right(tree, workers):
    """A broken file on the disk: each image's brightness is its label."""
    flat = {f"{level}.png": np.full((8, 8, 3), level, np.uint8) for level in range(100, 110)}
    root = tree({name: encoded(Image.fromarray(pixels)) for name, pixels in flat.items()})
    images = load_images(open_source(str(root), data_root=root), in_chans=None, memory_limit=0, max_unreadable=0.2)
    (root / "104.png").write_bytes(b"no image any more")
    labels, replaced = torch.arange(100, 110), 0
    for batch in taken(loader(images, batch_size=5, accumulate=1, workers=workers), 6):
        assert torch.equal(batch.images.float().mean(dim=(1, 2, 3)), labels[batch.shown].float())
        assert torch.equal(batch.ids == batch.shown, batch.ids != 4)
        replaced += int((batch.ids == 4).sum())
    assert replaced == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_is_a_set_of_its_own_under_the_same_numbers(workers):
    images = image_set(broken=frozenset({7}), max_unreadable=0.5)
    numbers = torch.tensor([20, 3, 7, 11, 5, 9, 2])
    batches = taken(loader(images, batch_size=6, numbers=numbers, workers=workers), 8)
    for epoch in range(4):
        ids = torch.cat([batch.ids for batch in batches[2 * epoch : 2 * epoch + 2]])
        assert torch.equal(ids, numbers[permutation(5, epoch, 7)[:6]])
        keys = torch.cat([batch.keys for batch in batches[2 * epoch : 2 * epoch + 2]])
        assert torch.equal(keys, sample_keys(5, epoch, ids))
    pairs = [pair for batch in batches for pair in zip(batch.ids.tolist(), batch.shown.tolist(), strict=True)]
    instead = [shown for number, shown in pairs if number == 7]
    assert instead and set(instead) <= set(numbers.tolist()) - {7}
    assert all(number == shown for number, shown in pairs if number != 7)
    with pytest.raises(UsageError, match="--batch-size 8 is more than the 7 images of pictures"):
        loader(images, numbers=numbers)


def test_all_numbers_are_the_whole_set():
    images = image_set(broken=frozenset({7}), max_unreadable=0.5)
    for numbers in (torch.arange(22), AllBut(22)):
        assert same(taken(loader(images, numbers=numbers), 10), taken(loader(images), 10))


@pytest.mark.parametrize("workers", [0, 2])
def test_augmentation_follows_each_samples_key(workers):
    images = image_set()
    how = Augmentation(scale=(0.08, 1.0), draws=1, rand_augment=True)
    before = torch.get_rng_state()
    batches = taken(loader(images, augmentation=how, workers=workers), 3)
    assert torch.equal(torch.get_rng_state(), before)
    for batch in batches:
        for number, key, image in zip(batch.ids.tolist(), batch.keys, batch.images, strict=True):
            shown, key = images.get(number), key.reshape(1)
            (box,), (flip,) = random_crop_boxes(key, *torch.tensor(shown.shape[1:]).reshape(2, 1), how)
            crop = resized_crop(shown, tuple(box.tolist()), bool(flip), (16, 12))
            assert torch.equal(image, rand_augment(crop, *seeds(key, Stream.AUGMENT)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("changes", [{}, {"color_jitter": 0.5, "grayscale": 0.3}])
def test_colours_change_by_key_and_only_where_they_are_to(changes, workers):
    images, how = image_set(), Augmentation(**changes)
    for batch in taken(loader(images, augmentation=how, views=2, workers=workers), 3):
        found = colour_changes(batch.keys, how)
        assert any(found) == bool(changes)
        for number, key, crop, some in zip(batch.ids.tolist(), batch.keys, batch.images, found, strict=True):
            shown, key = images.get(number), key.reshape(1)
            (box,), (flip,) = random_crop_boxes(key, *torch.tensor(shown.shape[1:]).reshape(2, 1), Augmentation())
            plain = resized_crop(shown, tuple(box.tolist()), bool(flip), (16, 12))
            assert torch.equal(crop, change_colours(plain, some))


@pytest.mark.parametrize("option", ["color_jitter", "grayscale"])
@pytest.mark.parametrize(
    ("channels", "kind", "names", "what"),
    [
        (4, "u1", None, "4 channels"),
        (1, "u1", None, "1 channel"),
        (3, "u2", None, "values of type uint16"),
        (3, "u1", ("B08", "B04", "B03"), "channels called B08, B04, B03"),
    ],
)
def test_colours_are_those_of_8_bit_rgb(channels, kind, names, what, option):
    images = load_images(Pictures([noise(8, 8, channels).astype(kind)] * 8), in_chans=None, channels=names)
    with pytest.raises(UsageError, match=f"^--color-jitter and --grayscale change the .* pictures have {what}: leave"):
        loader(images, augmentation=Augmentation(**{option: 0.5}))


def test_colours_may_be_named():
    images = load_images(Pictures([noise(8, 8, 3)] * 8), in_chans=None, channels=("red", "green", "blue"))
    assert len(taken(loader(images, augmentation=Augmentation(color_jitter=1)), 1)) == 1


@pytest.mark.parametrize(("channels", "kind"), [(4, "u1"), (3, "u2"), (1, "f4")])
def test_rand_augment_is_refused_where_it_cannot_work(channels, kind):
    images = load_images(Pictures([noise(8, 8, channels).astype(kind)] * 8), in_chans=None)
    what = f"{channels} channels and type {np.dtype(kind)}; .*uint8 images of 1 or 3 channels: turn rand_augment off"
    with pytest.raises(UsageError, match=f"pictures has images of {what}"):
        loader(images, augmentation=Augmentation(rand_augment=True))
    assert len(taken(loader(images), 1)) == 1


def test_evaluation_of_some_images_in_their_order_and_by_share():
    images, numbers = image_set(7), torch.tensor([5, 0, 5])
    for share, interpolation in ((0.875, "bicubic"), (1.0, "bilinear")):
        how = {"crop_share": share, "interpolation": interpolation}
        found = list(evaluation_batches(images, img_size=(9, 9), batch_size=2, numbers=numbers, **how))
        assert [len(batch) for batch in found] == [2, 1]
        expected = [central_crop(images.get(n), (9, 9), share, interpolation=interpolation) for n in (5, 0, 5)]
        assert torch.equal(torch.cat(found), torch.stack(expected))


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_and_streaming_train_on_the_same(workers):
    source = Pictures([noise(20 + number % 3, 24, 3, number) for number in range(22)], broken=frozenset({7}))
    sets = [load_images(source, in_chans=None, max_unreadable=0.1, memory_limit=limit) for limit in (None, 0)]
    assert [images.in_memory for images in sets] == [True, False]
    assert [len(images) for images in sets] == [22, 22]
    memory, streamed = (taken(loader(images, workers=workers), 8) for images in sets)
    assert same(memory, streamed) and any(batch.unreadable for batch in memory)
    assert sets[0].unreadable == sets[1].unreadable == ["picture-7 is broken for this test"]


def test_evaluation_passes_over_what_is_known_to_be_broken():
    source = Pictures([noise(20, 24, 3, number) for number in range(7)], broken=frozenset({2}))
    images = load_images(source, in_chans=None, max_unreadable=0.2)
    crops = torch.cat(list(evaluation_batches(images, img_size=(20, 24), batch_size=4)))
    assert torch.equal(crops, torch.stack([images.get(number) for number in (0, 1, 3, 4, 5, 6)]))


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_load_pieces_of_a_micro_batch(workers, monkeypatch):
    images = image_set(broken=frozenset({3}), max_unreadable=0.5)
    whole = taken(loader(images, batch_size=22), 5)
    monkeypatch.setattr("mae.data.loading.loader._PIECE", 4)
    sizes, crops = [], CropDataset.__getitem__
    monkeypatch.setattr(
        CropDataset, "__getitem__", lambda self, piece: sizes.append(len(piece[0])) or crops(self, piece)
    )
    assert same(taken(loader(images, batch_size=22, workers=workers), 5), whole)
    assert workers or sizes == [4, 4, 3] * 5


def test_pieces_of_large_images_are_small(monkeypatch):
    """A piece must arrive before the loader takes its process for hanging."""
    images = block_set()
    assert images.most_bytes == max(images.get(number).numel() for number in range(len(images)))
    whole = taken(loader(images, batch_size=12), 3)
    monkeypatch.setattr("mae.data.loading.loader._PIECE_BYTES", 5 * images.most_bytes)
    sizes, crops = [], CropDataset.__getitem__
    monkeypatch.setattr(
        CropDataset, "__getitem__", lambda self, piece: sizes.append(len(piece[0])) or crops(self, piece)
    )
    assert same(taken(loader(images, batch_size=12), 3), whole)
    monkeypatch.setattr("mae.data.loading.loader._PIECE_BYTES", 1)
    assert same(taken(loader(images, batch_size=12), 3), whole)
    assert sizes == [5, 1] * 3 + [1] * 18
    assert image_set().in_memory and image_set().most_bytes == 0


def test_small_tensors_are_sent_and_large_ones_shared():
    sizes = [4, 1 << 15, (1 << 15) + 1]

    class Numbers(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
            whole = torch.arange(sizes[number])
            return whole, whole[::2][:2]

    with contextlib.closing(loaded_pieces(Numbers(), SequentialSampler(sizes), workers=1)) as pieces:
        for size, shared in zip(sizes, (False, False, True), strict=True):
            whole, part = next(pieces)
            assert whole.is_shared() is shared and not part.is_shared()
            assert torch.equal(whole, torch.arange(size)) and part.add_(1).tolist() == [1, 3]


def test_the_callers_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    taken(loader(image_set(), workers=1), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_is_pinned_when_asked_alone(monkeypatch):
    asked, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        "mae.data.loading.loader.torch.empty",
        lambda *shape, pin_memory=False, **rest: asked.append(pin_memory) or empty(*shape, **rest),
    )
    for pin_memory in (False, True):
        asked.clear()
        taken(loader(image_set(), pin_memory=pin_memory), 1)
        assert any(asked) == pin_memory


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_images_stop_the_run(workers):
    images = image_set(broken=frozenset({3, 7, 11}), max_unreadable=0.1)
    with pytest.raises(MAEError, match="3 of 22 images cannot be used.*picture-.*--max-unreadable"):
        taken(loader(images, workers=workers), 40)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_gone_altogether_stops_the_run(workers):
    images = image_set(broken=frozenset(range(22)), max_unreadable=1.0)
    with pytest.raises(MAEError, match="pictures: 17 images in a row cannot be used: picture-"):
        taken(loader(images, workers=workers), 1)


def test_usage_errors():
    images = image_set()
    with pytest.raises(UsageError, match="--batch-size 32 is more than the 22 images of pictures"):
        loader(images, batch_size=32)
    with pytest.raises(UsageError, match="--batch-size 8 cannot be divided into 2 micro-batches on 3 .* multiple of 6"):
        loader(images, world=3)
    with pytest.raises(
        UsageError, match="--batch-size 8 .* processes of whole images with --repeated-aug 3; .* multiple of 6"
    ):
        loader(images, views=3)
    assert loader(images, batch_size=32, views=2).order().shuffle.steps_per_epoch == 1
    with pytest.raises(UsageError, match="--batch-size 48 is more than the 22 images"):
        loader(images, batch_size=48, views=2)


def test_stopping_early_leaves_no_worker():
    before = set(multiprocessing.active_children())
    batches = loader(image_set(), workers=2).iterate(0)
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == 2
    batches.close()
    assert not set(multiprocessing.active_children()) - before


def test_a_killed_worker_is_explained():
    with contextlib.closing(loader(image_set(), workers=1).iterate(0)) as batches:
        next(batches)
        (worker,) = multiprocessing.active_children()
        with pytest.raises(MAEError, match="a data worker process died or hung .*--workers"):
            with explained_worker_failure():
                os.kill(worker.pid, signal.SIGKILL)
                for _ in range(50):
                    next(batches)


@pytest.mark.parametrize(
    ("raised", "expected"), [(OSError(24, "Too many open files"), MAEError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_workers_that_started_end_where_others_cannot(raised, expected, monkeypatch):
    """They would be waited for when Python ends, without end."""
    start, before = BaseProcess.start, set(multiprocessing.active_children())

    def once(process):
        if set(multiprocessing.active_children()) - before:
            raise raised
        start(process)

    monkeypatch.setattr(BaseProcess, "start", once)
    with pytest.raises(expected) as told:
        taken(loader(image_set(), workers=2), 1)
    assert not set(multiprocessing.active_children()) - before
    if expected is MAEError:
        assert "not all of 2 data worker processes could be started (Too many open files)" in str(told.value)


def test_too_many_open_files_are_explained():
    with pytest.raises(MAEError, match=r"too many files are open .*ulimit -n.*--workers"), explained_worker_failure():
        raise RuntimeError("Too many open files. Communication with the workers is no longer possible.")


class Asleep(Pictures):
    """A source that never answers."""

    def read(self, index: int):
        time.sleep(600)


def test_a_hanging_worker_is_explained(monkeypatch):
    monkeypatch.setattr("mae.data.loading.loader._TIMEOUT_SECONDS", 1)
    images = load_images(Asleep([noise(8, 8)] * 8), in_chans=None, memory_limit=0)
    with pytest.raises(MAEError, match="died or hung .*timed out"):
        taken(loader(images, workers=1), 1)


_SCRIPT = """
import itertools, multiprocessing, os, signal, sys, time
sys.path.insert(0, {folder!r})
from data.pictures import Pictures, noise
from mae.data.loading import loader as loaders
from mae.data.dataset.images import load_images

class Asleep(Pictures):
    def read(self, index):
        time.sleep(600)

if __name__ == "__main__":
    loaders._TIMEOUT_SECONDS = 2
    source = {source}([noise(8, 8)] * 8)
    images = load_images(source, in_chans=None, memory_limit=0)
    loader = loaders.TrainingLoader(
        images=images, batch_size=8, accumulate=1, img_size=(8, 8), seed=0, workers=2
    )
    batches = loader.iterate(0)
    {what}
"""


def run_script(source: str, what: str, seconds: float) -> subprocess.CompletedProcess[str]:
    script = _SCRIPT.format(folder=str(Path(__file__).parents[2]), source=source, what=what)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=seconds)


def test_a_process_with_a_hanging_worker_ends():
    ended = run_script("Asleep", "next(batches)", 40)
    assert ended.returncode == 1 and "MAEError: a data worker process died or hung" in ended.stderr


def test_a_process_that_never_closes_its_batches_ends():
    ended = run_script("Pictures", "print(len(next(batches).images)); raise SystemExit(3)", 40)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "8\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("source", ["Asleep", "Pictures"])
def test_orphaned_workers_end(source):
    # The workers are started by a first batch that a thread waits for, since a hanging one never comes.
    what = (
        "import threading; threading.Thread(target=lambda: [0 for _ in batches], daemon=True).start(); time.sleep(1.5);"
        "print(*[child.pid for child in multiprocessing.active_children()], flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    started = time.monotonic()
    ended = run_script(source, what, 40)  # returns when the last worker has closed its copy of the output
    workers = [int(pid) for pid in ended.stdout.split()]
    assert ended.returncode == -signal.SIGKILL and len(workers) == 2 and time.monotonic() - started < 40


def test_other_errors_are_not_blamed_on_workers():
    for message in ("a wrong shape", "Caught RuntimeError in DataLoader worker process 0."):
        with pytest.raises(RuntimeError, match=message), explained_worker_failure():
            raise RuntimeError(message)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    taken(loader(image_set()), 1)
    assert torch.get_num_threads() == before


def test_evaluation_takes_all_in_order_and_refuses_gaps():
    images = image_set(7)
    sizes = [batch.shape for batch in evaluation_batches(images, img_size=(20, 24), batch_size=3)]
    assert sizes == [(3, 3, 20, 24), (3, 3, 20, 24), (1, 3, 20, 24)]
    first = next(iter(evaluation_batches(images, img_size=(20, 24), batch_size=3)))
    assert torch.equal(first[0], images.get(0))
    with pytest.raises(MAEError, match="picture-4 is broken"):
        list(evaluation_batches(image_set(7, broken=frozenset({4})), img_size=(8, 8), batch_size=3))


def test_normalise_scales_bytes_and_not_floats():
    mean, std = torch.tensor([0.5, 0.25]), torch.tensor([0.5, 0.25])
    bytes_in = torch.tensor([255, 0], dtype=torch.uint8).reshape(1, 2, 1, 1)
    assert normalise(bytes_in, mean, std).flatten().tolist() == [1.0, -1.0]
    assert normalise(torch.tensor([2.0, 2.0]).reshape(1, 2, 1, 1), mean, std).flatten().tolist() == [3.0, 7.0]
    assert len(IMAGENET_MEAN) == len(IMAGENET_STD) == 3


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32])
def test_normalise_rounds_as_its_formula_and_leaves_its_input(kind):
    images = torch.randint(0, 256, (3, 3, 8, 9), generator=torch.Generator().manual_seed(1)).to(kind)
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    before, scaled = images.clone(), images.float() / 255 if kind == torch.uint8 else images
    expected = (scaled - mean[:, None, None]) / std[:, None, None]
    assert torch.equal(normalise(images, mean, std), expected) and torch.equal(images, before)


def test_default_workers(monkeypatch):
    monkeypatch.setattr("mae.data.loading.loader.num_cores", lambda: 2)
    few = [("cpu", True), ("cpu", False), ("cuda", True)]
    assert [default_workers(*case, processes=1) for case in few] == [0, 0, 1]
    monkeypatch.setattr("mae.data.loading.loader.num_cores", lambda: 32)
    cases = [("cpu", True), ("cpu", False), ("cuda", True), ("cuda", False)]
    assert [default_workers(*case, processes=1) for case in cases] == [0, 4, 4, 16]
    assert [default_workers(*case, processes=8) for case in cases] == [0, 1, 2, 2]
    assert [default_workers(*case, processes=64) for case in cases] == [0, 0, 1, 1]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert [default_workers(*case, processes=1) for case in cases] == [0, 4, 0, 16]
