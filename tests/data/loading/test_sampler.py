"""The order of samples: the same however a run is divided or cut, each once an epoch, from few blocks at a time."""

import itertools
from itertools import islice
from math import gcd

import numpy as np
import pytest
import torch
from data.pictures import Pictures, noise
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from mae.config import RunConfig
from mae.data.dataset.images import load_images
from mae.data.decode.limits import ImageInfo
from mae.data.loading import sampler as order
from mae.data.loading.sampler import AllBut, BlockShuffle, FullShuffle, RankOrder
from mae.pretraining.resolve import RunContext
from mae.randomness import FIXED_EPOCH, LARGEST_TABLE, Stream, lazy_permutation, permutation, permuted, sample_keys


class Blocks(Pictures):
    """Images in blocks; `touched` records which of them are read or looked up."""

    block_sizes = np.array([])

    def __init__(self, sizes: list[int], broken: frozenset[int] = frozenset()) -> None:
        super().__init__([noise(4 + number % 3, 5, 3, number) for number in range(sum(sizes))], broken)
        self.block_sizes = np.array(sizes)
        self.touched: set[int] = set()

    def read(self, index: int) -> np.ndarray:
        self.touched.add(index)
        return super().read(index)

    def recorded(self, index: int) -> ImageInfo:
        self.touched.add(index)
        return super().recorded(index)


def whole(shuffle: FullShuffle | BlockShuffle) -> RankOrder:
    return RankOrder(shuffle=shuffle, accumulate=1, rank=0, world=1)


def blocks_of(ids: torch.Tensor, sizes: list[int]) -> set[int]:
    return set(torch.searchsorted(torch.tensor(sizes).cumsum(0), ids, right=True).tolist())


