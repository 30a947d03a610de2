"""The order of training images: a pure function of the seed, the step and the batch size.

Nothing depends on the number of processes, on how a step is divided among them or on where a run was interrupted.
Images that are read one by one are shuffled as a whole. Those in blocks, such as the shards of a pack, are shuffled so
that few blocks are in use at a time: a block that has to be fetched is fetched once an epoch.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Protocol

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.randomness import LARGEST_TABLE, Stream, lazy_permutation, permutation, permuted, sample_keys, view_keys

STREAMS = 128
"""Maximum number of streams of blocks. Up to 128 nodes, a power of two, share no stream: each has its own blocks."""

_IN_PLAY = 2**18
"""Images that a step may be drawn from, over all streams.

A set of so many or fewer is shuffled nearly as a whole. Of a larger one each stream has 2,048 images in play, one or
two shards of a pack; all of them, 256 shards of 110 MB (images of 54 KB), take 28 GB of one machine's cache or page
cache. More would buy little: the shards of a pack are fair samples of it, and no two epochs combine them alike.
"""


class AllBut:
    """The numbers below a total, in order, except some; takes no memory for the others."""

    def __init__(self, total: int, left_out: Int64[Tensor, " m"] | None = None) -> None:
        """Takes the total and the numbers to leave out, each once."""
        none = torch.empty(0, dtype=torch.int64)
        self._total = total
        self._left_out = (none if left_out is None else left_out).sort().values
        self._kept_before = self._left_out - torch.arange(len(self._left_out))

    def __len__(self) -> int:
        return self._total - len(self._left_out)

    def __getitem__(self, places: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        return places + torch.searchsorted(self._kept_before, places, right=True)

    def below(self, bounds: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """How many of them are smaller than each bound."""
        return bounds - torch.searchsorted(self._left_out, bounds)

    def table(self) -> Int64[Tensor, " n"]:
        """All of them."""
        return self[torch.arange(len(self))]


Numbers = Int64[Tensor, " n"] | AllBut


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Consecutive steps that need the same blocks.

    Attributes:
        step: the first one.
        steps: how many.
        blocks: numbers of the blocks that one process reads from, each once.
    """

    step: int
    steps: int
    blocks: tuple[int, ...]


class Epoch(Protocol):
    """The order of one epoch."""

    def ids(self, step: int, begin: int, end: int) -> Int64[Tensor, " n"]:
        """The images at positions `begin` to `end` of the batch of a step of this epoch."""
        ...


