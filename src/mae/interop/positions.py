"""What a stored table of positions is: the paper's sines, those sines the other way round, or a table of its own."""

from dataclasses import dataclass
from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from mae.errors import UsageError
from mae.layers.pos_embed import sincos_2d
from mae.types import Grid

_SAME = 1e-5
"""Largest difference of a stored table of sines and the computed one: some compute theirs in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPositions:
    """A table from a file.

    Attributes:
        grid: rows and columns of patches it is for.
        table: of the patches.
        cls: of the class token; zeros where the table has none.
        kind: `sincos2d`, `rows first` (its sines with the halves exchanged) or `learned`.
    """

    grid: Grid
    table: Float[Tensor, "N D"]
    cls: Float[Tensor, " D"]
    kind: str


def understand_positions(
    stored: Float[Tensor, "1 R D"], *, name: str, num_prefix: int, grid: Grid | None
) -> StoredPositions:
    """Tell a stored table's grid and kind.

    Sines are recognised on any grid; of another table the grid must be told, or is square.

    Args:
        stored: as it lies in the file, with a row for the class token first or without one.
        name: of the tensor, for messages.
        num_prefix: tokens before the patches, 0 or 1.
        grid: what the file or the user says; None: nothing does.

    Raises:
        UsageError: a table of another shape, or for another grid than `grid`.
    """
    if stored.ndim != 3 or stored.shape[0] != 1:
        raise UsageError(f"{name} has shape {tuple(stored.shape)}; expected [1, tokens, width]")
    rows, dim = stored.shape[1:]
    found = [_as_grid(rows - lead, dim, stored[0, lead:], grid) for lead in {num_prefix, 0}]
    fitting = [(lead, *known) for lead, known in zip({num_prefix, 0}, found, strict=True) if known is not None]
    if not fitting:
        there = "no square number of them" if grid is None else f"not the {grid[0]}x{grid[1]} of these images"
        raise UsageError(
            f"{name} holds positions of {rows - num_prefix} patches, {there}; give the size of the images it was "
            "trained on with --trained-size"
        )
    lead, known_grid, kind = min(fitting, key=lambda item: (item[2] == "learned", -item[0]))
    if grid is not None and known_grid != grid:
        raise UsageError(
            f"{name} holds the sines of a grid of {known_grid[0]}x{known_grid[1]} patches, and the images it was "
            f"trained on are said to have {grid[0]}x{grid[1]}; give their true size with --trained-size"
        )
    table = stored[0, lead:].float()
    cls = stored[0, 0].float() if lead else torch.zeros(dim)
    return StoredPositions(grid=known_grid, table=table, cls=cls, kind=kind)


def _as_grid(num_tokens: int, dim: int, table: Tensor, grid: Grid | None) -> tuple[Grid, str] | None:
    """Grid and kind of a table without its class token; None where it fits no grid that may be.

    Of sines the grid is theirs, whatever `grid` says.
    """
    if num_tokens < 1 or (grid is not None and grid[0] * grid[1] != num_tokens):
        return None
    square = isqrt(num_tokens)
    likely = sorted(_grids(num_tokens), key=lambda shape: shape != grid)
    if dim % 4 == 0:
        for shape in likely:
            sines = sincos_2d(shape, dim)
            if _same(table, sines):
                return shape, "sincos2d"
            if _same(table, sines.roll(dim // 2, dims=1)):
                return shape, "rows first"
    if grid is None and square * square != num_tokens:
        return None
    return grid or (square, square), "learned"


def _grids(num_tokens: int) -> list[Grid]:
    """All grids of so many tokens, the squarest first."""
    shapes = [(rows, num_tokens // rows) for rows in range(1, num_tokens + 1) if num_tokens % rows == 0]
    return sorted(shapes, key=lambda shape: abs(shape[0] - shape[1]))


def _same(table: Tensor, sines: Tensor) -> bool:
    rounding = max(_SAME, torch.finfo(table.dtype).eps / 4)  # of a file in half precision, whose values are below 1
    return bool((table.float() - sines).abs().max() <= rounding)
