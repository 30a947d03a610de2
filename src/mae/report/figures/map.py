"""Many small pictures at their places on a plane."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from mae.randomness import FIXED_EPOCH, permutation
from mae.report.figures.sheet import Column, write_sheet

_SIDE, _MARGIN, _DOT = 1100, 30, 3  # pixels
_DOT_COLOUR = (0.55, 0.58, 0.63)
_FRAME = 2
_SEED = 0


def draw_map(
    places: Float[Tensor, "n 2"],
    pictures: UInt8[Tensor, "n side side 3"],
    *,
    labels: Int64[Tensor, " n"],
    class_names: Sequence[str],
    colours: Mapping[int, Float[Tensor, "3"]],
    title: str,
    caption: str,
    path: Path,
) -> None:
    """Write a square PNG with a dot for each picture, and those of the pictures that do not cover each other.

    Args:
        places: across and down, in [0, 1].
        pictures: of two that would cover each other one is shown.
        labels: the class of each; negative: none.
        class_names: by number.
        colours: of classes by number; all else is grey, which the legend tells too.
        title: printed above.
        caption: printed below.
        path: the PNG.

    Raises:
        MAEError: the file cannot be written.
    """
    side = pictures.shape[1]
    page = torch.ones(_SIDE, _SIDE, 3)
    half = side // 2 + _FRAME
    at = (_MARGIN + places * (_SIDE - 2 * _MARGIN)).round().long()
    grey = torch.tensor(_DOT_COLOUR)
    painted = torch.stack([colours.get(label, grey) for label in labels.tolist()])
    for (x, y), colour in zip(at.tolist(), painted, strict=True):
        page[y : y + _DOT, x : x + _DOT] = colour
    order = permutation(_SEED, FIXED_EPOCH, len(at))  # else whatever comes first in a set would be all that is seen
    for row in order[_apart(at[order], 2 * half)].tolist():
        left, top = (min(max(value - half, 0), _SIDE - 2 * half) for value in at[row].tolist())
        page[top : top + 2 * half, left : left + 2 * half] = painted[row]
        inside = slice(top + _FRAME, top + _FRAME + side), slice(left + _FRAME, left + _FRAME + side)
        page[inside] = pictures[row].float() / 255
    legend = {class_names[label]: colour for label, colour in colours.items()}
    if colours and not set(labels.tolist()) <= set(colours):
        legend["other or no class"] = grey
    write_sheet(
        [Column(name=f"{len(places):,} images", caption="", pictures=page.unsqueeze(0))],
        title=title,
        caption=[caption],
        path=path,
        sides=(_SIDE, _SIDE),
        legend=legend,
    )


def _apart(at: Int64[Tensor, "n 2"], distance: int) -> list[int]:
    """Rows of places that are so far apart, the earliest first."""
    taken: list[int] = []
    free = torch.ones(len(at), dtype=torch.bool)
    while bool(free.any()):
        row = int(free.int().argmax())
        taken.append(row)
        free &= (at - at[row]).abs().amax(dim=1) >= distance
    return taken
