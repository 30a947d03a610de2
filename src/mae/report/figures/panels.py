"""The sheet that shows a model's reconstruction of masked patches, with the scores printed on it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.modalities.images.pictures import Reconstruction, Score, score
from mae.report.figures.canvas import readable
from mae.report.figures.sheet import ColourBar, Column, sheet_figure, write_sheet
from mae.report.figures.tones import HIDDEN_COLOUR, Tones, choose_tones, colour_table, error_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NORM_PIX = (
    "The model predicts patches normalised by their own mean and std (norm-pix). To draw them, those of masked "
    "patches are estimated from visible ones nearby (Gaussian weights); no masked pixel is read."
)
_MEANS = "Means alone: each masked patch is its estimated mean, nothing predicted; a trained model does better."
_LEAKS = "The leaky reconstruction is given the true patch statistics, and with them part of the answer."
_PLAIN = "The model predicts pixels, drawn as predicted."
_LEAKY = "leaky reconstruction"
_COLOUR_MAP = "magma_r"  # white where the error is 0, so that large errors are what the eye finds


def draw_panels(
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    path: Path,
    title: str,
) -> None:
    """Write one PNG: a row per image, a column per view of it, and the scores below.

    Columns: input, masked, prediction pasted among the visible patches, prediction everywhere, error. The
    prediction of a norm-pix model is drawn with patch statistics estimated from visible patches; one more column
    shows it with the true ones and says that they leak.

    Args:
        images: normalised images, one a row; 1 channel is drawn grey, 3 as colours, of others the first three.
        views: a model's reconstruction of them.
        mean: per channel, subtracted from the images when they were normalised, pixel values scaled to [0, 1].
        std: per channel, what they were divided by.
        rgb: see `choose_tones`.
        path: the PNG; its folder is created, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        MAEError: the file cannot be written.
    """
    images = images.float()
    tones = choose_tones(images, mean, std, rgb)
    write_sheet(_columns(images, views, tones), title=title, caption=_caption(images, views, tones, std), path=path)


def draw_rows(
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    *,
    notes: Mapping[str, Sequence[Sequence[str]]],
    leave_out: Sequence[str] = (),
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    path: Path,
    title: str,
) -> None:
    """Write the columns of `draw_panels` as one PNG, each row with its own notes instead of a common score.

    Args:
        images: normalised images, one a row.
        views: a model's reconstruction of them.
        notes: by a column's name, lines under each of its pictures; PSNR and R² are explained below the rows.
        leave_out: names of columns that are not drawn.
        mean: see `draw_panels`.
        std: see `draw_panels`.
        rgb: see `choose_tones`.
        path: the PNG; its folder is created, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        MAEError: the file cannot be written.
    """
    columns, caption = _rows(images, views, notes, leave_out, choose_tones(images, mean, std, rgb))
    write_sheet(columns, title=title, caption=caption, path=path)


def rows_figure(
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    *,
    notes: Mapping[str, Sequence[Sequence[str]]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    title: str,
) -> "Figure":
    """What `draw_rows` writes, as a figure."""
    columns, caption = _rows(images, views, notes, (), choose_tones(images, mean, std, rgb))
    return sheet_figure(columns, title=title, caption=caption)


def _rows(
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    notes: Mapping[str, Sequence[Sequence[str]]],
    leave_out: Sequence[str],
    tones: Tones,
) -> tuple[list[Column], list[str]]:
    """Columns with notes, and the caption below them."""
    columns = [
        replace(column, notes=notes.get(column.name, ()))
        for column in _columns(images, views, tones)
        if column.name not in leave_out
    ]
    caption = [
        "PSNR (in dB, more is better) and R² (1 perfect, 0 no better than the mean colour of the visible pixels) are "
        "of masked pixels alone.",
        *([_PLAIN] if views.leaky is None else [_NORM_PIX, _MEANS]),
        *([_LEAKS] if any(column.name == _LEAKY for column in columns) else []),
        *tones.notes,
    ]
    return columns, caption


def draw_inpainting(
    images: Float[Tensor, "B C H W"],
    filled: Float[Tensor, "B C H W"],
    *,
    hole: Bool[Tensor, "B H W"],
    hidden: Bool[Tensor, "B H W"],
    norm_pix: bool,
    notes: Sequence[Sequence[str]],
    tones: Tones,
    path: Path,
    title: str,
) -> None:
    """Write one PNG: a row per image, its columns the input with the hole, the filled image, the masked patches.

    Args:
        images: normalised images; their values in the hole are not shown.
        filled: the same images, the hole predicted.
        hole: True for missing pixels.
        hidden: True for the pixels of masked patches: those that the hole touches.
        norm_pix: whether the model predicts per-patch normalised pixels.
        notes: lines under each input.
        tones: how they are displayed.
        path: the PNG; its folder is created, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        MAEError: the file cannot be written.
    """
    painted, filling = tones.paint(images), tones.paint(filled)
    columns = [
        Column(name="input with the hole", caption="", pictures=_covered(painted, hole), notes=notes),
        Column(name="filled", caption="predicted in the hole, the input's pixels elsewhere", pictures=filling),
        Column(
            name="masked patches",
            caption="what the encoder sees: every patch that the hole touches is masked",
            pictures=_covered(painted, hidden),
        ),
    ]
    caption = [
        "The true pixels in the hole were not used, so there is nothing to score the result against.",
        _NORM_PIX if norm_pix else _PLAIN,
        *tones.notes,
    ]
    write_sheet(columns, title=title, caption=caption, path=path)


def draw_frame(
    path: Path,
    *,
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    notes: Mapping[str, Sequence[Sequence[str]]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    title: str,
) -> None:
    """Write one picture of an animation: the columns input, masked and reconstruction of `draw_rows` alone."""
    leave_out = ("full reconstruction", "error", _LEAKY)
    draw_rows(images, views, notes=notes, leave_out=leave_out, mean=mean, std=std, rgb=rgb, path=path, title=title)


def _covered(pictures: Float[Tensor, "B H W 3"], where: Bool[Tensor, "B H W"]) -> Float[Tensor, "B H W 3"]:
    return torch.where(where.unsqueeze(-1), torch.tensor(HIDDEN_COLOUR, device=pictures.device), pictures)


def _columns(images: Float[Tensor, "B C H W"], views: Reconstruction, tones: Tones) -> list[Column]:
    true = tones.paint(images)
    masked = _covered(true, views.hidden)
    source = "" if views.leaky is None else "; statistics from visible patches"
    columns = [
        Column(name="input", caption="", pictures=true),
        Column(name="masked", caption="what the encoder sees", pictures=masked),
        Column(
            name="reconstruction",
            caption="masked patches predicted, visible ones true" + source,
            pictures=tones.paint(views.pasted),
        ),
        Column(
            name="full reconstruction",
            caption="visible patches predicted too, though no loss trains them",
            pictures=tones.paint(views.full),
        ),
        _error_column(views, tones),
    ]
    if views.leaky is not None:
        columns.append(
            Column(
                name=_LEAKY,
                caption="with the true patch statistics (leaks brightness and contrast)",
                pictures=tones.paint(views.leaky),
            )
        )
    return columns


def _error_column(views: Reconstruction, tones: Tones) -> Column:
    """The error in pixel values, mean over the channels; visible pixels are blank."""
    error = (views.error * tones.std).mean(dim=1)  # [B, H, W]
    strongest = error_scale(error, views.hidden)
    table = colour_table(_COLOUR_MAP).to(error.device)
    share = (error / strongest).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1)  # of weights that diverged
    colours = table[(share * 255).round().long()]
    return Column(
        name="error",
        caption="absolute, in pixel values, mean over channels; visible patches blank",
        pictures=torch.where(views.hidden.unsqueeze(-1), colours, torch.ones_like(colours)),
        bar=ColourBar(colours=table, low="0", high=f"{readable(strongest)} or more"),
    )


def _caption(
    images: Float[Tensor, "B C H W"], views: Reconstruction, tones: Tones, std: tuple[float, ...]
) -> list[str]:
    """The text below: the result first, then how it was measured."""

    def scored(picture: Float[Tensor, "B C H W"]) -> Score:
        return score(images, picture, views.hidden, std)

    honest = scored(views.pasted)
    error = f"Masked MSE in pixels {readable(honest.masked_mse)}"
    measured = f"{_explained(honest)} {error}; {float(views.hidden.float().mean()):.0%} of patches masked."
    if views.leaky is None or views.filled is None:
        return [measured, _PLAIN, *tones.notes]
    filled, leaky = scored(views.filled), scored(views.leaky)
    return [
        measured,
        f"{_NORM_PIX} The estimated means alone, with nothing predicted, reach "
        f"{readable(filled.masked_mse)}{_r2(filled)}.",
        f"With the true patch statistics it would be {readable(leaky.masked_mse)}{_r2(leaky)}: part of the answer is "
        "given away.",
        *tones.notes,
    ]


def _explained(result: Score) -> str:
    if result.r2 is None:
        return "R² is undefined: the masked pixels have one colour."
    return f"R² {result.r2:.2f} against the mean colour of the visible pixels (1 perfect, 0 no better)."


def _r2(result: Score) -> str:
    return "" if result.r2 is None else f", R² {result.r2:.2f}"
