"""Whether a source holds what it held before: names, sizes, and the content of some of its items.

Names and sizes alone would not tell an image that was changed in place, and times of the last change tell too much: a
copied folder has others and holds the same. So the content of a fixed sample is compared, up to 64 KiB an item. Where a
share p of the items was changed, one of the n in the sample is with probability 1 - (1 - p)^n.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.data.base import Source, fingerprint_of
from mae.data.limits import UnreadableImage
from mae.randomness import LARGEST_TABLE, lazy_permutation, permutation

SAMPLED = 256
"""Items whose content is compared: a change of one in a hundred is seen with a probability of 92 %."""

_SEED = 0  # of any run, so that the same images have the same fingerprint in all of them
_THREADS = 16  # on a disk far away each file takes its time


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """What some items of a source hold.

    Attributes:
        numbers: of the items.
        contents: digits of each, empty for one that cannot be read.
    """

    numbers: tuple[int, ...]
    contents: tuple[str, ...]


def sampled(source: Source) -> Sampled:
    """The content of up to `SAMPLED` items, the same ones of sources of the same length."""
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


def version(source: Source) -> str:
    """16 hexadecimal digits that change with the `fingerprint`, and with the place or the times of the last change."""
    return _joined(source.version(), sampled(source).contents)


def _joined(told: str, contents: Iterable[str]) -> str:
    return fingerprint_of([told, *contents])


def first_of(seed: int, epoch: int, length: int, count: int) -> Int64[Tensor, " n"]:
    """The first `count` of `length` numbers in a keyed order, or all if they are fewer."""
    if length <= LARGEST_TABLE:
        return permutation(seed, epoch, length)[:count]
    return lazy_permutation(seed, epoch, length, torch.arange(min(count, length)))
