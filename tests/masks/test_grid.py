"""Cells masked as wholes: one at most is cut, border cells are smaller, rates are those of all orders."""

from itertools import permutations

import pytest
import torch
from pieces import asked, layout_of
from torch import Tensor

from mae.errors import UsageError
from mae.masks.grid import GridMasking
from mae.masks.random import RandomMasking
from mae.randomness import sample_keys


def keys(count: int) -> Tensor:
    return sample_keys(0, 0, torch.arange(count))


def cut_cells(hidden: Tensor, grid: tuple[int, int], cell: int) -> int:
    """Cells of which a part is masked, by looking at each."""
    found, rows, columns = 0, *grid
    for top in range(0, rows, cell):
        for left in range(0, columns, cell):
            inside = {
                bool(hidden[row * columns + column])
                for row in range(top, min(top + cell, rows))
                for column in range(left, min(left + cell, columns))
            }
            found += len(inside) == 2
    return found


@pytest.mark.parametrize(
    ("grid", "cell", "ratio"),
    [((14, 14), 2, 0.75), ((8, 8), 2, 0.75), ((14, 14), 4, 0.6), ((7, 5), 3, 0.5), ((1, 11), 2, 0.7), ((9, 2), 4, 0.5)],
)
def test_cells_are_whole_but_one(grid: tuple[int, int], cell: int, ratio: float) -> None:
    plan = GridMasking(cell=cell, ratio=ratio).plan(asked(grid, keys(100)))
    cuts = [cut_cells(hidden, grid, cell) for hidden in plan.hidden]
    exact = plan.visible.shape[1] % cell**2 == 0 and all(side % cell == 0 for side in grid)
    assert max(cuts) <= 1 and (not exact or max(cuts) == 0)
    scattered = RandomMasking(ratio=ratio).plan(asked(grid, keys(1))).hidden[0]
    assert cut_cells(scattered, grid, cell) > 1


def test_the_patches_that_a_cut_cell_keeps_are_random() -> None:
    plan = GridMasking(cell=4, ratio=0.75).plan(asked((4, 8), keys(20_000)))  # 8 of the 16 of one cell
    assert len(plan.hidden[:2000].unique(dim=0)) > 1800
    assert (plan.hidden.double().mean(dim=0) - 0.75).abs().max() < 5 * (0.75 * 0.25 / 20_000) ** 0.5


@pytest.mark.parametrize("count", [1, 4, 7])
def test_smaller_cells_at_the_border_are_masked_as_often_as_all_orders_say(count: int) -> None:
    cell_of = [0, 0, 1, 0, 0, 1, 2, 2, 3]
    sizes = [cell_of.count(cell) for cell in range(4)]
    visible = [0.0] * 4
    for order in permutations(range(4)):
        left = count
        for cell in order:
            taken = min(left, sizes[cell])
            left -= taken
            visible[cell] += taken / sizes[cell] / 24
    expected, samples = torch.tensor([1 - visible[cell] for cell in cell_of], dtype=torch.float64), 20_000
    plan = GridMasking(ratio=1 - count / 9).plan(asked((3, 3), keys(samples)))
    rates = plan.hidden.double().mean(dim=0)
    assert ((rates - expected).abs() < 5 * (expected * (1 - expected) / samples).sqrt()).all()
    assert (expected - (1 - count / 9)).abs().max() <= 0.14


@pytest.mark.parametrize(("grid", "cell"), [((3, 3), 3), ((3, 3), 4), ((1, 8), 8)])
def test_a_cell_of_the_whole_grid_is_refused(grid: tuple[int, int], cell: int) -> None:
    with pytest.raises(UsageError, match=f"mask_cell {cell} covers the whole grid .* at most {max(grid) - 1}"):
        GridMasking(cell=cell).num_visible(layout_of(grid))
