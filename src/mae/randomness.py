"""Random numbers that are pure functions of a key, so that a run is the same however it is cut up.

A sample's crop, flip and mask depend on `(seed, epoch, sample id)` alone: not on the number of workers or
processes, not on what was drawn before, not on the device, not on a library's version. The generator is
SplitMix64 (Steele, Lea & Flood 2014) used as a counter: the n-th number of a key is the finalizer of
`key + n * golden`. All arithmetic is 64-bit and wraps.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
from jaxtyping import Float, Int64
from torch import Tensor

FIXED_EPOCH = -1
"""What is looked at alike again and again, images and masks of pictures, is drawn as in no epoch of any run."""

LARGEST_TABLE = 2**24
"""Samples up to which the order of an epoch is a table of it, 128 MiB; of more it is computed where it is needed."""

_SORTED = 64
"""Up to so many numbers are permuted by sorting; a network of so few bits favours some permutations measurably."""

_ROUNDS = 10  # four are enough for large sets (Luby & Rackoff 1988); to be fair to hundreds takes more


class Stream(IntEnum):
    """What a number is drawn for; two streams of one key share nothing."""

    ORDER = 0
    CROP = 1
    MASK = 2
    REPLACEMENT = 3
    AUGMENT = 4
    ERASE = 5
    ERASE_NOISE = 6
    MIX = 7
    FORWARD = 8
    RATIO = 9
    LAZY_ORDER = 10
    BLOCKS = 11
    WINDOW = 12
    DIRECTIONS = 13
    COLOUR = 14
    CODES = 15


def _signed(constant: int) -> int:
    """The two's-complement value of an unsigned 64-bit constant, which is what an int64 tensor holds."""
    return constant - (1 << 64) if constant >= 1 << 63 else constant


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FACTOR_1 = _signed(0xBF58476D1CE4E5B9)
_FACTOR_2 = _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer; `>>` keeps the sign of an int64, so the sign's copies are masked away."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _FACTOR_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _FACTOR_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def sample_keys(seed: int, epoch: int, ids: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """One key for each sample id in an epoch of a seeded run.

    Args:
        seed: the run's seed, `0 <= seed < 2**63`.
        epoch: the epoch's number.
        ids: the samples' numbers.
    """
    run = _mix(torch.full((), seed, dtype=torch.int64, device=ids.device) + _GOLDEN)
    return _mix(_mix(run + epoch) + ids)


def view_keys(keys: Int64[Tensor, " B"], views: int) -> Int64[Tensor, " B_views"]:
    """Keys for several views of each sample, those of one sample in a row; the first is the sample's own."""
    others = _mix(keys.unsqueeze(1) + _multiples(views - 1, keys.device))
    return torch.cat([keys.unsqueeze(1), others], dim=1).flatten()


def _bits(keys: Int64[Tensor, " B"], count: int, stream: Stream) -> Int64[Tensor, "B count"]:
    start = _mix(keys + (int(stream) + 1))
    return _mix(start.unsqueeze(-1) + _multiples(count, keys.device))


def _multiples(count: int, device: torch.device) -> Int64[Tensor, " count"]:
    """1 to `count` times the increment of SplitMix64.

    Without the `^ 0` PyTorch's compiler takes the product into a loop's index, of signed C++ integers, which must not
    overflow as this does: what 2.15 compiled for CPUs wrote behind the end of the tensor.
    """
    return (torch.arange(1, count + 1, dtype=torch.int64, device=device) ^ 0) * _GOLDEN


def uniform(keys: Int64[Tensor, " B"], count: int, stream: Stream) -> Float[Tensor, "B count"]:
    """`count` numbers in `[0, 1)` for each key: float32 multiples of 2**-24, the same on every device."""
    return ((_bits(keys, count, stream) >> 40) & 0xFFFFFF).float() * 2.0**-24


def normal(keys: Int64[Tensor, " B"], count: int, stream: Stream) -> Float[Tensor, "B count"]:
    """`count` standard normal numbers for each key, float32 and finite; devices agree to rounding."""
    # Half a step up from [0, 1), so that neither end, where the inverse is infinite, is ever met.
    centred = 2 * uniform(keys, count, stream) - (1 - 2.0**-24)
    return torch.erfinv(centred) * 2**0.5