class Shuffle(Protocol):
    """An order of images, epoch by epoch."""

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        ...

    def epoch(self, epoch: int) -> Epoch:
        """The order of one epoch."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class FullShuffle:
    """Any image may follow any other.

    Step s takes positions `[s * batch_size, (s + 1) * batch_size)` of its epoch's permutation; what is left at the
    end of an epoch is dropped. Up to 16,777,216 images the permutation is a table; of more it is another one, which
    is computed where it is needed (`lazy_permutation`), so that neither memory nor time grow with the set.
    """

    numbers: Numbers
    batch_size: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return len(self.numbers) // self.batch_size

    def epoch(self, epoch: int) -> "_FullEpoch":
        """The order of one epoch."""
        return _FullEpoch(self, epoch)


class _FullEpoch:
    def __init__(self, shuffle: FullShuffle, epoch: int) -> None:
        self._shuffle, self._epoch, self._count = shuffle, epoch, len(shuffle.numbers)
        self._table = permutation(shuffle.seed, epoch, self._count) if self._count <= LARGEST_TABLE else None

    def ids(self, step: int, begin: int, end: int) -> Int64[Tensor, " n"]:
        shuffle = self._shuffle
        places = step * shuffle.batch_size + torch.arange(begin, end)
        if self._table is not None:
            return shuffle.numbers[self._table[places]]
        return shuffle.numbers[lazy_permutation(shuffle.seed, self._epoch, self._count, places)]


class BlockShuffle:
    """Images are read from few blocks at a time.

    The blocks of an epoch are put into a ring in a keyed order, which is cut into C streams of the same length, so that
    a block may belong to two; C is the greatest common divisor of the batch size and 128. A step takes
    `batch_size / C` images of each stream: place j of the batch is one of stream `j * C // batch_size`, so that a
    process, whose places stand together, reads from its own streams alone. The images of a stream are shuffled within
    windows of some steps; see `_IN_PLAY`. What is left at the end of an epoch, less than a batch, is dropped.

    Memory grows with the number of blocks, some 40 bytes for each, and not with that of images.
    """

    def __init__(self, numbers: Numbers, block_sizes: Int64[Tensor, " b"], *, batch_size: int, seed: int) -> None:
        """Takes what is to be drawn from.

        Args:
            numbers: the images, each once, in any order.
            block_sizes: how many images of the source each block holds, in order; not all need be among `numbers`.
            batch_size: images a step.
            seed: the run's seed.
        """
        ends = block_sizes.cumsum(0)
        if isinstance(numbers, AllBut):
            self.numbers: Numbers = numbers
            self.block_ends = numbers.below(ends)
        else:
            self.numbers = numbers.sort().values
            self.block_ends = torch.searchsorted(self.numbers, ends)
        self.block_sizes = self.block_ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        self.batch_size, self.seed = batch_size, seed
        self.streams = gcd(batch_size, STREAMS)
        self.per_stream = batch_size // self.streams
        self.stream_length = len(self.numbers) // self.streams
        # As many windows as come nearest to the right length, all of about the same: a last one of a few images would
        # hardly be shuffled.
        wanted = round(self.steps_per_epoch * batch_size / _IN_PLAY)
        self.windows = max(1, min(wanted, self.steps_per_epoch))

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in an epoch."""
        return len(self.numbers) // self.batch_size

    def epoch(self, epoch: int) -> "_BlockEpoch":
        """The order of one epoch."""
        return _BlockEpoch(self, epoch)

    def window(self, step: int) -> "_Window":
        """The window that a step of an epoch lies in."""
        steps = self.steps_per_epoch
        number = ((step + 1) * self.windows - 1) // steps
        first, end = (bound * steps // self.windows for bound in (number, number + 1))
        begin = first * self.per_stream
        # The last one has what the epoch drops too, or it would always be the same images of a stream's last block.
        length = (self.stream_length if end == steps else end * self.per_stream) - begin
        return _Window(number=number, first_step=first, end_step=end, begin=begin, length=length)

    def streams_of(self, slots: list[tuple[int, int]]) -> list[int]:
        """The streams that some places of a batch, each from the first to before the second, belong to."""
        spans = (range(begin // self.per_stream, (end - 1) // self.per_stream + 1) for begin, end in slots)
        return sorted(set(itertools.chain.from_iterable(spans)))

    def most_blocks(self, streams: int) -> int:
        """Upper bound on the blocks that so many streams use at once, in whatever order."""
        sizes = self.block_sizes[self.block_sizes > 0].sort().values
        longest = max(self.window(step).length for step in (0, self.steps_per_epoch // 2, self.steps_per_epoch - 1))
        # At worst it begins at the last image of a block, continues with the smallest and has one image of the next.
        whole = int(torch.searchsorted(sizes.cumsum(0), longest + self.per_stream - 2, right=True))
        return min(len(sizes), streams * (whole + 2))


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Steps of an epoch that are drawn from the same images: `length` of each stream, from its image `begin` on."""

    number: int
    first_step: int
    end_step: int
    begin: int
    length: int


class _BlockEpoch:
    def __init__(self, shuffle: BlockShuffle, epoch: int) -> None:
        self._shuffle, self._epoch = shuffle, epoch
        sizes, ends = shuffle.block_sizes, shuffle.block_ends
        self._blocks = permutation(shuffle.seed, epoch, len(sizes), Stream.BLOCKS)
        self._ends = sizes[self._blocks].cumsum(0)
        self._shift = ends[self._blocks] - self._ends  # from a place in this order to one among all images
        # The order is a ring, cut anywhere, so that what the streams do not share out is not always the end of a block.
        key, first = sample_keys(shuffle.seed, epoch, torch.tensor([-1])), torch.zeros(1, dtype=torch.int64)
        self._cut = permuted(key, first, len(shuffle.numbers), Stream.BLOCKS)

    def ids(self, step: int, begin: int, end: int) -> Int64[Tensor, " n"]:
        shuffle, window = self._shuffle, self._shuffle.window(step)
        slots = torch.arange(begin, end)
        streams = slots // shuffle.per_stream
        keys = sample_keys(shuffle.seed, self._epoch, window.number * STREAMS + streams)
        turns = (step - window.first_step) * shuffle.per_stream + slots % shuffle.per_stream
        inside = permuted(keys, turns, window.length, Stream.WINDOW)
        places = self._places(streams * shuffle.stream_length + window.begin + inside)
        return shuffle.numbers[places + self._shift[self._rows(places)]]

    def blocks(self, window: _Window, streams: list[int]) -> tuple[int, ...]:
        """The blocks that some streams are drawn from in a window."""
        total, count = len(self._shuffle.numbers), len(self._blocks)
        starts = self._places(torch.tensor(streams) * self._shuffle.stream_length + window.begin)
        ends = starts + window.length - 1
        first, last = self._rows(starts), self._rows(ends % total) + count * (ends // total)
        rows = [torch.arange(begin, end + 1) % count for begin, end in zip(first.tolist(), last.tolist(), strict=True)]
        found = self._blocks[torch.cat(rows)]
        return tuple(dict.fromkeys(found[self._shuffle.block_sizes[found] > 0].tolist()))

    def _places(self, places: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """From places in the streams, one behind the other, to places in the row of blocks."""
        return (places + self._cut) % len(self._shuffle.numbers)

    def _rows(self, places: Int64[Tensor, " n"]) -> Int64[Tensor, " n"]:
        """Which block of the row each place lies in."""
        return torch.searchsorted(self._ends, places, right=True)


def make_shuffle(
    numbers: Numbers, block_sizes: Int64[Tensor, " b"] | None, *, batch_size: int, seed: int
) -> FullShuffle | BlockShuffle:
    """The order of some images of a source: by blocks where it has them."""
    if block_sizes is None:
        return FullShuffle(numbers=numbers, batch_size=batch_size, seed=seed)
    return BlockShuffle(numbers, block_sizes, batch_size=batch_size, seed=seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class RankOrder:
    """The samples and keys of a process's slice of each micro-batch.

    Attributes:
        shuffle: the order of images; its batch counts each image once.
        accumulate: micro-batches a step.
        rank: this process's number.
        world: number of processes that train together.
        views: how often an image is in a batch, each time with another key.
    """

    shuffle: FullShuffle | BlockShuffle
    accumulate: int
    rank: int
    world: int
    views: int = 1

    @cached_property
    def slots(self) -> list[tuple[int, int]]:
        """Begin and end of this process's slice of each micro-batch in the shuffle's batch."""
        micro = self.shuffle.batch_size // self.accumulate
        part = micro // self.world
        begins = [number * micro + self.rank * part for number in range(self.accumulate)]
        return [(begin, begin + part) for begin in begins]

    def from_step(self, start_step: int) -> Iterator[tuple[list[int], list[int]]]:
        """Ids and keys of each micro-batch from a step on, endlessly."""
        first_epoch, skipped = divmod(start_step, self.shuffle.steps_per_epoch)
        for number in itertools.count(first_epoch):
            epoch = self.shuffle.epoch(number)
            for step in range(skipped, self.shuffle.steps_per_epoch):
                for begin, end in self.slots:
                    ids = epoch.ids(step, begin, end)
                    keys = view_keys(sample_keys(self.shuffle.seed, number, ids), self.views)
                    # Lists, because each tensor sent to a process costs a shared-memory file.
                    yield ids.repeat_interleave(self.views).tolist(), keys.tolist()
            skipped = 0

    def stretches(self, start_step: int) -> Iterator[Stretch]:
        """The blocks read from a step on, endlessly; nothing where images are not in blocks."""
        shuffle = self.shuffle
        if isinstance(shuffle, FullShuffle):
            return
        streams = shuffle.streams_of(self.slots)
        first_epoch, step = divmod(start_step, shuffle.steps_per_epoch)
        for number in itertools.count(first_epoch):
            epoch = shuffle.epoch(number)
            while step < shuffle.steps_per_epoch:
                window = shuffle.window(step)
                yield Stretch(
                    step=number * shuffle.steps_per_epoch + step,
                    steps=window.end_step - step,
                    blocks=epoch.blocks(window, streams),
                )
                step = window.end_step
            step = 0

    @property
    def most_blocks(self) -> int:
        """Upper bound on the blocks this process uses at once; 0 where images are not in blocks."""
        if isinstance(self.shuffle, FullShuffle):
            return 0
        return self.shuffle.most_blocks(len(self.shuffle.streams_of(self.slots)))
