"""How much each patch of some images counts, as colours beside the images."""

from collections.abc import Sequence
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from mae.report.figures.canvas import readable
from mae.report.figures.sheet import ColourBar, Column, write_sheet
from mae.report.figures.tones import choose_tones, colour_table

_COLOUR_MAP = "viridis"
_DIMMEST = 0.15  # of an image's brightness, where a patch counts nothing


def draw_heat(
    images: Float[Tensor, "B C H W"],
    weights: Float[Tensor, "B rows columns"],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None,
    notes: Sequence[Sequence[str]],
    title: str,
    path: Path,
) -> None:
    """Write one PNG: a row an image, its patches' weights beside it, and the image as bright as they are.

    Args:
        images: normalised images, one a row.
        weights: of each patch, above 0; a row of them adds up to 1.
        mean: see `draw_panels`.
        std: see `draw_panels`.
        rgb: see `choose_tones`.
        notes: lines under each image.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: the file cannot be written.
    """
    tones = choose_tones(images, mean, std, rgb)
    times = weights * weights[0].numel()  # of the even weight
    most = float(times.amax())
    down, across = (length // count for length, count in zip(images.shape[2:], weights.shape[1:], strict=True))
    share = (times / most).repeat_interleave(down, dim=1).repeat_interleave(across, dim=2)
    table, painted = colour_table(_COLOUR_MAP), tones.paint(images)
    own = share / share.amax(dim=(1, 2), keepdim=True)  # each image's largest: its own order shows
    lit = painted * (_DIMMEST + (1 - _DIMMEST) * own.unsqueeze(-1))
    columns = [
        Column(name="image", caption="", pictures=painted, notes=notes),
        Column(
            name="weight",
            caption="times the even weight",
            pictures=table[(share * 255).round().long()],
            bar=ColourBar(colours=table, low="0", high=readable(most)),
        ),
        Column(name="where it looks", caption="as bright as its weights", pictures=lit),
    ]
    caption = ["How much each patch counts in the learned pooling; with even weights it would be the plain mean."]
    write_sheet(columns, title=title, caption=[*caption, *tones.notes], path=path)
