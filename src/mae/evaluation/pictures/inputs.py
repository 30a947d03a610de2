"""Images that a user gives one by one, and the mask for them: read, cropped as evaluation does, never guessed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.core.types import Grid, MaskPlan
from mae.data.dataset.channel_stats import join, moments_of, no_moments
from mae.data.dataset.channels import ImageFormat, choose_channels, divisor, in_unit
from mae.data.dataset.units import check_moments
from mae.data.decode.image import conform, decode, probe
from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.sources.channel_names import NAMES_FILE, names_above
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import Extractor, Preprocessing
from mae.masks.given import plan_from_mask
from mae.modalities.images.crop import central_crop
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.text import visible

Images = str | Path | Tensor | Sequence[str | Path]
"""Image files, or pixel values `[B, C, H, W]`: whole numbers of 8 or 16 bits, or floating point as it is."""

_TYPES = (torch.uint8, torch.uint16, torch.float32)
_GREY = (0.1, 0.9)  # of a mask's range: what lies between is neither black nor white
_MAX_GREY = 0.05  # share of a mask's pixels: soft edges and a JPEG's errors are fewer, a photograph has more
_TOUCHED = 1e-4  # share of a resized pixel that counts as touched by a mask; rounding leaves less


@dataclass(frozen=True, kw_only=True, eq=False)
class InputImage:
    """An image in full.

    Attributes:
        name: its file as text that can be shown, or its number.
        pixels: `[H, W, C]` with the channels of the model: uint8 or uint16 as in the file, or float32 in its unit.
        scale: what the latter are the values of the file divided by; 1 for raw float values.
    """

    name: str
    pixels: np.ndarray
    scale: float = 1.0

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def is_integer(self) -> bool:
        """Whether values are those of integer files, scaled to [0, 1]."""
        return self.scale != 1 or self.pixels.dtype.kind == "u"


def given_images(images: Images, wanted: Preprocessing) -> list[InputImage]:
    """The images in their order.

    Args:
        images: files or pixel values; of files that name their channels the model's are taken.
        wanted: the model's channels; grey becomes colour by replication, colour becomes grey by its luma.

    Raises:
        UsageError: no image, a file that is not there, other channels, a tensor of another shape or type, or values in
            another unit than the model expects.
        UnreadableImage: a file that is no whole image, or is over the limits.
    """
    if isinstance(images, Tensor):
        named = _from_tensor(images)
        if images.dtype == torch.float32:  # in the unit of the model already, unlike the values of a file
            wanted = replace(wanted, pixel_dtype=None)
    else:
        paths = [images] if isinstance(images, (str, Path)) else images
        named = [_picked(Path(path), wanted) for path in paths]
    if not named:
        raise UsageError("no image is given; name one or more image files")
    channels = wanted.in_chans
    for name, pixels in named:
        num_channels = pixels.shape[2]
        if num_channels != channels and {num_channels, channels} != {1, 3}:
            raise UsageError(f"{name} has {num_channels} channels; the model expects {channels}")
    given = [_in_form(pixels, wanted, name) for name, pixels in named]
    _check_units(given, [pixels.dtype for _, pixels in named], wanted)
    return given


def _check_units(given: Sequence[InputImage], found: Sequence[np.dtype], wanted: Preprocessing) -> None:
    total = no_moments(wanted.in_chans)
    for image in given:
        pixels = in_unit(image.pixels, None) if image.pixels.dtype.kind == "u" else image.pixels
        # A hole may hide values that are not finite.
        known = np.where(np.isfinite(pixels), pixels, np.float32(np.nan))
        total = join(total, moments_of(torch.from_numpy(known).permute(2, 0, 1)))
    check_moments(
        total,
        name=given[0].name if len(given) == 1 else f"{len(given)} images",
        mean=wanted.mean,
        std=wanted.std,
        pixel_dtype=wanted.pixel_dtype,
        found=set(found),
    )


def _picked(path: Path, wanted: Preprocessing) -> tuple[str, np.ndarray]:
    """A file as text that can be shown, and its pixels: the model's channels by name, where both have names."""
    name, content = visible(str(path)), _content(path)
    above = None if wanted.channels is None else names_above(path.parent)  # else nobody asks for names
    bands = wanted.in_chans if above is None else len(above)
    pixels = decode(content, name=name, bands=bands)
    names = above or probe(content, name=name, bands=bands).names
    if wanted.channels is None or names is None:
        return name, pixels
    if len(names) != pixels.shape[2]:
        raise UsageError(
            f"{name} has {pixels.shape[2]} channels, and {len(names)} are named in the {NAMES_FILE} above it"
        )
    _, places = choose_channels(names, wanted.channels, name=name)
    return name, pixels if places is None else pixels[..., places]


