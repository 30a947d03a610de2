"""Images that a user gives one by one: read, brought to a model's channels and unit, cropped as evaluation does."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from PIL import Image
from torch import Tensor

from mae.data.dataset.channel_stats import join, moments_of, no_moments
from mae.data.dataset.channels import ImageFormat, choose_channels, divisor, in_unit
from mae.data.dataset.units import check_moments
from mae.data.decode.image import conform, decode, pixels_of, probe
from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.sources.channel_names import NAMES_FILE, names_above
from mae.errors import UsageError
from mae.modalities.images.crop import central_crop
from mae.models.preprocess import Preprocessing
from mae.text import visible

OneImage = str | Path | Image.Image | np.ndarray | Tensor
"""A file, an image of Pillow, or pixel values: `[H, W, C]` or `[H, W]` of an array, `[C, H, W]` of a tensor.

Whole numbers of 8 or 16 bits, or floating point as it is.
"""

Images = OneImage | Sequence[OneImage]
"""One or several; arrays and tensors also with a leading axis of images."""

_log = logging.getLogger(__name__)

_TYPES, _TENSOR_TYPES = (np.uint8, np.uint16, np.float32), (torch.uint8, torch.uint16, torch.float32)


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
    def is_8_bit(self) -> bool:
        """Whether values are those of 8 bits, which images fill; of 16 many sensors fill a part alone."""
        return self.scale == np.iinfo(np.uint8).max or self.pixels.dtype == np.uint8


def given_images(
    images: Images, wanted: Preprocessing, *, tell: Callable[[str], object] = _log.warning
) -> list[InputImage]:
    """The images in their order.

    Args:
        images: files, Pillow's images or pixel values; of files that name their channels the model's are taken.
        wanted: the model's channels; grey becomes colour by replication, colour becomes grey by its luma.
        tell: is given what is unusual about their values, if anything is.

    Raises:
        UsageError: no image, a file that is not there, other channels, a tensor of another shape or type, or values in
            another unit than the model expects.
        UnreadableImage: a file that is no whole image, or is over the limits.
    """
    each = one_by_one(images)
    named = [_named(image, number, wanted) for number, image in enumerate(each, start=1)]
    in_unit_of_model = {
        not isinstance(image, str | Path | Image.Image) and pixels.dtype == np.float32
        for image, (_, pixels) in zip(each, named, strict=True)
    }
    if len(in_unit_of_model) > 1:
        raise UsageError("some of the images are pixel values of floating point and some are not; give them apart")
    if True in in_unit_of_model:  # unlike the values of a file
        wanted = replace(wanted, pixel_dtype=None)
    if not named:
        raise UsageError("no image is given; name one or more image files")
    channels = wanted.in_chans
    for name, pixels in named:
        num_channels = pixels.shape[2]
        if num_channels != channels and {num_channels, channels} != {1, 3}:
            raise UsageError(f"{name} has {num_channels} channels; the model expects {channels}")
    given = [_in_form(pixels, wanted, name) for name, pixels in named]
    if unusual := _check_units(given, [pixels.dtype for _, pixels in named], wanted):
        tell(unusual)
    return given


def one_by_one(images: Images) -> list[OneImage]:
    """The images in a list."""
    if isinstance(images, Tensor | np.ndarray) and images.ndim == 4:
        return list(images)
    if isinstance(images, Sequence) and not isinstance(images, str):
        return list(images)
    return [images]


def _check_units(given: Sequence[InputImage], found: Sequence[np.dtype], wanted: Preprocessing) -> str | None:
    total = no_moments(wanted.in_chans)
    for image in given:
        pixels = in_unit(image.pixels, None) if image.pixels.dtype.kind == "u" else image.pixels
        # A hole may hide values that are not finite.
        known = np.where(np.isfinite(pixels), pixels, np.float32(np.nan))
        total = join(total, moments_of(torch.from_numpy(known).permute(2, 0, 1)))
    return check_moments(
        total,
        name=given[0].name if len(given) == 1 else f"{len(given)} images",
        mean=wanted.mean,
        std=wanted.std,
        pixel_dtype=wanted.pixel_dtype,
        found=set(found),
    )


def _picked(path: Path, wanted: Preprocessing) -> tuple[str, np.ndarray]:
    """A file as text that can be shown, and its pixels: the model's channels by name, where both have names."""
    name, content = visible(str(path)), read_file(path)
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


