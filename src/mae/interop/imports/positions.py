"""Identify a stored position embedding: the paper's sine-cosine table, the same with rows first, or a learned one."""

from dataclasses import dataclass
from math import isqrt

import torch
from jaxtyping import Float
from torch import Tensor

from mae.core.types import Grid
from mae.errors import UsageError
from mae.layers.pos_embed import sincos_2d

_SAME = 1e-5
"""Largest difference of a stored sine-cosine table and the computed one: some codes compute theirs in float32."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredPositions:
    """A position embedding from a file.

    Attributes:
        grid: its rows and columns of patches.
        table: of the patches.
        cls: of the class token; zeros if the table has none.
        kind: `sincos2d`, `rows first` (the same with its halves exchanged) or `learned`.
    """

    grid: Grid
    table: Float[Tensor, "N D"]
    cls: Float[Tensor, " D"]
    kind: str


def understand_positions(
    stored: Float[Tensor, "1 R D"], *, name: str, num_prefix: int, grid: Grid | None
) -> StoredPositions:
    """Identify the grid and kind of a stored table.

    A sine-cosine table is recognised on any grid; the grid of another table must be given, or is square.

    Args:
        stored: as in the file, with or without a first row for the class token.
        name: of the tensor, for messages.
        num_prefix: tokens before the patches, 0 or 1.
        grid: stated by the file or the user; None: unknown.

    Raises:
        UsageError: a table of another shape, or for another grid than `grid`.
    """
    if stored.ndim != 3 or stored.shape[0] != 1:
        raise UsageError(f"{name} has shape {tuple(stored.shape)}; expected [1, tokens, width]")
    rows, dim = stored.shape[1:]
    found = [_as_grid(rows - lead, dim, stored[0, lead:], grid) for lead in {num_prefix, 0}]
    fitting = [(lead, *known) for lead, known in zip({num_prefix, 0}, found, strict=True) if known is not None]
    if not fitting:
        problem = "not a square number" if grid is None else f"not the {grid[0]}x{grid[1]} of these images"
        raise UsageError(
            f"{name} holds positions of {rows - num_prefix} patches, {problem}; give the size of the training "
            "images with --trained-size"
        )
    lead, known_grid, kind = min(fitting, key=lambda item: (item[2] == "learned", -item[0]))
    if grid is not None and known_grid != grid:
        raise UsageError(
            f"{name} is the sine-cosine table of a {known_grid[0]}x{known_grid[1]} patch grid, but the stated size "
            f"of the training images makes {grid[0]}x{grid[1]}; give their true size with --trained-size"
        )
    table = stored[0, lead:].float()
    cls = stored[0, 0].float() if lead else torch.zeros(dim)
    return StoredPositions(grid=known_grid, table=table, cls=cls, kind=kind)


def _as_grid(num_tokens: int, dim: int, table: Tensor, grid: Grid | None) -> tuple[Grid, str] | None:
    """Grid and kind of a table without its class token; None if it fits no possible grid.

    A sine-cosine table has its own grid, whatever `grid` is.
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
    """All grids of this many tokens, the squarest first."""
    shapes = [(rows, num_tokens // rows) for rows in range(1, num_tokens + 1) if num_tokens % rows == 0]
    return sorted(shapes, key=lambda shape: abs(shape[0] - shape[1]))


def _same(table: Tensor, sines: Tensor) -> bool:
    rounding = max(_SAME, torch.finfo(table.dtype).eps / 4)  # of a file in half precision, whose values are below 1
    return bool((table.float() - sines).abs().max() <= rounding)
