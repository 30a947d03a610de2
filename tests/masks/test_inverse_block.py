"""One block stays visible: its shape, its place, its cut column, how often each position is masked."""

import pytest
import torch
from pieces import asked
from torch import Tensor

from mae.masks.inverse_block import InverseBlockMasking
from mae.randomness import sample_keys

Cells = set[tuple[int, int]]


def keys(count: int) -> Tensor:
    return sample_keys(0, 0, torch.arange(count))


def is_block(cells: Cells) -> bool:
    """Whether cells fill a rectangle but for one end of its first or last column, by looking at each."""
    rows, columns = sorted({row for row, _ in cells}), sorted({column for _, column in cells})
    if rows != list(range(rows[0], rows[-1] + 1)) or columns != list(range(columns[0], columns[-1] + 1)):
        return False
    missing = {(row, column) for row in rows for column in columns} - cells
    if not missing:
        return True
    lacks = sorted(row for row, _ in missing)
    return (
        {column for _, column in missing} in ({columns[0]}, {columns[-1]})
        and lacks == list(range(lacks[0], lacks[-1] + 1))
        and (lacks[0] == rows[0] or lacks[-1] == rows[-1])
    )


def cells_of(hidden: Tensor, columns: int) -> Cells:
    return {divmod(number, columns) for number in (~hidden).nonzero().flatten().tolist()}


@pytest.mark.parametrize(("grid", "ratio"), [((9, 9), 0.65), ((6, 11), 0.8), ((12, 2), 0.5), ((1, 9), 0.5)])
def test_what_is_visible_is_one_block(grid: tuple[int, int], ratio: float) -> None:
    plan = InverseBlockMasking(ratio=ratio, roll=False).plan(asked(grid, keys(200)))
    assert all(is_block(cells_of(hidden, grid[1])) for hidden in plan.hidden)


@pytest.mark.parametrize(("grid", "ratio"), [((9, 9), 0.65), ((6, 11), 0.8), ((12, 2), 0.5)])
def test_rolled_it_is_one_block_on_a_grid_without_borders(grid: tuple[int, int], ratio: float) -> None:
    rows, columns = grid
    plan = InverseBlockMasking(ratio=ratio).plan(asked(grid, keys(100)))
    seen = [cells_of(hidden, columns) for hidden in plan.hidden]
    assert not all(map(is_block, seen))  # some go over a border
    for cells in seen:
        assert any(
            is_block({((row + down) % rows, (column + across) % columns) for row, column in cells})
            for down in range(rows)
            for across in range(columns)
        )


def test_its_aspect_is_in_range_and_takes_all_of_it() -> None:
    plan = InverseBlockMasking(ratio=0.75, roll=False, min_aspect=0.5).plan(asked((16, 16), keys(500)))
    shapes = set()
    for hidden in plan.hidden:
        cells = cells_of(hidden, 16)
        shapes.add(tuple(len({cell[axis] for cell in cells}) for axis in (0, 1)))
    # sqrt(64 / 2) = 5.7 to sqrt(64 * 2) = 11.3 rows, and as many columns as 64 patches take
    assert shapes == {(6, 11), (7, 10), (8, 8), (9, 8), (10, 7), (11, 6)}


def test_without_roll_each_position_is_masked_as_often_as_all_placements_say() -> None:
    """Of 6 x 7 patches 10 stay visible: 3 rows and 4 columns, two patches missing at one of four corners."""
    visible = torch.zeros(6, 7, dtype=torch.float64)
    for top in range(4):
        for left in range(4):
            for column in (0, 3):
                for ends in ((0, 1), (1, 2)):
                    visible[top : top + 3, left : left + 4] += 1 / 64
                    for end in ends:
                        visible[top + end, left + column] -= 1 / 64
    expected, count = 1 - visible.flatten(), 20_000
    plan = InverseBlockMasking(ratio=0.75, roll=False, min_aspect=1.0).plan(asked((6, 7), keys(count)))
    rates = plan.hidden.double().mean(dim=0)
    assert ((rates - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt()).all()
    assert expected.reshape(6, 7)[0, 0] > 0.95 and expected.reshape(6, 7)[2, 3] < 0.5
