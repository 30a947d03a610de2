"""Positions against the published formula, written as a loop, and against geometry."""

import math

import pytest
import torch

from mae.errors import UsageError
from mae.layers.pos_embed import LearnedPosEmbed, SinCosPosEmbed, make_pos_embed, sincos_1d, sincos_2d

GRIDS = [(1, 1), (3, 3), (2, 7), (8, 32), (32, 8), (14, 14), (1, 12)]


def table_by_loops(rows: int, columns: int, dim: int) -> torch.Tensor:
    """`[sin(x w) | cos(x w) | sin(y w) | cos(y w)]`, x the column, w_i = 10000^(-i / (dim / 4))."""
    quarter = dim // 4
    frequencies = [10000.0 ** (-i / quarter) for i in range(quarter)]
    return torch.tensor(
        [
            [f(position * w) for position in (x, y) for f in (math.sin, math.cos) for w in frequencies]
            for y in range(rows)
            for x in range(columns)
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dim", [4, 12, 64])
def test_table_is_the_published_formula_column_first(grid: tuple[int, int], dim: int) -> None:
    table = sincos_2d(grid, dim)
    assert table.dtype == torch.float32
    assert (table.double() - table_by_loops(*grid, dim)).abs().max() < 1e-7  # half a float32 step


def test_the_first_half_tells_the_column_and_the_second_the_row() -> None:
    table = sincos_2d((4, 6), 16).reshape(4, 6, 16)
    assert torch.equal(table[0, :, :8], table[3, :, :8])
    assert torch.equal(table[:, 0, 8:], table[:, 5, 8:])
    assert not torch.equal(table[0, 0, :8], table[0, 1, :8])


@pytest.mark.parametrize("grid", [(8, 32), (5, 13), (16, 4)])
def test_neighbours_in_the_image_are_neighbours_in_the_table(grid: tuple[int, int]) -> None:
    """A table laid out for another grid would put tokens of a diagonal, or of the next row, side by side."""
    rows, columns = grid
    table = sincos_2d(grid, 64).double()
    distance = torch.cdist(table, table)
    row = torch.arange(rows).repeat_interleave(columns).double()
    column = torch.arange(columns).repeat(rows).double()
    apart = ((row[:, None] - row) ** 2 + (column[:, None] - column) ** 2).sqrt()
    beside = distance[apart == 1]
    assert beside.max() - beside.min() < 1e-6  # a step is a step, across or down
    assert distance[apart > 1].min() > beside.max()
    near = (apart > 0) & (apart < 3.5)
    correlation = torch.corrcoef(torch.stack([distance[near], apart[near]]))[0, 1]
    assert correlation > 0.9


def test_one_dimension_alone() -> None:
    table = sincos_1d(torch.tensor([0.0, 2.0]), 4)
    assert table[0].tolist() == [0, 0, 1, 1]
    expected = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    assert table[1].tolist() == pytest.approx(expected, abs=1e-12)


def test_any_grid_is_served_and_nothing_is_saved_or_trained() -> None:
    positions = SinCosPosEmbed(grid=(3, 5), dim=8)
    assert torch.equal(positions((3, 5)), sincos_2d((3, 5), 8))
    assert torch.equal(positions((4, 2)), sincos_2d((4, 2), 8))
    assert not list(positions.parameters()) and not positions.state_dict()


def test_other_grids_follow_the_type_of_the_module() -> None:
    positions = SinCosPosEmbed(grid=(3, 5), dim=8).to(torch.bfloat16)
    assert positions((2, 2)).dtype == torch.bfloat16


def test_fixed_positions_are_exact_again_after_half_precision_and_memory_without_values() -> None:
    positions = SinCosPosEmbed(grid=(3, 5), dim=8)
    for kind in (torch.float16, torch.bfloat16):
        assert torch.equal(positions.to(kind)((3, 5)), sincos_2d((3, 5), 8).to(kind))
        assert torch.equal(positions.float()((3, 5)), sincos_2d((3, 5), 8))
    with torch.device("meta"):
        empty = SinCosPosEmbed(grid=(3, 5), dim=8)
    assert empty.to("meta")((3, 5)).is_meta
    assert torch.equal(empty.to_empty(device="cpu")((3, 5)), sincos_2d((3, 5), 8))


def test_width_that_is_no_multiple_of_four_is_refused() -> None:
    with pytest.raises(UsageError, match="width 6 .* multiple of 4"):
        sincos_2d((2, 2), 6)


def test_learned_positions_serve_one_grid_and_say_so() -> None:
    positions = LearnedPosEmbed(grid=(3, 5), dim=8)
    assert positions((3, 5)) is positions.table and positions.table.requires_grad
    with pytest.raises(UsageError, match="3x5 patches, these images have 5x3.*sincos2d"):
        positions((5, 3))  # as many tokens, another shape


def test_learned_positions_start_from_the_stated_distribution() -> None:
    torch.manual_seed(0)
    table = LearnedPosEmbed(grid=(20, 30), dim=64).table.detach()
    assert abs(float(table.std()) - 0.02) < 0.0005 and abs(float(table.mean())) < 0.0005


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'rope'.*sincos2d, learned"):
        make_pos_embed("rope", grid=(2, 2), dim=8)