def _named(image: OneImage, number: int, wanted: Preprocessing) -> tuple[str, np.ndarray]:
    """An image as text that can be shown, and its pixels `[H, W, C]`."""
    if isinstance(image, str | Path):
        return _picked(Path(image), wanted)
    name = f"image {number}"
    if isinstance(image, Image.Image):
        pixels = pixels_of(image, bands=wanted.in_chans)
    elif isinstance(image, Tensor):
        if image.dtype not in _TENSOR_TYPES:  # NumPy has no bfloat16
            raise _of_wrong_type(name, str(image.dtype).removeprefix("torch."))
        pixels = image.detach().cpu().movedim(0, -1).numpy() if image.ndim == 3 else np.empty(0)
    elif isinstance(image, np.ndarray):
        pixels = image
    else:
        raise UsageError(
            f"{name} is of type {type(image).__name__}; expected a file, an image of Pillow, an array "
            "[height, width, channels] or a tensor [channels, height, width]"
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.ndim != 3 or min(pixels.shape) < 1:
        found = tuple(getattr(image, "shape", ()))
        raise UsageError(
            f"{name} has the shape {found}; expected [height, width, channels] of an array, "
            "[channels, height, width] of a tensor"
        )
    if pixels.dtype not in _TYPES:
        raise _of_wrong_type(name, str(pixels.dtype))
    return name, pixels


def _of_wrong_type(name: str, found: str) -> UsageError:
    return UsageError(f"{name} is of type {found}; expected pixel values as in the files: uint8, uint16 or float32")


def read_file(path: Path) -> bytes:
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


def whole(image: InputImage) -> UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]:
    """All of an image; values of 16 bits in [0, 1]."""
    pixels = image.pixels.astype(np.float32) / np.float32(65535) if image.pixels.dtype == np.uint16 else image.pixels
    return torch.from_numpy(np.require(pixels, requirements=("C", "W"))).permute(2, 0, 1)


def scaled(crop: UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]) -> Float32[Tensor, "C H W"]:
    """Values of 8 bits in [0, 1]; others as they are."""
    return crop.float() / 255 if crop.dtype == torch.uint8 else crop.float()


def seen_crop(
    pixels: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"], wanted: Preprocessing
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """The central crop of an image that a model sees, values as they are."""
    return central_crop(pixels, wanted.img_size, wanted.crop_share, interpolation=wanted.interpolation)


def crop_image(image: InputImage, wanted: Preprocessing) -> Float[Tensor, "C H W"]:
    """The central crop; whole numbers scaled to [0, 1], others as they are.

    Raises:
        UsageError: values that are not finite.
    """
    return finite(scaled(seen_crop(whole(image), wanted)), image, wanted)


def finite(
    values: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"], image: InputImage, wanted: Preprocessing
) -> UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]:
    """The same values of an image, or a part of it.

    Raises:
        UsageError: some are not finite, and the model's images have no holes.
    """
    if wanted.nodata is None and not bool(values.isfinite().all()):
        raise UsageError(f"{image.name} holds values that are not finite; only what a hole hides may be so")
    return values


def statistics_of(wanted: Preprocessing) -> tuple[Float[Tensor, "C 1 1"], Float[Tensor, "C 1 1"]]:
    """Mean and std of each channel, as images are normalised by them."""
    return torch.tensor(wanted.mean)[:, None, None], torch.tensor(wanted.std)[:, None, None]