def _in_form(pixels: np.ndarray, wanted: Preprocessing, name: str) -> InputImage:
    scale = divisor(pixels.dtype, wanted.pixel_dtype)
    if wanted.nodata is None:  # a hole may hide values that are not finite: `crop_image` looks at the others
        if pixels.dtype.kind == "u" and scale != 1:  # scaled behind the crop, as evaluation does
            scale = 1.0
        else:
            pixels = in_unit(pixels, wanted.pixel_dtype)
        pixels = conform(pixels, channels=wanted.in_chans, dtype=pixels.dtype, name=name)
        return InputImage(name=name, pixels=pixels, scale=scale)
    form = ImageFormat(
        channels=wanted.in_chans,
        dtype=np.dtype(np.float32),
        missing=float(wanted.nodata),
        integers=scale != 1,
        pixel_dtype=wanted.pixel_dtype,
    )
    return InputImage(name=name, pixels=form.of(pixels, name=name), scale=scale)


def _from_tensor(images: Tensor) -> list[tuple[str, np.ndarray]]:
    if images.ndim != 4 or min(images.shape) < 1:
        raise UsageError(f"images of shape {tuple(images.shape)}; expected [batch, channels, height, width]")
    if images.dtype not in _TYPES:
        raise UsageError(
            f"images of type {images.dtype}; expected pixel values as in the files: uint8, uint16 or float32"
        )
    arrays = images.detach().cpu().permute(0, 2, 3, 1).numpy()
    return [(f"image {number}", pixels) for number, pixels in enumerate(arrays, start=1)]


def _content(path: Path) -> bytes:
    """The bytes of an image file.

    Raises:
        UsageError: no such file.
        UnreadableImage: the file cannot be read, or is too large.
    """
    name = visible(str(path))
    if not path.is_file():
        raise UsageError(f"{name} is {'a folder' if path.is_dir() else 'not there'}; expected an image file")
    try:
        check_num_bytes(path.stat().st_size, name=name)
        return path.read_bytes()
    except OSError as error:
        raise UnreadableImage(f"{name} cannot be read: {error.strerror}") from error


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
    pixels = decode(_content(Path(mask)), name=name)
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


def crop_image(image: InputImage, wanted: Preprocessing) -> Float[Tensor, "C H W"]:
    """The central crop; whole numbers scaled to [0, 1], others as they are.

    Raises:
        UsageError: values that are not finite.
    """
    pixels = image.pixels.astype(np.float32) / np.float32(65535) if image.pixels.dtype == np.uint16 else image.pixels
    whole = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)
    crop = central_crop(whole, wanted.img_size, wanted.crop_share, interpolation=wanted.interpolation)
    values = crop.float() / 255 if crop.dtype == torch.uint8 else crop.float()
    if wanted.nodata is None and not bool(values.isfinite().all()):
        raise UsageError(f"{image.name} holds values that are not finite; only what a hole hides may be so")
    return values


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


def statistics_of(wanted: Preprocessing) -> tuple[Float[Tensor, "C 1 1"], Float[Tensor, "C 1 1"]]:
    """Mean and std of each channel, as images are normalised by them."""
    return torch.tensor(wanted.mean)[:, None, None], torch.tensor(wanted.std)[:, None, None]
