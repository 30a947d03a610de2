"""The same images under the same mask as several models complete them, side by side."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.report.canvas import fit_text, readable
from mae.report.reconstruction import Score, reconstruct, score
from mae.report.sheet import Column, write_sheet
from mae.report.tones import HIDDEN_COLOUR, Tones, choose_tones
from mae.types import MaskPlan

_A_SHEET = 5  # models; with more columns the text is too small on a page
_SMALL_FROM = 4  # models; from here on smaller pictures keep the text legible on a page
_SMALL = (130, 150)  # pixels
_NAME_WIDTH, _NAME_SIZE = 148, 10.5  # pixels, points: as wide as a column at least is, as a sheet writes names


def draw_comparison(
    models: Mapping[str, MaskedAutoencoder],
    images: Float[Tensor, "B C H W"],
    plan: MaskPlan,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    path: Path,
    title: str,
) -> list[Path]:
    """Write a PNG: a row an image, its columns the input, what is visible, and each model's reconstruction.

    Hidden patches are predicted, visible ones true; a norm-pix model's prediction is drawn with patch statistics
    estimated from visible patches. More than five models go on further sheets, `NAME-2.png` and so on, each with
    the input beside them.

    Args:
        models: by the name printed above; at least one, each predicts pixels on the plan's grid.
        images: normalised images, one a row.
        plan: what is hidden from every model.
        mean: per channel, subtracted from the images when they were normalised, pixel values scaled to [0, 1].
        std: per channel, what they were divided by.
        path: the first PNG; its folder is made, older files are replaced at once.
        title: printed above the columns.

    Returns:
        The files, in the order of the models.

    Raises:
        UsageError: a model predicts no pixels, or images of a wrong shape.
        MAEError: a file cannot be written.
    """
    tones = choose_tones(images.float(), mean, std)
    columns, estimate = [], None
    for name, model in models.items():
        views = reconstruct(model, images, plan)
        found = score(images.float(), views.pasted, views.hidden, std)
        columns.append(Column(name=name, caption=_numbers(found), pictures=tones.paint(views.pasted)))
        if views.filled is not None:
            estimate = score(images.float(), views.filled, views.hidden, std)
    true = tones.paint(images.float())
    cover = torch.tensor(HIDDEN_COLOUR, device=true.device)
    masked = torch.where(views.hidden.unsqueeze(-1), cover, true)
    given = [
        Column(name="input", caption="", pictures=true),
        Column(name="masked", caption="what the encoder sees", pictures=masked),
    ]
    caption = _caption(len(images), estimate, tones, share_hidden=float(plan.hidden.float().mean()))
    sides = {"sides": _SMALL} if len(models) >= _SMALL_FROM else {}
    paths = []
    for first in range(0, len(columns), _A_SHEET):
        paths.append(path.with_stem(f"{path.stem}-{first // _A_SHEET + 1}") if first else path)
        shown = [*given, *(_fitted(column) for column in columns[first : first + _A_SHEET])]
        write_sheet(shown, title=title, caption=caption, path=paths[-1], **sides)
    return paths


def _fitted(column: Column) -> Column:
    """The column with a name that does not run into the next one."""
    return replace(column, name=fit_text(column.name, width=_NAME_WIDTH, size=_NAME_SIZE, bold=True))


def _numbers(found: Score) -> str:
    return f"MSE {readable(found.masked_mse)}" + ("" if found.r2 is None else f", R² {found.r2:.2f}")


def _caption(count: int, estimate: Score | None, tones: Tones, *, share_hidden: float) -> list[str]:
    """What is printed below: how to read the sheet first."""
    texts = [
        f"The same {count} images under the same mask, {share_hidden:.0%} of patches hidden; hidden patches as "
        "predicted, visible ones true.",
        "MSE in pixel values, over the hidden pixels of these images; R² against the mean colour of the visible pixels "
        f"(1 perfect, 0 no better). {count} images show what errors look like and judge no model.",
    ]
    if estimate is not None:
        texts.append(
            "A norm-pix model's patches are drawn with mean and deviation estimated from visible patches nearby; the "
            f"estimated means alone, with nothing predicted, reach {_numbers(estimate)}."
        )
    return [*texts, *tones.notes]
