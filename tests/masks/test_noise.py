"""Band-passed noise: its filter, its spectrum, bands that are empty."""

import cmath
from math import hypot, pi

import pytest
import torch
from pieces import asked, layout_of
from torch import Tensor

from mae.errors import UsageError
from mae.masks.noise import NoiseMasking
from mae.masks.random import RandomMasking
from mae.randomness import Stream, sample_keys, uniform


def keys(count: int) -> Tensor:
    return sample_keys(0, 0, torch.arange(count))


def waves(grid: tuple[int, int]) -> list[tuple[int, int, float]]:
    """Each wave of a grid with its length in cycles per patch; numbers above half of an axis are negative ones."""
    rows, columns = grid
    return [
        (down, across, hypot(min(down, rows - down) / rows, min(across, columns - across) / columns))
        for down in range(rows)
        for across in range(columns)
    ]


def spectrum(values: list[float], grid: tuple[int, int]) -> dict[tuple[int, int], complex]:
    """The Fourier transform by its sum."""
    rows, columns = grid
    return {
        (down, across): sum(
            value * cmath.exp(-2j * pi * (down * (n // columns) / rows + across * (n % columns) / columns))
            for n, value in enumerate(values)
        )
        for down, across, _ in waves(grid)
    }


def in_band(hidden: Tensor, grid: tuple[int, int], low: float, high: float) -> float:
    """Of the variance of masks the fraction in a band."""
    inside = total = 0.0
    for row in hidden.tolist():
        power = {place: abs(value) ** 2 for place, value in spectrum(row, grid).items()}
        for down, across, length in waves(grid):
            if length > 0:
                total += power[down, across]
                inside += power[down, across] * (low <= length <= high)
    return inside / total


@pytest.mark.parametrize(("grid", "low", "high"), [((6, 7), 0.1, 0.35), ((5, 8), 0.3, 0.5), ((4, 9), 0.0, 0.2)])
def test_the_peaks_are_those_of_noise_that_is_filtered_by_sums(grid: tuple[int, int], low: float, high: float) -> None:
    rows, columns = grid
    white = (uniform(keys(4), rows * columns, Stream.MASK) - 0.5).tolist()
    plan = NoiseMasking(ratio=0.7, min_frequency=low, max_frequency=high).plan(asked(grid, keys(4)))
    for values, visible in zip(white, plan.visible.tolist(), strict=True):
        found = spectrum(values, grid)
        filtered = []
        for n in range(rows * columns):
            terms = (
                found[down, across]
                * (1.0 if 0 < length and low <= length <= high else 1e-3)
                * cmath.exp(2j * pi * (down * (n // columns) / rows + across * (n % columns) / columns))
                for down, across, length in waves(grid)
            )
            filtered.append(sum(terms).real)
        assert visible == sorted(range(rows * columns), key=lambda n: -filtered[n])[: len(visible)]


@pytest.mark.parametrize(("low", "high"), [(0.1, 0.35), (0.05, 0.2), (0.4, 0.6)])
def test_the_spectrum_of_masks_lies_in_the_band_where_that_of_random_masks_is_flat(low: float, high: float) -> None:
    grid = (10, 10)
    band = NoiseMasking(min_frequency=low, max_frequency=high).plan(asked(grid, keys(12))).hidden
    flat = RandomMasking().plan(asked(grid, keys(12))).hidden
    lengths = [length for _, _, length in waves(grid) if length > 0]
    even = sum(low <= length <= high for length in lengths) / len(lengths)
    assert abs(in_band(flat, grid, low, high) - even) < 0.08
    assert in_band(band, grid, low, high) > even + 0.5 * (1 - even)


def test_a_band_of_one_wave_leaves_no_order_to_rounding() -> None:
    """One wave along the columns has equal values down each of them; chance orders those, not their numbers."""
    masking = NoiseMasking(ratio=0.6, min_frequency=0.2, max_frequency=0.3)
    plan = masking.plan(asked((3, 4), keys(20_000)))  # a quarter of a cycle per patch: across alone
    rates = plan.hidden.double().mean(dim=0)
    rate = 8 / 12
    assert (rates - rate).abs().max() < 5 * (rate * (1 - rate) / 20_000) ** 0.5


@pytest.mark.parametrize(
    ("options", "grid", "told"),
    [
        ({}, (2, 2), "holds no frequency of a grid of 2x2 patches; the nearest is 0.5 cycles per patch"),
        ({}, (2, 1), "the nearest is 0.5"),
        ({"min_frequency": 0.26, "max_frequency": 0.32}, (4, 4), r"mask_min_frequency 0.26 .* the nearest is 0\.\d+"),
        ({"min_frequency": 0.8, "max_frequency": 0.9}, (8, 8), r"the nearest is 0\.707"),
    ],
)
def test_a_band_without_a_frequency_is_refused(options: dict[str, float], grid: tuple[int, int], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        NoiseMasking(ratio=0.5, **options).num_visible(layout_of(grid))


def test_limits_the_wrong_way_round_are_refused() -> None:
    with pytest.raises(UsageError, match=r"mask_min_frequency is 0.4, above the mask_max_frequency of 0.3"):
        NoiseMasking(min_frequency=0.4, max_frequency=0.3)


@pytest.mark.parametrize(("cycles", "length"), [(3, 7), (5, 12), (9, 20)])
def test_a_frequency_at_a_limit_is_in_the_band(cycles: int, length: int) -> None:
    """The transform's own number for it is a hair off the quotient."""
    limit = cycles / length
    for low, high in ((limit, limit), (limit - 0.01, limit), (limit, limit + 0.01)):
        assert NoiseMasking(min_frequency=low, max_frequency=high).num_visible(layout_of((length, 1))) == length // 4
