"""Known answers, independence and uniformity of the counter-based numbers."""

import math
from pathlib import Path

import pytest
import torch
from compiler import run_compiled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, chi2, chisquare, ks_2samp, kstest

from mae.randomness import (
    Stream,
    _mix,
    drawing_from,
    lazy_permutation,
    normal,
    permutation,
    permuted,
    sample_keys,
    seeds,
    uniform,
)

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """SplitMix64's finalizer on plain unsigned integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def reference_key(seed: int, epoch: int, sample: int) -> int:
    run = mix((seed + GOLDEN) & MASK64)
    return mix((mix((run + epoch) & MASK64) + sample) & MASK64)


def reference_uniform(key: int, count: int, stream: int) -> list[float]:
    start = mix((key + stream + 1) & MASK64)
    return [(mix((start + n * GOLDEN) & MASK64) >> 40) / 2**24 for n in range(1, count + 1)]


def test_the_reference_gives_the_published_outputs_of_splitmix64() -> None:
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert [mix((1234567 + n * GOLDEN) & MASK64) for n in range(1, 6)] == published


def test_the_finalizer_matches_plain_integers_signs_included() -> None:
    values = [0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**63 + 1, MASK64, GOLDEN, 1234567 + GOLDEN]
    got = _mix(torch.tensor([signed(v) for v in values]))
    assert [int(v) & MASK64 for v in got] == [mix(v) for v in values]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (7, 3), (2**63 - 1, 2**40)])
def test_keys_and_numbers_match_plain_integers(seed: int, epoch: int) -> None:
    ids = [0, 1, 2, 12345, 2**62]
    keys = sample_keys(seed, epoch, torch.tensor(ids))
    assert [int(k) & MASK64 for k in keys] == [reference_key(seed, epoch, i) for i in ids]
    for stream in Stream:
        got = uniform(keys, 5, stream)
        assert got.dtype == torch.float32
        assert got.tolist() == [reference_uniform(int(k) & MASK64, 5, stream) for k in keys]


def test_negative_and_extreme_keys_wrap_around() -> None:
    keys = torch.tensor([-1, -(2**63), 2**63 - 1, -1234567])
    expected = [reference_uniform(int(k) & MASK64, 4, Stream.CROP) for k in keys]
    assert uniform(keys, 4, Stream.CROP).tolist() == expected


def test_frozen_values_so_that_old_runs_can_be_repeated() -> None:
    keys = sample_keys(0, 0, torch.tensor([0, 1]))
    assert keys.tolist() == [signed(reference_key(0, 0, 0)), signed(reference_key(0, 0, 1))]
    assert permutation(0, 0, 8).tolist() == [1, 0, 7, 4, 6, 5, 2, 3]


def test_a_sample_does_not_depend_on_its_neighbours_or_on_how_many_numbers_are_asked_for() -> None:
    together = uniform(sample_keys(5, 2, torch.arange(10)), 7, Stream.MASK)
    alone = uniform(sample_keys(5, 2, torch.tensor([6])), 3, Stream.MASK)
    assert torch.equal(together[6, :3], alone[0])


def test_numbers_are_uniform_in_the_half_open_interval() -> None:
    numbers = uniform(sample_keys(3, 1, torch.arange(2000)), 100, Stream.MASK)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    expected = numbers.numel() / 64
    chi_squared = ((counts - expected).square() / expected).sum()
    assert 20 < chi_squared < 130  # 63 degrees of freedom: mean 63, deviation 11; six deviations up


@pytest.mark.parametrize(
    ("seed", "epoch", "first", "stream"),
    [(3, 1, 0, Stream.CROP), (3, 2, 0, Stream.MASK), (4, 1, 0, Stream.MASK), (3, 1, 1, Stream.MASK)],
    ids=["stream", "epoch", "seed", "sample"],
)
def test_what_differs_in_one_thing_is_uncorrelated(seed: int, epoch: int, first: int, stream: Stream) -> None:
    base = uniform(sample_keys(3, 1, torch.arange(500)), 100, Stream.MASK)
    other = uniform(sample_keys(seed, epoch, torch.arange(first, first + 500)), 100, stream)
    correlation = torch.corrcoef(torch.stack([base.flatten(), other.flatten()]))[0, 1]
    assert abs(correlation) < 0.025  # 50000 pairs: deviation 0.0045
    assert not torch.isin(other[0], base[0]).any()


def test_keys_of_samples_epochs_and_seeds_do_not_collide() -> None:
    keys = torch.cat([sample_keys(s, e, torch.arange(1000)) for s in range(4) for e in range(5)])
    assert keys.unique().numel() == keys.numel()


def test_permutation_visits_each_sample_once_and_changes_with_the_epoch() -> None:
    first, second = permutation(1, 0, 1000), permutation(1, 1, 1000)
    for order in (first, second):
        assert torch.equal(order.sort().values, torch.arange(1000))
    assert (first == second).sum() < 12  # one expected by chance
    assert torch.equal(first, permutation(1, 0, 1000))
    assert permutation(1, 0, 0).numel() == 0 and permutation(1, 0, 1).tolist() == [0]


def test_every_place_of_a_permutation_is_equally_likely() -> None:
    first = torch.stack([permutation(9, epoch, 10) for epoch in range(2000)])
    counts = torch.stack([(first == value).sum(dim=0) for value in range(10)]).float()
    assert (counts - 200).abs().max() < 6 * (2000 * 0.1 * 0.9) ** 0.5


def test_streams_keep_their_numbers_so_that_old_runs_can_be_repeated() -> None:
    names = ["ORDER", "CROP", "MASK", "REPLACEMENT", "AUGMENT", "ERASE", "ERASE_NOISE", "MIX", "FORWARD", "RATIO"]
    names += ["LAZY_ORDER", "BLOCKS", "WINDOW", "DIRECTIONS", "COLOUR", "CODES"]
    assert [(stream.name, int(stream)) for stream in Stream] == [(name, number) for number, name in enumerate(names)]


def test_normal_numbers_are_the_normal_quantiles_of_the_uniform_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = sample_keys(3, 1, torch.arange(500))
    numbers = normal(keys, 200, Stream.ERASE_NOISE)
    centred = uniform(keys, 200, Stream.ERASE_NOISE).double() + 2.0**-25
    assert numbers.dtype == torch.float32
    assert torch.allclose(numbers.double(), torch.special.ndtri(centred), rtol=1e-4, atol=1e-6)
    assert kstest(numbers.flatten().numpy(), "norm").pvalue > 1e-3
    extremes = torch.tensor([[0.0, 1 - 2.0**-24]])
    monkeypatch.setattr("mae.randomness.uniform", lambda *_: extremes)
    low, high = normal(keys[:1], 2, Stream.ERASE_NOISE)[0].tolist()
    assert -6 < low < -5 and low == pytest.approx(-high)


def test_seeds_are_distinct_and_not_negative() -> None:
    keys = sample_keys(3, 1, torch.arange(5000))
    found = [*seeds(keys, Stream.AUGMENT), *seeds(keys, Stream.MIX)]
    assert len(set(found)) == 10_000 and 0 <= min(found) and 2**62 < max(found) < 2**63
    assert found[7] == seeds(keys[7:8], Stream.AUGMENT)[0]
    assert found[7] == mix((mix((int(keys[7]) + Stream.AUGMENT + 1) & MASK64) + GOLDEN) & MASK64) & (2**63 - 1)


def test_drawing_from_a_seed_leaves_the_callers_generator_alone() -> None:
    with drawing_from(5):
        first = torch.rand(3)
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), drawing_from(5):
        assert torch.equal(torch.rand(3), first)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def reference_permuted(key: int, position: int, length: int, stream: int) -> int:
    """The same on plain unsigned integers: few are sorted, many go through a network."""
    start = mix((key + stream + 1) & MASK64)
    if length <= 64:
        drawn = [mix((start + n * GOLDEN) & MASK64) for n in range(1, length + 1)]
        signed = [value - (value >> 63 << 64) for value in drawn]
        return sorted(range(length), key=signed.__getitem__)[position]
    *rounds, exchange = [mix((start + n * GOLDEN) & MASK64) for n in range(1, 12)]
    bits = (length - 1).bit_length()
    low = (bits + 1) // 2
    while True:
        left, right = position >> low, position & (2**low - 1)
        for first, second in zip(rounds[::2], rounds[1::2], strict=True):
            left ^= mix((first + right * GOLDEN) & MASK64) & (2 ** (bits - low) - 1)
            right ^= mix((second + left * GOLDEN) & MASK64) & (2**low - 1)
        position = left << low | right
        if position < length:
            return length - 1 - position if exchange >> 63 and position in (0, length - 1) else position


@pytest.mark.parametrize("length", [1, 2, 3, 5, 63, 64, 65, 70, 1000, 2**24 + 1, 10**9, 2**40])
def test_a_permutation_without_a_table_matches_plain_integers(length: int) -> None:
    step = 1 if length < 100 else length // 9
    positions = list(range(0, length, step))
    for epoch in (2, 3, 4):
        key = reference_key(4, epoch, 0)
        found = lazy_permutation(4, epoch, length, torch.tensor(positions)).tolist()
        assert found == [reference_permuted(key, position, length, Stream.LAZY_ORDER) for position in positions]


def test_frozen_values_of_permutations_without_a_table() -> None:
    assert lazy_permutation(0, 0, 10**9, torch.arange(4)).tolist() == [104657922, 117984055, 427126785, 841742388]
    keys = sample_keys(0, 0, torch.arange(4))
    assert permuted(keys, torch.tensor([0, 1, 2, 0]), 2048, Stream.WINDOW).tolist() == [1772, 1591, 940, 796]


@settings(deadline=None, max_examples=60)
@given(length=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 1000))
@example(length=1, seed=0, epoch=0)
@example(length=2, seed=0, epoch=0)
@example(length=3, seed=0, epoch=0)
@example(length=5, seed=0, epoch=0)
@example(length=7, seed=0, epoch=0)
@example(length=4095, seed=0, epoch=0)
@example(length=4096, seed=0, epoch=0)
@example(length=4097, seed=0, epoch=0)
def test_a_permutation_without_a_table_takes_each_number_once(length: int, seed: int, epoch: int) -> None:
    whole = lazy_permutation(seed, epoch, length, torch.arange(length))
    assert torch.equal(whole.sort().values, torch.arange(length))
    some = torch.arange(length).flip(0)[::3]
    assert torch.equal(lazy_permutation(seed, epoch, length, some), whole[some])


@pytest.mark.parametrize("outside", [-1, 16])
def test_a_position_out_of_range_is_refused(outside: int) -> None:
    with pytest.raises(ValueError, match="from 0 to 15"):
        lazy_permutation(0, 0, 16, torch.tensor([3, outside]))


def test_seeds_epochs_and_streams_have_permutations_of_their_own() -> None:
    places = torch.arange(1000)
    first = lazy_permutation(1, 0, 1000, places)
    keys = sample_keys(1, 0, torch.zeros(1, dtype=torch.int64))
    others = [lazy_permutation(1, 1, 1000, places), lazy_permutation(2, 0, 1000, places), permutation(1, 0, 1000)]
    for other in [*others, permuted(keys, places, 1000, Stream.WINDOW), places]:
        assert (first == other).sum() < 12  # one expected by chance
    assert torch.equal(permuted(keys, places, 1000, Stream.LAZY_ORDER), first)


def permutations_of_keys(length: int, count: int, seed: int) -> torch.Tensor:
    """One permutation a row, each of another key."""
    keys = sample_keys(seed, 0, torch.arange(count))
    columns = [permuted(keys, torch.full((count,), place), length, Stream.WINDOW) for place in range(length)]
    return torch.stack(columns, dim=1)


def even(table: torch.Tensor) -> torch.Tensor:
    """Which rows take an even number of exchanges to sort."""
    steps = sum((table[:, place + 1 :] < table[:, place : place + 1]).sum(1) for place in range(table.shape[1]))
    return torch.as_tensor(steps) % 2 == 0


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 7])
def test_all_permutations_of_few_are_as_likely(length: int) -> None:
    table = permutations_of_keys(length, 300_000, seed=11)
    found = torch.bincount((table * length ** torch.arange(length)).sum(1))
    found = found[found > 0]
    assert len(found) == math.factorial(length)
    assert chisquare(found.tolist()).pvalue > 1e-4


@pytest.mark.parametrize("length", [2, 5, 8, 9, 15, 16, 17, 31, 32, 33, 50, 64, 65, 100, 128, 129])
def test_small_permutations_are_fair(length: int) -> None:
    """Each number as often in each place, each pair as often in some two places, odd as often as even ones."""
    count = 10_000
    table = permutations_of_keys(length, count, seed=12)
    places = torch.bincount((torch.arange(length) * length + table).flatten(), minlength=length**2).double()
    # Rows and columns of the table of counts add up by themselves, hence the fewer degrees of freedom.
    excess = (places - count / length).square().sum() / (count / length) * (length - 1) / length
    assert chi2.sf(float(excess), (length - 1) ** 2) > 1e-4
    for first, second in {(0, 1), (length - 1, length // 2 - 1)}:
        pairs = torch.bincount(table[:, first] * length + table[:, second], minlength=length**2)
        pairs = pairs[~torch.eye(length, dtype=torch.bool).flatten()]
        assert chisquare(pairs.tolist()).pvalue > 1e-4
    assert binomtest(int(even(table).sum()), count).pvalue > 1e-4


@pytest.mark.parametrize("length", [3000, 4096, 65537])
def test_large_permutations_look_like_random_ones(length: int) -> None:
    places, shares = torch.arange(length), []
    truly = torch.Generator().manual_seed(0)
    cells = length // 16 + 1
    for epoch in range(20):
        order = lazy_permutation(7, epoch, length, places)
        counts = torch.bincount(places // cells * 16 + order // cells, minlength=256).double()
        widths = torch.bincount(places // cells, minlength=16).double()
        expected = widths[:, None] * widths / length
        shares.append(float(((counts.reshape(16, 16) - expected).square() / expected).sum()))
        # Neighbours must be as far apart as in a true one, both in whole and by the lowest bits alone.
        other = torch.randperm(length, generator=truly)
        steps = [each.diff().double().numpy() for each in (order, other)]
        assert ks_2samp(*steps).pvalue > 1e-4
        bits = torch.bincount((order % 8).diff() + 7, minlength=15).double()
        by_chance = torch.tensor([8.0 - abs(step) for step in range(-7, 8)]) / 64 * (length - 1)
        assert ((bits - by_chance).square() / by_chance).sum() < 60  # 14 degrees of freedom, somewhat dependent
        fixed = int((order == places).sum())
        assert fixed < 10  # one expected
    # 15 x 15 degrees of freedom and 20 tables: mean 225, deviation 4.7
    assert abs(sum(shares) / 20 - 225) < 6 * 4.8


COMPILED = """
import torch
from mae.randomness import Stream, uniform

keys = torch.arange(16)
for count in (5, 196):  # no multiples of what a processor computes at once
    compiled = torch.compile(lambda keys: uniform(keys, count, Stream.MASK), dynamic=False)
    for _ in range(20):
        assert torch.equal(compiled(keys), uniform(keys, count, Stream.MASK))
        torch.zeros(16 * count)  # memory that was overwritten shows where more is asked for
"""


@pytest.mark.slow
def test_compiled_for_a_cpu_it_draws_the_same_and_writes_within_the_tensor():
    run_compiled(COMPILED, folder=Path(__file__).parent)
