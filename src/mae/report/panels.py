"""The picture that shows what a model makes of hidden patches, with its numbers burnt in."""

from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.report.canvas import readable
from mae.report.reconstruction import Reconstruction, Score, reconstruct, score
from mae.report.sheet import ColourBar, Column, write_sheet
from mae.report.tones import Tones, choose_tones, error_scale
from mae.types import MaskPlan

_HIDDEN_COLOUR = (0.87, 0.88, 0.90)  # no photograph's grey: a shade towards blue
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


def _columns(images: Float[Tensor, "B C H W"], views: Reconstruction, tones: Tones) -> list[Column]:
    true = tones.paint(images)
    cover = torch.tensor(_HIDDEN_COLOUR, device=true.device)
    masked = torch.where(views.hidden.unsqueeze(-1), cover, true)
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
                name="leaky reconstruction",
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
    colours = table[(error / strongest * 255).clamp(max=255).round().long()]
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
        return [measured, "The model predicts pixels: drawn as predicted.", *tones.notes]
    return [
        measured,
        "The model predicts patches standardised by their own mean and deviation (norm-pix). To draw them, those of "
        "hidden patches are estimated from visible ones nearby (Gaussian weights); no hidden pixel is read. "
        f"The estimated means alone, with nothing predicted, reach {readable(filled.masked_mse)}{_r2(filled)}.",
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
