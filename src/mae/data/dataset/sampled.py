"""Whether a source has changed: its names, sizes, and the content of some of its items.

Names and sizes alone miss an image changed in place, and modification times change too easily: a copied folder has
others and the same content. So the content of a fixed sample is compared, up to 64 KiB an item. Where a fraction p of
the items was changed, a sample of n contains one of them with probability 1 - (1 - p)^n.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from mae.data.decode.limits import UnreadableImage
from mae.data.items import fingerprint_of
from mae.data.sources.labels import LabelledData
from mae.data.sources.source import Source
from mae.randomness import LARGEST_TABLE, Stream, lazy_permutation, permutation

SAMPLED = 256
"""Items whose content is compared: a change of one in a hundred is detected with a probability of 92 %."""

_SEED = 0  # of any run, so that the same images have the same fingerprint in all of them
_SAMPLED_BLOCKS = 8
_THREADS = 16  # on a network file system each file takes its time


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The content of some items of a source.

    Attributes:
        numbers: of the items.
        contents: a digest of each; empty for one that cannot be read.
    """

    numbers: tuple[int, ...]
    contents: tuple[str, ...]


def sampled(source: Source) -> Sampled:
    """The content of up to `SAMPLED` items, the same ones for all sources of one length."""
    numbers = tuple(sorted(first_of(_SEED, 0, len(source), SAMPLED).tolist()))

    def content(number: int) -> str:
        try:
            return source.content(number)
        except UnreadableImage:
            return ""

    with ThreadPoolExecutor(_THREADS) as pool:
        return Sampled(numbers=numbers, contents=tuple(pool.map(content, numbers)))


def fingerprint(source: Source) -> str:
    """16 hexadecimal digits of a source's names, sizes and sampled content."""
    return _joined(source.fingerprint(), sampled(source).contents)


def labelled_fingerprint(data: LabelledData) -> str:
    """16 hexadecimal digits of the fingerprints of both parts and the class names."""
    parts = [fingerprint(part.source) for part in (data.train, data.test)]
    return fingerprint_of([*parts, *data.class_names])


def version(source: Source) -> str:
    """16 hexadecimal digits that change with the `fingerprint`, the location or the modification times."""
    return _joined(source.version(), sampled(source).contents)


def _joined(listed: str, contents: Iterable[str]) -> str:
    return fingerprint_of([listed, *contents])


def first_of(seed: int, epoch: int, length: int, count: int) -> Int64[Tensor, " n"]:
    """The first `count` of `length` numbers in a keyed order, or all if they are fewer."""
    if length <= LARGEST_TABLE:
        return permutation(seed, epoch, length)[:count]
    return lazy_permutation(seed, epoch, length, torch.arange(min(count, length)))


def sample(source: Source, seed: int, epoch: int, count: int) -> Int64[Tensor, " n"]:
    """Numbers of `count` items, or of all if there are fewer, chosen by a key; from few blocks where there are any.

    Of items in blocks those of eight are chosen from, or of as many as needed: a shard of a pack is a fair sample of
    it, and each may have to be fetched.
    """
    if source.block_sizes is None:
        return first_of(seed, epoch, len(source), count)
    sizes = torch.from_numpy(source.block_sizes.astype(np.int64))
    blocks = permutation(seed, epoch, len(sizes), Stream.BLOCKS)
    enough = int(torch.searchsorted(sizes[blocks].cumsum(0), count)) + 1
    starts = sizes.cumsum(0) - sizes
    chosen = blocks[: max(enough, _SAMPLED_BLOCKS)]
    pool = torch.cat([starts[block] + torch.arange(int(sizes[block])) for block in chosen])
    return pool[first_of(seed, epoch, len(pool), count)]
