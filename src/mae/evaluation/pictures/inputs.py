"""The mask that a user gives for images: read, cropped as evaluation crops them, never guessed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.core.types import Grid, MaskPlan
from mae.data.decode.image import conform, decode
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import Extractor
from mae.masks.given import plan_from_mask
from mae.modalities.images.crop import central_crop
from mae.models.given_images import InputImage, crop_image, read_file, statistics_of
from mae.models.preprocess import Preprocessing
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.text import visible

_GREY = (0.1, 0.9)  # of a mask's range: what lies between is neither black nor white
_MAX_GREY = 0.05  # share of a mask's pixels: soft edges and a JPEG's errors are fewer, a photograph has more
_TOUCHED = 1e-4  # share of a resized pixel that counts as touched by a mask; rounding leaves less


def read_mask(mask: str | Path | Tensor) -> Bool[Tensor, "h w"]:
    """A mask as picture, white = masked (over half of its range), or a tensor of 0 and 1, 1 = masked.

    Raises:
        UsageError: not black and white, nothing white, or a tensor of another shape or other values.
        UnreadableImage: a file that is no whole image.
    """
    if isinstance(mask, Tensor):
        if mask.ndim != 2 or bool(((mask != 0) & (mask != 1)).any()):
            raise UsageError(
                f"the mask is a tensor of shape {tuple(mask.shape)}; expected [height, width] of 0 and 1, 1 = masked"
            )
        return mask.bool().cpu()
    name = visible(str(mask))
    pixels = decode(read_file(Path(mask)), name=name)
    wanted = "expected a black and white picture, white = masked"
    if pixels.shape[2] not in (1, 3):
        raise UsageError(f"the mask {name} has {pixels.shape[2]} channels; {wanted}")
    grey = conform(pixels, channels=1, dtype=pixels.dtype, name=name)[..., 0].astype(np.float32)
    is_integer = pixels.dtype.kind == "u"
    low, high = (0.0, float(np.iinfo(pixels.dtype).max)) if is_integer else (float(grey.min()), float(grey.max()))
    level = (grey - low) / (high - low or 1.0)
    between = float(((level > _GREY[0]) & (level < _GREY[1])).mean())
    if between > _MAX_GREY:
        raise UsageError(f"the mask {name} is grey or coloured in {between:.0%} of its pixels; {wanted}")
    if not (level > 0.5).any():
        brightest = f"its brightest value is {grey.max():g} of {high:g}"
        raise UsageError(f"the mask {name} has no white pixel, {brightest}; {wanted}")
    return torch.from_numpy(level > 0.5)


def crop_mask(
    mask: Bool[Tensor, "h w"], image: InputImage, wanted: Preprocessing, grid: Grid, *, is_hole: bool
) -> Bool[Tensor, "H W"]:
    """The mask of an image's crop: each pixel that holds anything of a masked one is masked.

    Args:
        mask: of the image's size, and then cropped exactly as the image is; or of the crop's; or of the grid's.
        image: what it is for.
        wanted: how the image is cropped.
        grid: rows and columns of patches.
        is_hole: take the last two only for an image that is not resized: else its hole would be mixed into its
            known pixels, where a mask of the crop cannot tell.

    Raises:
        UsageError: a mask of another size.
    """
    found, crop = (mask.shape[0], mask.shape[1]), wanted.img_size
    if found == image.size:
        whole = mask.float().unsqueeze(0)
        return central_crop(whole, crop, wanted.crop_share, interpolation="bilinear")[0] > _TOUCHED
    sizes = [f"{_size(image.size)} (the image {image.name})"]
    if not is_hole or image.size == crop:
        if found == crop:
            return mask
        if found == grid:
            times = (crop[0] // grid[0], crop[1] // grid[1])
            return mask.repeat_interleave(times[0], dim=0).repeat_interleave(times[1], dim=1)
        sizes += [f"{_size(crop)} (the model's crop)", f"{_size(grid)} (its patches)"]
    raise UsageError(f"the mask has {_size(found)} pixels, width x height; expected {' or '.join(sizes)}")


def without_hole(image: InputImage, mask: Bool[Tensor, "h w"]) -> InputImage:
    """The image with the nearest known pixel at each place of a hole, so that a resize mixes nothing of it in."""
    from scipy.ndimage import distance_transform_edt  # here: only a hole needs it

    nearest = distance_transform_edt(mask.numpy(), return_distances=False, return_indices=True)
    return replace(image, pixels=image.pixels[nearest[0], nearest[1]])


def _size(size: Sequence[int]) -> str:
    return f"{size[1]} x {size[0]}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Masks:
    """What is to be masked in each of some images.

    Attributes:
        ratios: shares of patches, None for the model's own; ignored where a mask is given.
        hidden: the user's mask, True = masked.
        inpaint: whether that mask is a hole of which nothing may be used.
        seed: decides the masks of the ratios.
    """

    ratios: tuple[float | None, ...]
    hidden: Bool[Tensor, "h w"] | None
    inpaint: bool
    seed: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """An image under a mask.

    Attributes:
        image: the image in full; with a hole, what stood there is gone.
        pixels: its crop; whole numbers scaled to [0, 1].
        images: the same, normalised as the model wants it.
        plan: what is masked.
        hole: True where nothing is known; None without a hole.
    """

    image: InputImage
    pixels: Float[Tensor, "1 C H W"]
    images: Float[Tensor, "1 C H W"]
    plan: MaskPlan
    hole: Bool[Tensor, "1 H W"] | None


def rows_of(extractor: Extractor, images: Sequence[InputImage], masks: Masks) -> list[Row]:
    """The images under their masks: a row an image and ratio, image after image.

    Raises:
        UsageError: a mask or a ratio that hides nothing or all of an image, or does not fit.
    """
    return [row for number, image in enumerate(images) for row in _rows(extractor, image, number, masks)]


def _rows(extractor: Extractor, image: InputImage, number: int, masks: Masks) -> list[Row]:
    model, wanted = extractor.autoencoder, extractor.preprocessing
    assert model is not None and model.config is not None
    layout = model.config.layout
    hole = None
    if masks.hidden is not None:
        covered = crop_mask(masks.hidden, image, wanted, layout.grid, is_hole=masks.inpaint)
        try:
            plans = [plan_from_mask(covered, batch=1, layout=layout)]
        except UsageError as error:
            raise UsageError(f"{error} (in the central crop of {image.name})") from error
        if masks.inpaint:
            hole = covered.unsqueeze(0)
            # A mask of another size than the image's is taken only where nothing is resized.
            image = without_hole(image, masks.hidden if masks.hidden.shape == image.size else covered)
    else:
        key = sample_keys(masks.seed, FIXED_EPOCH, torch.tensor([number]))
        plans = []
    pixels = crop_image(image, wanted).unsqueeze(0)
    if bool(pixels.isnan().all()):
        raise UsageError(f"{image.name} holds no data in its central crop; give another image")
    mean, std = statistics_of(wanted)
    images = (pixels - mean) / std
    plans = plans or [model.plan(images, keys=key, ratio=ratio) for ratio in masks.ratios]
    return [Row(image=image, pixels=pixels, images=images, plan=plan, hole=hole) for plan in plans]
