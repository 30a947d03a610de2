"""What a model makes of images that a user gives: one sheet, or a hole filled, or an animation over a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.errors import UsageError
from mae.evaluation.common.picture_quality import PictureQuality, reconstruction_quality
from mae.evaluation.extractors.extractor import Extractor, model_extractor
from mae.evaluation.extractors.open import open_extractor
from mae.evaluation.pictures.inputs import Masks, Row, read_mask, rows_of
from mae.modalities.images.pictures import Reconstruction, join, score
from mae.models.file import load_model
from mae.models.given_images import Images, given_images, one_by_one, statistics_of
from mae.models.pretrained import PretrainedEncoder
from mae.models.reconstruction import reconstruct as predict_picture
from mae.records import check_new, check_seed
from mae.report.figures.animation import write_animation
from mae.report.figures.panels import draw_frame, draw_inpainting, draw_rows
from mae.report.figures.picture_file import write_picture
from mae.report.figures.tones import choose_tones, rgb_channels
from mae.text import without_common_folders
from mae.training.checkpoint import MODEL, good_checkpoints
from mae.training.device import choose_device
from mae.training.run_folder import RunFolder

_MAX_ROWS = 48  # of a sheet: more would make a picture that few programs open


@dataclass(frozen=True, kw_only=True)
class PictureNumbers:
    """How good one picture is; over its masked pixels, pixel values as in `Pictures`, not clipped.

    Attributes:
        masked_mse: mean squared error, all channels.
        psnr: `10 log10(range^2 / masked_mse)` in dB; the range is 1 for images of 8 bits, else that of the
            crop's values. None for a perfect picture.
        ssim: see `PictureQuality`.
        r2: see `mae.models.reconstruction.Score`.
        means_r2: that of the estimated patch means with nothing predicted, which a norm-pix model must exceed before
            its picture shows that it learned; None for a model of plain pixels.
    """

    masked_mse: float
    psnr: float | None
    ssim: float | None
    r2: float | None
    means_r2: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """What a model made of images, on the CPU: a row for each image and each of its ratios, ratio after ratio.

    Pixel values are float32: whole-number images scaled to [0, 1], others as they are. Predictions are not clipped.

    Attributes:
        names: each row's file, or the image's number.
        hidden_share: of each row, the share of patches that were masked.
        input: the central crops; with `inpaint` 0 in the hole.
        masked: what the encoder saw; 0 where masked.
        pasted: true pixels where visible, predicted ones where masked.
        full: predicted pixels everywhere; nothing ever trained the visible ones.
        leaky: as `pasted` with the true brightness and contrast of each masked patch, which give part of the answer
            away; None for a model of plain pixels, and with `inpaint`.
        error: absolute distance of `pasted` from `input`; None with `inpaint`, since no truth is known.
        hidden: True for the pixels of masked patches.
        hole: with `inpaint`, True where nothing was known; a part of `hidden`.
        filled: with `inpaint`, `input` with the hole predicted.
        numbers: how good `pasted` is, row by row; empty with `inpaint`.
        leaky_numbers: the same of `leaky`; empty where there is none.
        written: the files that were written.
        loaded: what was loaded of the model's file, in one line; None for a model that was given itself.
    """

    names: tuple[str, ...]
    hidden_share: tuple[float, ...]
    input: Float[Tensor, "B C H W"]
    masked: Float[Tensor, "B C H W"]
    pasted: Float[Tensor, "B C H W"]
    full: Float[Tensor, "B C H W"]
    leaky: Float[Tensor, "B C H W"] | None
    error: Float[Tensor, "B C H W"] | None
    hidden: Bool[Tensor, "B H W"]
    hole: Bool[Tensor, "B H W"] | None
    filled: Float[Tensor, "B C H W"] | None
    numbers: tuple[PictureNumbers, ...]
    leaky_numbers: tuple[PictureNumbers, ...]
    written: tuple[Path, ...]
    loaded: str | None


def reconstruct(
    model: Any,
    images: Images,
    *,
    mask_ratio: float | Sequence[float] | None = None,
    mask: str | Path | Tensor | None = None,
    inpaint: bool = False,
    rgb: Sequence[str] = (),
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
) -> Pictures:
    """What a model makes of the masked patches of images; like the command `mae reconstruct`.

    Images are resized and cropped to the model's size as evaluation does. A norm-pix model predicts patches
    standardised by their own statistics; those of masked patches are estimated from visible ones, and only `leaky`
    uses the true ones.

    Args:
        model: a run folder, a checkpoint folder, a `.safetensors` file or a model, which is left as it is.
        images: files, images of Pillow, or pixel values, `[B, C, H, W]` of a tensor, as in the files: uint8, uint16, or
            float32, which is taken as it is: in [0, 1] for a model of whole-number images.
        mask_ratio: share of patches masked, one or several; None: the model's own. The masks are drawn from `seed`
            and the image's position; of two ratios the higher one hides what the lower one does, and more.
        mask: instead of a ratio, a black and white picture, white = masked, or a tensor `[h, w]` of 0 and 1; of the
            image's size, of the model's crop or of its grid; a patch with any masked pixel is masked whole.
        inpaint: the mask is a hole: what stands under it is not used for anything.
        rgb: names of the channels shown as red, green and blue, or of one shown as grey; none: by their names, see
            `mae.report.figures.tones.rgb_channels`.
        seed: decides the masks, `0 <= seed < 2**63`.
        out: the sheet, a `.png`; with `inpaint` each filled picture is written beside it. None: nothing is written.
        device: `auto`, `cpu`, `cuda` or `mps`.

    Raises:
        UsageError: the request cannot be carried out as asked, such as a model without a decoder or a mask of
            another size.
        MAEError: an image that cannot be read, or a file that cannot be written.
    """
    _check_request(mask_ratio, mask, inpaint, seed)
    target = None if out is None else _checked_target(out, ".png", images, mask, inpaint=inpaint)
    extractor = _with_decoder(model, device)
    shown = rgb_channels(extractor.preprocessing.channels, rgb)
    given = given_images(images, extractor.preprocessing)
    ratios = tuple(mask_ratio) if isinstance(mask_ratio, Sequence) else (mask_ratio,)
    masks = Masks(ratios=ratios, hidden=None if mask is None else read_mask(mask), inpaint=inpaint, seed=seed)
    rows = rows_of(extractor, given, masks)
    if target is not None and len(rows) > _MAX_ROWS:
        raise UsageError(f"{len(rows)} rows do not fit on a sheet; give at most {_MAX_ROWS} images times ratios")
    views = [_predicted(extractor, row) for row in rows]
    written: tuple[Path, ...] = ()
    pictures = _pictures(extractor, rows, views)
    if target is not None and inpaint:
        written = _write_inpainting(extractor, rows, views, pictures, target, shown)
    elif target is not None:
        written = _write_sheet(extractor, rows, views, pictures, target, several=len(ratios) > 1, rgb=shown)
    return replace(pictures, written=written)


def animate(
    run: str | Path,
    images: Images,
    *,
    out: str | Path,
    mask_ratio: float | None = None,
    mask: str | Path | Tensor | None = None,
    rgb: Sequence[str] = (),
    seed: int = 0,
    device: str = "auto",
) -> Path:
    """A GIF of what a run made of images under the same masks: a frame for each checkpoint that is kept.

    Args:
        run: the run's folder.
        images: see `reconstruct`.
        out: the GIF.
        mask_ratio: share of patches masked; None: the model's own.
        mask: see `reconstruct`.
        rgb: see `reconstruct`.
        seed: decides the masks, `0 <= seed < 2**63`.
        device: `auto`, `cpu`, `cuda` or `mps`.

    Raises:
        UsageError: see `reconstruct`; no run folder, or one with fewer than two checkpoints.
        MAEError: see `reconstruct`.
    """
    _check_request(mask_ratio, mask, False, seed)
    target = _checked_target(out, ".gif", images, mask, inpaint=False)
    checkpoints = kept_checkpoints(run)
    masks = Masks(ratios=(mask_ratio,), hidden=None if mask is None else read_mask(mask), inpaint=False, seed=seed)
    chosen, last = choose_device(device), max(checkpoints)
    rows: list[Row] = []
    frames: list[Callable[[Path], object]] = []
    for step, path in checkpoints.items():
        extractor = model_extractor(load_model(path / MODEL).to(chosen), name=str(run))
        if not rows:
            given = given_images(images, extractor.preprocessing)
            rows = rows_of(extractor, given, masks)
            if len(rows) > _MAX_ROWS:
                raise UsageError(f"{len(rows)} images do not fit on a sheet; give at most {_MAX_ROWS}")
        views = [_predicted(extractor, row) for row in rows]
        pictures, wanted = _pictures(extractor, rows, views), extractor.preprocessing
        frames.append(
            partial(
                draw_frame,
                images=torch.cat([row.images for row in rows]),
                views=join(views),
                notes=notes_of(pictures),
                mean=wanted.mean,
                std=wanted.std,
                rgb=rgb_channels(wanted.channels, rgb),
                title=f"Step {step:,} of {last:,}",
            )
        )
    write_animation(frames, target)
    return target


def _check_request(mask_ratio: object, mask: object, inpaint: bool, seed: int) -> None:
    if mask is not None and mask_ratio is not None:
        raise UsageError("--mask and --mask-ratio both say what is masked; give one of them")
    if inpaint and mask is None:
        raise UsageError("--inpaint needs --mask: a picture of the hole, white where nothing is known")
    check_seed(seed)
    if isinstance(mask_ratio, Sequence) and not mask_ratio:
        raise UsageError("no mask ratio is given; expected one or more shares between 0 and 1")


def _checked_target(
    out: str | Path, suffix: str, images: Images, mask: str | Path | Tensor | None, *, inpaint: bool
) -> Path:
    out = Path(out)
    if out.suffix.lower() != suffix:
        raise UsageError(f"--out is {out}; expected a name that ends in {suffix}")
    given = one_by_one(images)
    filled = _filled_paths(out, len(given)) if inpaint else []
    for path in (out, *filled, *(path.with_suffix(".tif") for path in filled)):
        check_new(path)
    return out


def _filled_paths(out: Path, count: int) -> list[Path]:
    """Where each filled picture goes; the suffix depends on its type."""
    numbers = [f"-{number}" for number in range(1, count + 1)] if count > 1 else [""]
    return [out.with_name(f"{out.stem}-filled{number}{out.suffix}") for number in numbers]


def _with_decoder(model: Any, device: str) -> Extractor:
    if not isinstance(model, (str, Path, PretrainedEncoder)):
        raise UsageError(
            f"the model is {type(model).__name__}; expected a run folder, a .safetensors file or a MaskedAutoencoder"
        )
    is_foreign = str(model).partition(":")[0] in ("timm", "hf")
    extractor = None if is_foreign else open_extractor(model, device=choose_device(device))
    if extractor is None or extractor.autoencoder is None:
        name = model if extractor is None else extractor.name
        raise UsageError(f"{name} has no decoder; reconstruction needs a model that 'mae pretrain' wrote")
    return extractor


def kept_checkpoints(run: str | Path) -> dict[int, Path]:
    """The checkpoints of a run that make an animation, by step.

    Raises:
        UsageError: no run folder, or one with fewer than two checkpoints.
    """
    folder = RunFolder(Path(run))
    if not folder.checkpoints.is_dir():
        raise UsageError(f"{run} is no run folder; --animation shows how a run went, so it needs the run's folder")
    checkpoints = good_checkpoints(folder.checkpoints)
    if len(checkpoints) < 2:
        raise UsageError(
            f"{run} has {len(checkpoints)} checkpoint; an animation needs two or more: pre-train with "
            "--checkpoint-keep-every STEPS, which keeps one every so many steps"
        )
    return checkpoints


def _predicted(extractor: Extractor, row: Row) -> Reconstruction:
    assert extractor.autoencoder is not None
    return predict_picture(extractor.autoencoder, row.images, row.plan)


def _pictures(extractor: Extractor, rows: Sequence[Row], views: Sequence[Reconstruction]) -> Pictures:
    mean, std = statistics_of(extractor.preprocessing)
    joined, pixels = join(views), torch.cat([row.pixels for row in rows])
    hidden = joined.hidden.unsqueeze(1)
    full = joined.full * std + mean
    pasted = torch.where(hidden, full, pixels)
    leaky = None if joined.leaky is None else torch.where(hidden, joined.leaky * std + mean, pixels)
    holes = [row.hole for row in rows if row.hole is not None]
    hole = torch.cat(holes) if holes else None
    measured = [] if holes else [_numbers(extractor, row, view) for row, view in zip(rows, views, strict=True)]
    return Pictures(
        names=tuple(row.image.name for row in rows),
        hidden_share=tuple(float(row.plan.hidden.float().mean()) for row in rows),
        input=pixels if hole is None else pixels.masked_fill(hole.unsqueeze(1), 0),
        masked=pixels.masked_fill(hidden, 0),
        pasted=pasted,
        full=full,
        leaky=leaky if hole is None else None,
        error=(pasted - pixels).abs() if hole is None else None,
        hidden=joined.hidden,
        hole=hole,
        filled=None if hole is None else torch.where(hole.unsqueeze(1), full, pixels),
        numbers=tuple(honest for honest, _ in measured),
        leaky_numbers=tuple(leaky for _, leaky in measured if leaky is not None),
        written=(),
        loaded=extractor.loaded,
    )


def _numbers(extractor: Extractor, row: Row, view: Reconstruction) -> tuple[PictureNumbers, PictureNumbers | None]:
    assert extractor.autoencoder is not None
    wanted = extractor.preprocessing
    # A constant image has no range; any will do, as it says nothing there.
    values = row.pixels[~row.pixels.isnan()]
    data_range = 1.0 if row.image.is_8_bit or not len(values) else float(values.max() - values.min()) or 1.0
    by_picture = reconstruction_quality(
        extractor.autoencoder, [(row.images, row.plan)], mean=wanted.mean, std=wanted.std, data_range=data_range
    )

    def r2(picture: Tensor) -> float | None:
        return score(row.images, picture, view.hidden, wanted.std).r2

    means_r2 = None if view.filled is None else r2(view.filled)

    def numbers(quality: PictureQuality, picture: Tensor) -> PictureNumbers:
        return PictureNumbers(
            masked_mse=quality.mse, psnr=quality.psnr, ssim=quality.ssim, r2=r2(picture), means_r2=means_r2
        )

    honest = numbers(by_picture["model"], view.pasted)
    return honest, None if view.leaky is None else numbers(by_picture["with_true_statistics"], view.leaky)


def _write_sheet(
    extractor: Extractor,
    rows: Sequence[Row],
    views: Sequence[Reconstruction],
    pictures: Pictures,
    target: Path,
    *,
    several: bool,
    rgb: tuple[int, ...] | None,
) -> tuple[Path, ...]:
    wanted = extractor.preprocessing
    draw_rows(
        torch.cat([row.images for row in rows]),
        join(views),
        notes=notes_of(pictures),
        leave_out=("full reconstruction",) if several else (),
        mean=wanted.mean,
        std=wanted.std,
        rgb=rgb,
        path=target,
        title=f"What {extractor.name} makes of masked patches",
    )
    return (target,)


def notes_of(pictures: Pictures) -> dict[str, list[list[str]]]:
    """Lines under the pictures, by the name of their column."""
    return {
        "input": _file_names(pictures),
        "masked": [[f"{share:.0%} of patches masked"] for share in pictures.hidden_share],
        "reconstruction": [
            [
                *_in_words(numbers),
                *([] if numbers.means_r2 is None else [f"means alone: R² {numbers.means_r2:.2f}"]),
            ]
            for numbers in pictures.numbers
        ],
        "leaky reconstruction": [_in_words(numbers) for numbers in pictures.leaky_numbers],
    }


def _file_names(pictures: Pictures) -> list[list[str]]:
    return [[name] for name in without_common_folders(pictures.names)]


def _in_words(numbers: PictureNumbers) -> list[str]:
    psnr = "PSNR infinite" if numbers.psnr is None else f"PSNR {numbers.psnr:.1f} dB"
    return [psnr, "R² undefined" if numbers.r2 is None else f"R² {numbers.r2:.2f}"]


def _write_inpainting(
    extractor: Extractor,
    rows: Sequence[Row],
    views: Sequence[Reconstruction],
    pictures: Pictures,
    target: Path,
    rgb: tuple[int, ...] | None,
) -> tuple[Path, ...]:
    assert pictures.hole is not None and pictures.filled is not None
    wanted, images = extractor.preprocessing, torch.cat([row.images for row in rows])
    mean, std = statistics_of(extractor.preprocessing)
    draw_inpainting(
        images,
        (pictures.filled - mean) / std,
        hole=pictures.hole,
        hidden=pictures.hidden,
        norm_pix=views[0].leaky is not None,
        notes=_file_names(pictures),
        tones=choose_tones(images, wanted.mean, wanted.std, rgb),
        path=target,
        title=f"Holes filled by {extractor.name}",
    )
    files = zip(_filled_paths(target, len(rows)), pictures.filled, rows, strict=True)
    return (
        target,
        *(write_picture(filled * row.image.scale, path, dtype=row.image.pixels.dtype) for path, filled, row in files),
    )