def seeds(keys: Int64[Tensor, " B"], stream: Stream) -> list[int]:
    """A seed in `[0, 2**63)` for each key, for a library that draws from a generator of its own."""
    seeded: list[int] = (_bits(keys, 1, stream).squeeze(1) & ((1 << 63) - 1)).tolist()
    return seeded


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """PyTorch's CPU generator starts at `seed` inside, and outside goes on as if nothing had been drawn.

    Unlike `torch.manual_seed` it leaves the generators of other devices alone, which could not be put back without
    waiting for the device. What is drawn inside is only as steady as the library that draws it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def permutation(seed: int, epoch: int, length: int, stream: Stream = Stream.ORDER) -> Int64[Tensor, " length"]:
    """The order in which an epoch visits `length` samples, as a table; of many use `lazy_permutation`."""
    key = sample_keys(seed, epoch, torch.zeros(1, dtype=torch.int64))
    return _bits(key, length, stream).squeeze(0).argsort(stable=True)


def lazy_permutation(seed: int, epoch: int, length: int, positions: Int64[Tensor, " B"]) -> Int64[Tensor, " B"]:
    """What stands at some positions of an order of `length` samples, at any length without a table of it.

    Another order than that of `permutation`, which cannot be known in part.
    """
    key = sample_keys(seed, epoch, torch.zeros(1, dtype=torch.int64))
    return permuted(key, positions, length, Stream.LAZY_ORDER)


def permuted(
    keys: Int64[Tensor, "#B"], positions: Int64[Tensor, " B"], length: int, stream: Stream
) -> Int64[Tensor, " B"]:
    """Where a key's permutation of the numbers below `length` takes some of them.

    Up to 64 numbers are sorted by keyed bits. Of more, a Feistel network permutes the numbers below the next power of
    two, and what it takes out of range is taken on until it is back: "cycle walking" (Black & Rogaway 2002, Ciphers
    with Arbitrary Finite Domains), less than two turns on average. The function of a round is SplitMix64's finalizer.
    All permutations of such a network are even, so half of the keys exchange two numbers behind it.

    Args:
        keys: the key of each number, or one for all.
        positions: the numbers, each from 0 to `length - 1`.
        length: how many there are.
        stream: what it is drawn for.

    Raises:
        ValueError: a number out of range, which might never come back into it.
    """
    if ((positions < 0) | (positions >= length)).any():
        raise ValueError(f"positions must be from 0 to {length - 1}")
    if length <= _SORTED:
        order = _bits(keys, length, stream).argsort(stable=True).expand(len(positions), length)
        return order.gather(1, positions.unsqueeze(1)).squeeze(1)
    bits = (length - 1).bit_length()
    drawn = _bits(keys, _ROUNDS + 1, stream).expand(len(positions), _ROUNDS + 1)
    rounds, exchanges = drawn[:, :-1], drawn[:, -1] < 0
    found = _feistel(positions, rounds, bits)
    outside = (found >= length).nonzero().squeeze(1)
    while len(outside):
        found[outside] = _feistel(found[outside], rounds[outside], bits)
        outside = outside[found[outside] >= length]
    exchanged = exchanges & ((found == 0) | (found == length - 1))
    return torch.where(exchanged, length - 1 - found, found)


def _feistel(values: Int64[Tensor, " B"], rounds: Int64[Tensor, "B rounds"], bits: int) -> Int64[Tensor, " B"]:
    """A permutation of the numbers of so many bits."""
    low = (bits + 1) // 2
    left, right = values >> low, values & ((1 << low) - 1)
    left_mask, right_mask = (1 << (bits - low)) - 1, (1 << low) - 1
    for first, second in zip(*(rounds[:, half::2].unbind(1) for half in (0, 1)), strict=True):
        left = left ^ (_mix(first + right * _GOLDEN) & left_mask)
        right = right ^ (_mix(second + left * _GOLDEN) & right_mask)
    return (left << low) | right
