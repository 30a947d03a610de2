"""Lattices: even spacing, every phase, exact counts between two lattices."""

import pytest
import torch
from pieces import asked
from torch import Tensor

from mae.masks.regular import RegularMasking
from mae.randomness import sample_keys


def keys(count: int) -> Tensor:
    return sample_keys(0, 0, torch.arange(count))


def visible_sets(grid: tuple[int, int], ratio: float, count: int = 400) -> set[frozenset[int]]:
    plan = RegularMasking(ratio=ratio).plan(asked(grid, keys(count)))
    return {frozenset(row) for row in plan.visible.tolist()}


def cells(grid: tuple[int, int], wanted: object) -> frozenset[int]:
    rows, columns = grid
    return frozenset(row * columns + column for row in range(rows) for column in range(columns) if wanted(row, column))  # type: ignore[operator]


@pytest.mark.parametrize("grid", [(14, 14), (8, 6), (2, 10)])
def test_at_three_quarters_one_of_each_four_is_visible(grid: tuple[int, int]) -> None:
    expected = {
        cells(grid, lambda row, column, down=down, across=across: row % 2 == down and column % 2 == across)
        for down in range(2)
        for across in range(2)
    }
    assert visible_sets(grid, 0.75) == expected


def test_at_a_half_it_is_a_checkerboard() -> None:
    expected = {cells((14, 6), lambda row, column, colour=colour: (row + column) % 2 == colour) for colour in range(2)}
    assert visible_sets((14, 6), 0.5) == expected


def test_higher_ratios_are_lattices_of_wider_spacing() -> None:
    assert visible_sets((8, 12), 15 / 16) == {
        cells((8, 12), lambda row, column, down=down, across=across: row % 4 == down and column % 4 == across)
        for down in range(4)
        for across in range(4)
    }
    assert visible_sets((8, 8), 7 / 8) == {
        cells(
            (8, 8),
            lambda row, column, down=down, across=across, colour=colour: (
                row % 2 == down and column % 2 == across and (row // 2 + column // 2) % 2 == colour
            ),
        )
        for down in range(2)
        for across in range(2)
        for colour in range(2)
    }


def test_on_a_line_every_nth_is_visible() -> None:
    every_fourth = {frozenset(range(phase, 16, 4)) for phase in range(4)}
    assert visible_sets((1, 16), 0.75) == visible_sets((16, 1), 0.75) == every_fourth


def bayer(levels: int) -> list[list[int]]:
    """The dither matrix by its recursion (Bayer 1973): four copies, each set off by its place in the smallest one."""
    if levels == 0:
        return [[0]]
    smaller, half, place = bayer(levels - 1), 2 ** (levels - 1), ((0, 2), (3, 1))
    side = range(2 * half)
    return [[4 * smaller[row % half][col % half] + place[row // half][col // half] for col in side] for row in side]


@pytest.mark.parametrize(("grid", "ratio"), [((5, 7), 0.6), ((3, 3), 0.75), ((6, 8), 0.7), ((7, 1), 0.5)])
def test_on_any_grid_masks_and_rates_are_those_of_all_phases_of_the_dither_matrix(
    grid: tuple[int, int], ratio: float
) -> None:
    (rows, columns), levels = grid, (max(grid) - 1).bit_length()
    numbers = [bayer(levels)[row][column] for row in range(rows) for column in range(columns)]
    count, samples = int(rows * columns * (1 - ratio) + 1e-6), 20_000
    masks = [
        sorted(range(len(numbers)), key=lambda token, phase=phase: numbers[token] ^ phase)[:count]
        for phase in range(4**levels)
    ]
    assert visible_sets(grid, ratio, samples) == {frozenset(mask) for mask in masks}
    expected = torch.zeros(rows * columns, dtype=torch.float64)
    for mask in masks:
        expected[mask] += 1 / len(masks)
    plan = RegularMasking(ratio=ratio).plan(asked(grid, keys(samples)))
    rates = (~plan.hidden).double().mean(dim=0)
    assert ((rates - expected).abs() <= 5 * (expected * (1 - expected) / samples).sqrt()).all()
