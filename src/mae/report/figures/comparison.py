"""Reconstructions of the same images under the same mask by several models, side by side."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mae.modalities.images.pictures import Reconstruction, Score, score
from mae.report.figures.canvas import fit_text, readable
from mae.report.figures.sheet import SIDES, Column, write_sheet
from mae.report.figures.tones import HIDDEN_COLOUR, Tones, choose_tones

_A_SHEET = 5  # models; with more columns the text is too small on a page
_SMALL_FROM = 4  # models; from here on smaller pictures keep the text legible on a page
_SMALL = (130, 150)  # pixels
_NAME_WIDTH, _NAME_SIZE = 148, 10.5  # pixels, points: as wide as a column at least is, as a sheet writes names


def draw_comparison(
    images: Float[Tensor, "B C H W"],
    views: Mapping[str, Reconstruction],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    path: Path,
    title: str,
) -> list[Path]:
    """Write a PNG: a row per image, its columns the input, what is visible, and each model's reconstruction.

    Masked patches are predicted, visible ones true; a norm-pix model's prediction is drawn with patch statistics
    estimated from visible patches. More than five models go on further sheets, `NAME-2.png` and so on, each with
    the input beside them.

    Args:
        images: normalised images, one a row.
        views: each model's reconstruction of them under one mask, by the name printed above; at least one.
        mean: per channel, subtracted from the images when they were normalised, pixel values scaled to [0, 1].
        std: per channel, what they were divided by.
        rgb: see `choose_tones`.
        path: the first PNG; its folder is created, older files are replaced at once.
        title: printed above the columns.

    Returns:
        The files, in the order of the models.

    Raises:
        MAEError: a file cannot be written.
    """
    images = images.float()
    tones = choose_tones(images, mean, std, rgb)
    columns, estimate = [], None
    for name, view in views.items():
        result = score(images, view.pasted, view.hidden, std)
        columns.append(Column(name=name, caption=_numbers(result), pictures=tones.paint(view.pasted)))
        if view.filled is not None:
            estimate = score(images, view.filled, view.hidden, std)
    true, hidden = tones.paint(images), next(iter(views.values())).hidden
    masked = torch.where(hidden.unsqueeze(-1), torch.tensor(HIDDEN_COLOUR, device=true.device), true)
    given = [
        Column(name="input", caption="", pictures=true),
        Column(name="masked", caption="what the encoder sees", pictures=masked),
    ]
    caption = _caption(len(images), estimate, tones, masked_share=float(hidden.float().mean()))
    sides = _SMALL if len(views) >= _SMALL_FROM else SIDES
    paths = []
    for first in range(0, len(columns), _A_SHEET):
        paths.append(path.with_stem(f"{path.stem}-{first // _A_SHEET + 1}") if first else path)
        sheet = [*given, *(_fitted(column) for column in columns[first : first + _A_SHEET])]
        write_sheet(sheet, title=title, caption=caption, path=paths[-1], sides=sides)
    return paths


def _fitted(column: Column) -> Column:
    """The column with a name that does not run into the next one."""
    return replace(column, name=fit_text(column.name, width=_NAME_WIDTH, size=_NAME_SIZE, bold=True))


def _numbers(result: Score) -> str:
    return f"MSE {readable(result.masked_mse)}" + ("" if result.r2 is None else f", R² {result.r2:.2f}")


def _caption(count: int, estimate: Score | None, tones: Tones, *, masked_share: float) -> list[str]:
    """The text below: how to read the sheet first."""
    texts = [
        f"The same {count} images under the same mask, {masked_share:.0%} of patches masked; masked patches as "
        "predicted, visible ones true.",
        "MSE in pixel values, over the masked pixels of these images; R² against the mean colour of the visible pixels "
        f"(1 perfect, 0 no better). {count} images show what errors look like; they are too few to rank models.",
    ]
    if estimate is not None:
        texts.append(
            "A norm-pix model's patches are drawn with mean and std estimated from visible patches nearby; the "
            f"estimated means alone, with nothing predicted, reach {_numbers(estimate)}."
        )
    return [*texts, *tones.notes]