@st.composite
def shuffles(draw: st.DrawFn) -> BlockShuffle | FullShuffle:
    """Orders of some images that lie in blocks, of which some may be empty and some images left out."""
    sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=12))
    total = sum(sizes)
    left_out = draw(st.lists(st.integers(0, max(total - 1, 0)), unique=True, max_size=total // 3))
    numbers: AllBut | torch.Tensor = AllBut(total, torch.tensor(left_out, dtype=torch.int64))
    batch_size = draw(st.sampled_from([4, 12, 20, 36, 64, 100]))
    seed = draw(st.integers(0, 2**63 - 1))
    if len(numbers) < batch_size:
        sizes, numbers = [*sizes, batch_size], AllBut(total + batch_size, numbers._left_out)
    if draw(st.booleans()):
        numbers = numbers.table()
    if draw(st.integers(0, 4)) == 0:
        return FullShuffle(numbers=numbers, batch_size=batch_size, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        # Few in play make many windows of few images.
        patch.setattr(order, "_IN_PLAY", draw(st.sampled_from([2**18, 64, 16])))
        return BlockShuffle(numbers, torch.tensor(sizes), batch_size=batch_size, seed=seed)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_neither_processes_nor_accumulation_nor_resuming_change_the_order(data):
    """As ordered lists: each global batch is put together from its slices in their places."""
    shuffle = data.draw(shuffles())
    per_epoch = shuffle.steps_per_epoch
    steps = min(2 * per_epoch + 1, 20)
    expected = list(islice(whole(shuffle).from_step(0), steps))
    world, accumulate = data.draw(st.sampled_from([(1, 2), (2, 1), (4, 1), (2, 2), (1, 4)]))
    start = data.draw(st.integers(0, steps - 1))
    parts = [
        list(islice(RankOrder(shuffle=shuffle, accumulate=accumulate, rank=rank, world=world).from_step(start),
                    (steps - start) * accumulate))
        for rank in range(world)
    ]  # fmt: skip
    for step in range(start, steps):
        micro = range((step - start) * accumulate, (step - start + 1) * accumulate)
        slices = [parts[rank][number] for number in micro for rank in range(world)]
        for what in (0, 1):
            assert list(itertools.chain.from_iterable(part[what] for part in slices)) == expected[step][what]


@settings(deadline=None, max_examples=40)
@given(shuffle=shuffles())
def test_an_epoch_takes_whole_batches_of_the_chosen_and_none_twice(shuffle):
    numbers = shuffle.numbers.table() if isinstance(shuffle.numbers, AllBut) else shuffle.numbers
    steps = shuffle.steps_per_epoch
    assert steps == len(numbers) // shuffle.batch_size
    taken = list(islice(whole(shuffle).from_step(0), 2 * steps))
    for epoch in (0, 1):
        ids = [number for batch, _ in taken[epoch * steps : (epoch + 1) * steps] for number in batch]
        assert len(ids) == steps * shuffle.batch_size == len(set(ids)) and set(ids) <= set(numbers.tolist())
        keys = [key for _, keys in taken[epoch * steps : (epoch + 1) * steps] for key in keys]
        assert keys == sample_keys(shuffle.seed, epoch, torch.tensor(ids)).tolist()


def plain_block_order(
    numbers: list[int], sizes: list[int], *, batch_size: int, seed: int, epoch: int, windows: int = 1
) -> list[list]:
    """What the docstring says, with lists: the batches of an epoch."""
    ends = list(itertools.accumulate(sizes))
    blocks = [[n for n in sorted(numbers) if end - size <= n < end] for size, end in zip(sizes, ends, strict=True)]
    row = [n for block in permutation(seed, epoch, len(sizes), Stream.BLOCKS).tolist() for n in blocks[block]]
    key = sample_keys(seed, epoch, torch.tensor([-1]))
    (cut,) = permuted(key, torch.tensor([0]), len(row), Stream.BLOCKS).tolist()
    row = row[cut:] + row[:cut]
    count = gcd(batch_size, 128)
    length, part, steps = len(row) // count, batch_size // count, len(row) // batch_size
    bounds = [number * steps // windows * part for number in range(windows)] + [length]
    streams = []
    for stream in range(count):
        span = row[stream * length : (stream + 1) * length]
        shuffled = []
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            key = sample_keys(seed, epoch, torch.tensor([number * 128 + stream]))
            turned = permuted(key, torch.arange(end - begin), end - begin, Stream.WINDOW)
            shuffled += [span[begin + place] for place in turned.tolist()]
        streams.append(shuffled)
    return [[n for span in streams for n in span[step * part : (step + 1) * part]] for step in range(steps)]


def check_against_plain(shuffle: BlockShuffle) -> None:
    numbers = shuffle.numbers.table() if isinstance(shuffle.numbers, AllBut) else shuffle.numbers
    # Of its own sizes only those images are left that are chosen; renumbered they lie in blocks of these sizes.
    sizes, how = shuffle.block_sizes.tolist(), {"batch_size": shuffle.batch_size, "windows": shuffle.windows}
    for epoch in (0, 1):
        plain = plain_block_order(list(range(len(numbers))), sizes, seed=shuffle.seed, epoch=epoch, **how)
        first = epoch * shuffle.steps_per_epoch
        found = [ids for ids, _ in islice(whole(shuffle).from_step(first), shuffle.steps_per_epoch)]
        assert found == [numbers[torch.tensor(batch)].tolist() for batch in plain]


@settings(deadline=None, max_examples=30)
@given(shuffle=shuffles().filter(lambda shuffle: isinstance(shuffle, BlockShuffle)))
def test_blocks_are_shuffled_as_it_says(shuffle):
    check_against_plain(shuffle)


@pytest.mark.parametrize(("in_play", "windows"), [(24, 5), (60, 2), (2**18, 1)])
def test_several_windows_and_images_to_drop(in_play, windows, monkeypatch):
    monkeypatch.setattr(order, "_IN_PLAY", in_play)
    shuffle = BlockShuffle(AllBut(130), torch.tensor([30, 25, 0, 40, 35]), batch_size=12, seed=4)
    assert shuffle.windows == windows and shuffle.stream_length % shuffle.per_stream
    check_against_plain(shuffle)


def test_left_out_images_are_missing_from_their_blocks():
    sizes, left_out = [5, 0, 4, 7], [0, 6, 15]
    shuffle = BlockShuffle(AllBut(16, torch.tensor(left_out)), torch.tensor(sizes), batch_size=4, seed=1)
    kept = [number for number in range(16) if number not in left_out]
    assert shuffle.block_sizes.tolist() == [4, 0, 3, 6]
    assert [ids for ids, _ in islice(whole(shuffle).from_step(0), 3)] == plain_block_order(
        kept, sizes, batch_size=4, seed=1, epoch=0
    )
    mixed = torch.tensor(kept)[torch.tensor([3, 1, 0, 2, *range(12, 3, -1)])]
    given_so = BlockShuffle(mixed, torch.tensor(sizes), batch_size=4, seed=1)
    assert [ids for ids, _ in islice(whole(given_so).from_step(0), 6)] == (
        [ids for ids, _ in islice(whole(shuffle).from_step(0), 6)]
    )


def test_frozen_orders_so_that_old_runs_can_be_repeated():
    shuffle = BlockShuffle(AllBut(24), torch.tensor([6, 5, 7, 6]), batch_size=8, seed=3)
    assert [ids for ids, _ in islice(whole(shuffle).from_step(0), 4)] == [
        [21, 7, 9, 1, 4, 11, 16, 19],
        [20, 6, 10, 0, 3, 13, 14, 18],
        [22, 23, 8, 2, 5, 12, 15, 17],
        [6, 10, 20, 23, 13, 14, 0, 3],
    ]
    full = FullShuffle(numbers=AllBut(10), batch_size=5, seed=3)
    assert [ids for ids, _ in islice(whole(full).from_step(0), 2)] == permutation(3, 0, 10).reshape(2, 5).tolist()


def test_epochs_and_seeds_differ():
    sizes = torch.tensor([50] * 8)
    shuffle, other = (BlockShuffle(AllBut(400), sizes, batch_size=40, seed=seed) for seed in (0, 1))
    first, second = (torch.tensor(next(whole(shuffle).from_step(step))[0]) for step in (0, 10))
    for ids in (second, torch.tensor(next(whole(other).from_step(0))[0])):
        assert (first == ids).sum() < 5


def test_what_is_dropped_changes():
    shuffle = BlockShuffle(AllBut(70), torch.tensor([35, 35]), batch_size=32, seed=0)
    steps = [[ids for ids, _ in islice(whole(shuffle).from_step(2 * epoch), 2)] for epoch in range(40)]
    dropped = [set(range(70)) - set(itertools.chain(*epoch)) for epoch in steps]
    assert all(len(missed) == 6 for missed in dropped) and len(set().union(*dropped)) > 50


def test_a_small_set_is_shuffled_nearly_as_a_whole():
    """Each block is met in each part of an epoch as often as in a shuffle of all images."""
    sizes, counts = [50] * 40, torch.zeros(40, 4)
    shuffle = BlockShuffle(AllBut(2000), torch.tensor(sizes), batch_size=100, seed=0)
    for epoch in range(20):
        for step, (ids, _) in enumerate(islice(whole(shuffle).from_step(20 * epoch), 20)):
            counts[:, step // 5] += torch.bincount(torch.tensor(ids) // 50, minlength=40)
    assert chisquare(counts.flatten().numpy()).pvalue > 1e-3
    few = [len(blocks_of(torch.tensor(ids), sizes)) for ids, _ in islice(whole(shuffle).from_step(0), 20)]
    assert min(few) >= 30


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_it_is_told_which_blocks_will_be_read(data):
    shuffle = data.draw(shuffles().filter(lambda shuffle: isinstance(shuffle, BlockShuffle)))
    world, accumulate = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2)]))
    rank, steps = data.draw(st.integers(0, world - 1)), min(2 * shuffle.steps_per_epoch + 1, 12)
    start = data.draw(st.integers(0, steps))
    part = RankOrder(shuffle=shuffle, accumulate=accumulate, rank=rank, world=world)
    numbers = shuffle.numbers.table() if isinstance(shuffle.numbers, AllBut) else shuffle.numbers
    block = torch.searchsorted(shuffle.block_ends, torch.arange(len(numbers)), right=True)
    block_of = dict(zip(numbers.tolist(), block.tolist(), strict=True))
    ids = (ids for ids, _ in part.from_step(start))
    step = start
    for stretch in part.stretches(start):
        assert stretch.step == step and stretch.steps > 0
        read = {block_of[number] for batch in islice(ids, stretch.steps * accumulate) for number in batch}
        assert len(set(stretch.blocks)) == len(stretch.blocks) <= part.most_blocks and read <= set(stretch.blocks)
        # What is told and not read has images that an epoch drops, or that another part of the batch has.
        if world == accumulate == 1 and len(numbers) % shuffle.batch_size == 0 and step == start == 0:
            assert read == set(stretch.blocks)
        step += stretch.steps
        if step >= steps:
            break


def test_a_full_shuffle_has_no_blocks_to_tell():
    part = whole(FullShuffle(numbers=AllBut(10), batch_size=5, seed=0))
    assert list(part.stretches(0)) == [] and part.most_blocks == 0


def test_of_a_large_set_few_blocks_are_in_use_at_a_time():
    """Ten million images in 4,883 blocks: 128 streams of one or two blocks each, divided among the processes."""
    sizes = 2048 - torch.randint(0, 5, (4_883,), generator=torch.Generator().manual_seed(0))
    shuffle = BlockShuffle(AllBut(int(sizes.sum())), sizes, batch_size=4096, seed=0)
    alone = whole(shuffle)
    used = [len(stretch.blocks) for stretch in islice(alone.stretches(1000), 8)]
    assert max(used) <= 3 * 128 and sum(used) / 8 < 2.1 * 128 and max(used) <= alone.most_blocks <= 4 * 128
    parts = [RankOrder(shuffle=shuffle, accumulate=1, rank=rank, world=64) for rank in range(64)]
    assert max(len(next(part.stretches(1000)).blocks) for part in parts) <= parts[0].most_blocks <= 8
    # Two processes share a block at most where the streams of one end within it.
    fetched = [block for part in parts for block in next(part.stretches(1000)).blocks]
    assert len(fetched) - len(set(fetched)) <= 64
    # Each block of a stream is needed in one window or two that follow each other, and never again in an epoch.
    one = RankOrder(shuffle=shuffle, accumulate=1, rank=70, world=128)
    seen: dict[int, list[int]] = {}
    in_epoch = itertools.takewhile(lambda stretch: stretch.step < shuffle.steps_per_epoch, one.stretches(0))
    for number, stretch in enumerate(in_epoch):
        for block in stretch.blocks:
            seen.setdefault(block, []).append(number)
    assert all(windows in ([windows[0]], [windows[0], windows[0] + 1]) for windows in seen.values())
    assert len(seen) >= 38  # a hundred and twenty-eighth of them


def test_at_worst_small_blocks_lie_side_by_side():
    """The greatest number that is told holds in every order of the blocks."""
    sizes = torch.tensor([1, 30, 1, 1, 30, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_IN_PLAY", 6)
        parts = [whole(BlockShuffle(AllBut(64), sizes, batch_size=1, seed=seed)) for seed in range(300)]
    used = [len(stretch.blocks) for part in parts for stretch in islice(part.stretches(0), 11)]
    assert min(used) == 1 and max(used) == 6 == parts[0].most_blocks


@settings(deadline=None)
@given(total=st.integers(1, 200), data=st.data())
def test_all_but_some_are_the_others_in_order(total, data):
    left_out = data.draw(st.lists(st.integers(0, total - 1), unique=True))
    found = AllBut(total, torch.tensor(left_out, dtype=torch.int64))
    expected = [number for number in range(total) if number not in left_out]
    assert len(found) == len(expected) and found.table().tolist() == expected
    bounds = torch.arange(total + 1)
    assert found.below(bounds).tolist() == [sum(number < bound for number in expected) for bound in bounds.tolist()]


def test_nothing_as_long_as_the_set_is_made():
    """A million million images would take 8 TB as a table."""
    total = 10**12
    numbers = AllBut(total, torch.tensor([7, 10**11]))
    assert numbers[torch.tensor([6, 7, total - 3])].tolist() == [6, 8, total - 1]
    full = FullShuffle(numbers=AllBut(total), batch_size=8, seed=2)
    ids, _ = next(whole(full).from_step(full.steps_per_epoch + 5))
    assert ids == lazy_permutation(2, 1, total, torch.arange(40, 48)).tolist()
    blocks = BlockShuffle(numbers, torch.tensor([10**9] * 1000), batch_size=8, seed=2)
    ids, _ = next(whole(blocks).from_step(123_456_789))
    assert len(set(ids)) == 8 and 0 <= min(ids) and max(ids) < total


def test_a_table_is_used_as_far_as_it_was(monkeypatch):
    """Runs that were begun with it go on with it."""
    assert LARGEST_TABLE == 2**24
    monkeypatch.setattr(order, "LARGEST_TABLE", 40)
    for total, expected in ((40, permutation(3, 0, 40)), (41, lazy_permutation(3, 0, 41, torch.arange(41)))):
        found = whole(FullShuffle(numbers=torch.arange(total) + 5, batch_size=total, seed=3))
        assert next(found.from_step(0))[0] == (expected + 5).tolist()


def test_samples_are_of_few_blocks():
    sizes = [40, 60, 0, 50] * 10
    source = Blocks(sizes)
    images = load_images(source, in_chans=None, memory_limit=0)
    assert images.block_sizes.tolist() == sizes
    assert len(blocks_of(torch.tensor(sorted(source.touched)), sizes)) <= 10  # the headers of 256
    source.touched.clear()
    images.statistics(limit=150)
    assert len(blocks_of(torch.tensor(sorted(source.touched)), sizes)) <= 8 and len(source.touched) == 150
    found = images.sample(0, FIXED_EPOCH, 60)
    assert len(set(found.tolist())) == 60 and 4 < len(blocks_of(found, sizes)) <= 8
    assert torch.equal(found, images.sample(0, FIXED_EPOCH, 60))
    assert not torch.equal(found, images.sample(1, FIXED_EPOCH, 60))
    most = images.sample(0, 0, 500)  # more than eight blocks hold
    assert len(set(most.tolist())) == 500 and len(blocks_of(most, sizes)) <= 20
    assert images.sample(0, 0, 9999).sort().values.tolist() == list(range(1500))
    assert images.sample(0, 0, 0).tolist() == []


def test_samples_of_other_sources_are_what_they_were(monkeypatch):
    images = load_images(Pictures([noise(4, 4, 3, number) for number in range(30)]), in_chans=None)
    assert images.block_sizes is None
    assert torch.equal(images.sample(5, 2, 7), permutation(5, 2, 30)[:7])
    monkeypatch.setattr("mae.data.dataset.sampled.LARGEST_TABLE", 29)
    assert torch.equal(images.sample(5, 2, 7), lazy_permutation(5, 2, 30, torch.arange(7)))
    assert len(images.sample(5, 2, 31)) == 30


@pytest.mark.parametrize("in_blocks", [True, False])
def test_held_out_images_are_of_few_blocks(in_blocks):
    sizes = [25] * 40
    source = Blocks(sizes) if in_blocks else Pictures([noise(4, 4)] * 1000)
    images = load_images(source, in_chans=None, memory_limit=0)
    ready, other = object.__new__(RunContext), object.__new__(RunContext)  # with what tells it alone
    vars(ready).update(config=RunConfig.of(held_out=0.05, batch_size=10), images=images)
    vars(other).update(config=RunConfig.of(held_out=0.05, batch_size=10, seed=9), images=images)
    if in_blocks:
        assert len(blocks_of(ready.held_out, sizes)) <= 8
    else:
        assert torch.equal(ready.held_out, permutation(0, FIXED_EPOCH, 1000)[:50].sort().values)
    assert len(ready.held_out) == 50 and torch.equal(ready.held_out, ready.held_out.sort().values)
    assert torch.equal(torch.cat([ready.held_out, ready.trained]).sort().values, torch.arange(1000))
    assert torch.equal(ready.kept.table(), ready.trained) and ready.steps_per_epoch == 95
    assert torch.equal(other.held_out, ready.held_out)
