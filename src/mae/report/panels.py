"""The picture that shows what a model makes of hidden patches, with its numbers burnt in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.report.canvas import readable
from mae.report.reconstruction import Reconstruction, Score, reconstruct, score
from mae.report.sheet import ColourBar, Column, write_sheet
from mae.report.tones import HIDDEN_COLOUR, Tones, choose_tones, error_scale
from mae.types import MaskPlan

_NORM_PIX = (
    "The model predicts patches standardised by their own mean and deviation (norm-pix). To draw them, those of "
    "hidden patches are estimated from visible ones nearby (Gaussian weights); no hidden pixel is read."
)
_MEANS = (
    "Means alone: each hidden patch is its estimated mean, nothing predicted; a model that has learned does better."
)
_TOLD = "The leaky reconstruction is given the true patch statistics, and with them part of the answer."
_PLAIN = "The model predicts pixels: drawn as predicted."
_LEAKY = "leaky reconstruction"
_COLOUR_MAP = "magma_r"  # white where the error is 0, so that large errors are what the eye finds


@dataclass(frozen=True, kw_only=True)
class PanelStats:
    """The numbers under a panel.

    Attributes:
        masked_mse: mean squared error of the hidden pixels, un-normalised pixel values, all channels.
        r2: against filling each image with the mean colour of its visible pixels: 1 is perfect, 0 no better;
            None where the hidden pixels are constant.
        leaky_masked_mse: the same error with the true patch statistics; None for models of plain pixels.
        leaky_r2: likewise.
        filled_r2: of the estimated patch means without any prediction: what a norm-pix model must exceed before
            its picture shows that it learned; None for models of plain pixels.
    """

    masked_mse: float
    r2: float | None
    leaky_masked_mse: float | None
    leaky_r2: float | None
    filled_r2: float | None


def draw_panels(
    model: MaskedAutoencoder,
    images: Float[Tensor, "B C H W"],
    plan: MaskPlan,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    path: Path,
    title: str,
) -> PanelStats:
    """Write one PNG: a row an image, a column a view of it, and below what was measured.

    Columns: input, masked, prediction pasted among the visible patches, prediction everywhere, error. The
    prediction of a norm-pix model is drawn with patch statistics estimated from visible patches; one more column
    shows it with the true ones, named as the leak it is.

    Args:
        model: predicts pixels, plain or norm-pix; mode and generators are left as they were.
        images: normalised images, one a row; 1 channel is drawn grey, 3 as colours, of others the first three.
        plan: what is hidden.
        mean: per channel, subtracted from the images when they were normalised, pixel values scaled to [0, 1].
        std: per channel, what they were divided by.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        UsageError: the model predicts no pixels, or images of a wrong shape.
        MAEError: the file cannot be written.
    """
    views = reconstruct(model, images, plan)
    images = images.float()
    honest = score(images, views.pasted, views.hidden, std)
    leaky = None if views.leaky is None else score(images, views.leaky, views.hidden, std)
    filled = None if views.filled is None else score(images, views.filled, views.hidden, std)
    tones = choose_tones(images, mean, std)
    columns = _columns(images, views, tones)
    caption = _caption(honest, leaky, filled, tones, share_hidden=float(plan.hidden.float().mean()))
    write_sheet(columns, title=title, caption=caption, path=path)
    return PanelStats(
        masked_mse=honest.masked_mse,
        r2=honest.r2,
        leaky_masked_mse=None if leaky is None else leaky.masked_mse,
        leaky_r2=None if leaky is None else leaky.r2,
        filled_r2=None if filled is None else filled.r2,
    )


def draw_rows(
    images: Float[Tensor, "B C H W"],
    views: Reconstruction,
    *,
    notes: Mapping[str, Sequence[Sequence[str]]],
    leave_out: Sequence[str] = (),
    mean: tuple[float, ...],
    std: tuple[float, ...],
    path: Path,
    title: str,
) -> None:
    """Write the columns of `draw_panels` as one PNG, each row with notes of its own instead of a common finding.

    Args:
        images: normalised images, one a row.
        views: what a model made of them.
        notes: by a column's name, lines under each of its pictures; PSNR and R² are explained below the rows.
        leave_out: names of columns that are not drawn.
        mean: see `draw_panels`.
        std: see `draw_panels`.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        MAEError: the file cannot be written.
    """
    tones = choose_tones(images, mean, std)
    columns = [
        replace(column, notes=notes.get(column.name, ()))
        for column in _columns(images, views, tones)
        if column.name not in leave_out
    ]
    caption = [
        "PSNR (in dB, more is better) and R² (1 perfect, 0 no better than the mean colour of the visible pixels) are "
        "of hidden pixels alone.",
        *([_PLAIN] if views.leaky is None else [_NORM_PIX, _MEANS]),
        *([_TOLD] if any(column.name == _LEAKY for column in columns) else []),
        *tones.notes,
    ]
    write_sheet(columns, title=title, caption=caption, path=path)


def draw_inpainting(
    images: Float[Tensor, "B C H W"],
    filled: Float[Tensor, "B C H W"],
    *,
    hole: Bool[Tensor, "B H W"],
    hidden: Bool[Tensor, "B H W"],
    norm_pix: bool,
    notes: Sequence[Sequence[str]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    path: Path,
    title: str,
) -> None:
    """Write one PNG: a row an image, its columns the input with the hole, the filled picture, the hidden patches.

    Args:
        images: normalised images; under the hole they hold anything but what stood there.
        filled: the same, the hole predicted.
        hole: True where nothing is known.
        hidden: True for the pixels of patches that the model did not see, since the hole touches them.
        norm_pix: whether the model predicts standardised patches.
        notes: lines under each input.
        mean: see `draw_panels`.
        std: see `draw_panels`.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above the columns.

    Raises:
        MAEError: the file cannot be written.
    """
    tones = choose_tones(images, mean, std)
    shown, filling = tones.paint(images), tones.paint(filled)
    columns = [
        Column(name="input with the hole", caption="", pictures=_covered(shown, hole), notes=notes),
        Column(name="filled", caption="predicted in the hole, the input's own pixels elsewhere", pictures=filling),
        Column(
            name="hidden patches",
            caption="what the encoder sees: patches that the hole touches are hidden whole",
            pictures=_covered(shown, hidden),
        ),
    ]
    caption = [
        "What stood under the mask was not used, so nothing tells how true the filling is.",
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
    title: str,
) -> None:
    """Write one picture of an animation: the columns input, masked and reconstruction of `draw_rows` alone."""
    leave_out = ("full reconstruction", "error", _LEAKY)
    draw_rows(images, views, notes=notes, leave_out=leave_out, mean=mean, std=std, path=path, title=title)


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
            caption="hidden patches predicted, visible ones true" + source,
            pictures=tones.paint(views.pasted),
        ),
        Column(
            name="full reconstruction",
            caption="visible patches predicted too, though nothing trains them",
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
    from matplotlib import colormaps  # here: matplotlib takes long to import

    error = (views.error * tones.std).mean(dim=1)  # [B, H, W]
    strongest = error_scale(error, views.hidden)
    table = torch.from_numpy(colormaps[_COLOUR_MAP](range(256))[:, :3]).float().to(error.device)  # [256, 3]
    share = (error / strongest).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1)  # of weights that ran away
    colours = table[(share * 255).round().long()]
    return Column(
        name="error",
        caption="absolute, in pixel values, mean over channels; visible patches blank",
        pictures=torch.where(views.hidden.unsqueeze(-1), colours, torch.ones_like(colours)),
        bar=ColourBar(colours=table, low="0", high=f"{readable(strongest)} or more"),
    )


def _caption(
    honest: Score, leaky: Score | None, filled: Score | None, tones: Tones, *, share_hidden: float
) -> list[str]:
    """What is printed below: the finding first, then what it was measured with."""
    error = f"Masked MSE in pixels {readable(honest.masked_mse)}"
    measured = f"{_explained(honest)} {error}; {share_hidden:.0%} of patches hidden."
    if leaky is None or filled is None:
        return [measured, _PLAIN, *tones.notes]
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
        return "R² is undefined: the hidden pixels have one colour."
    return f"R² {result.r2:.2f} against the mean colour of the visible pixels (1 perfect, 0 no better)."


def _r2(result: Score) -> str:
    return "" if result.r2 is None else f", R² {result.r2:.2f}"
