"""Where models look, as colours beside the images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.report.figures.sheet import ColourBar, Column, write_sheet
from mae.report.figures.tones import choose_tones, colour_table

_COLOUR_MAP = "inferno"
_FRAME, _EDGE = (1.0, 0.85, 0.0), (0.0, 0.0, 0.0)  # yellow and black: one of the two shows on any photo
_SIDES = (128, 192)  # pixels


def draw_attention(
    images: Float[Tensor, "B C H W"],
    maps: Mapping[str, Float[Tensor, "B rows columns"]],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None,
    notes: Sequence[Sequence[str]],
    title: str,
    caption: str,
    path: Path,
    marked: Int64[Tensor, " B"] | None = None,
) -> None:
    """Write one PNG: a row an image, and beside it a column for each map of attention.

    The colours are those of the scale alone: an image shining through would make dark parts look little attended to.

    Args:
        images: normalised images, one a row.
        maps: of each patch, at least 0; each is painted from 0 to its own largest value.
        mean: see `draw_panels`.
        std: see `draw_panels`.
        rgb: see `choose_tones`.
        notes: lines under each image.
        title: printed above.
        caption: printed below.
        path: the PNG.
        marked: of each image the patch that is framed, in raster order; None: none.

    Raises:
        MAEError: the file cannot be written.
    """
    tones, table = choose_tones(images, mean, std, rgb), colour_table(_COLOUR_MAP)
    painted = tones.paint(images)
    columns = [Column(name="image", caption="", pictures=painted, notes=notes)]
    for name, weights in maps.items():
        down, across = (length // cells for length, cells in zip(painted.shape[1:3], weights.shape[1:], strict=True))
        most = weights.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        share = (weights / most).repeat_interleave(down, dim=1).repeat_interleave(across, dim=2)
        columns.append(
            Column(
                name=name,
                caption="",
                pictures=table[(share * 255).round().long()],
                bar=ColourBar(colours=table, low="0", high="largest"),
            )
        )
    if marked is not None:
        grid = next(iter(maps.values())).shape[1:]
        for column in columns:
            for picture, patch in zip(column.pictures, marked.tolist(), strict=True):
                _frame(picture, divmod(patch, grid[1]), (grid[0], grid[1]))
    write_sheet(columns, title=title, caption=[caption, *tones.notes], path=path, sides=_SIDES)


def _frame(picture: Float[Tensor, "H W 3"], place: tuple[int, int], grid: tuple[int, int]) -> None:
    """Draw a frame around a patch, inside of it."""
    down, across = (length // cells for length, cells in zip(picture.shape[:2], grid, strict=True))
    patch = picture[place[0] * down : (place[0] + 1) * down, place[1] * across : (place[1] + 1) * across]
    line = max(1, min(down, across) // 10)
    for depth, colour in ((0, _EDGE), (line, _FRAME)):
        inner = patch[depth : down - depth, depth : across - depth]
        ink = torch.tensor(colour)
        inner[:line], inner[-line:], inner[:, :line], inner[:, -line:] = ink, ink, ink, ink
