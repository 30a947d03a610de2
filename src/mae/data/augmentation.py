"""Crops: random ones for training, drawn from a sample's key, and the central one for evaluation."""

import math

import torch
from jaxtyping import Bool, Float32, Int64, UInt8
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from mae.randomness import Stream, uniform

_ATTEMPTS = 10
_CROP_RATIO = 0.875
"""The field's evaluation rule: an image is resized to 256 for a crop of 224."""


def random_crop_boxes(
    keys: Int64[Tensor, " B"],
    heights: Int64[Tensor, " B"],
    widths: Int64[Tensor, " B"],
    *,
    scale: tuple[float, float] = (0.2, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[Int64[Tensor, "B 4"], Bool[Tensor, " B"]]:
    """Boxes and flips with the distribution of torchvision's `RandomResizedCrop` and a fair coin.

    Ten times an area (uniform) and an aspect ratio (uniform in its logarithm) are drawn, and the first pair that
    fits the image is used; if none fits, the largest central box with a ratio inside the bounds is.

    Args:
        keys: the samples' keys; a box depends on its key and its image's size alone.
        heights: the images' heights in pixels.
        widths: the images' widths in pixels.
        scale: bounds of the box's area as a share of the image's.
        ratio: bounds of width / height.

    Returns:
        Boxes (top, left, height, width) in pixels, and whether to flip from left to right.
    """
    # float64, so that no size of image is rounded differently from torchvision's Python floats
    numbers = uniform(keys, 2 * _ATTEMPTS + 3, Stream.CROP).double()
    area_at, ratio_at, rest = torch.split(numbers, [_ATTEMPTS, _ATTEMPTS, 3], dim=1)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = (heights * widths).unsqueeze(1) * (scale[0] + (scale[1] - scale[0]) * area_at)
    aspect = torch.exp(low + (high - low) * ratio_at)
    tall, wide = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (tall > 0) & (tall <= heights.unsqueeze(1)) & (wide > 0) & (wide <= widths.unsqueeze(1))
    first = fits.long().argmax(dim=1, keepdim=True)
    central_height, central_width = _largest_box(heights, widths, ratio)
    found = fits.any(dim=1)
    height = torch.where(found, tall.gather(1, first).squeeze(1), central_height)
    width = torch.where(found, wide.gather(1, first).squeeze(1), central_width)
    spare_height, spare_width = heights - height, widths - width
    top = torch.where(found, (rest[:, 0] * (spare_height + 1)).long(), spare_height // 2)
    left = torch.where(found, (rest[:, 1] * (spare_width + 1)).long(), spare_width // 2)
    return torch.stack([top, left, height, width], dim=1), rest[:, 2] < 0.5


def _largest_box(
    heights: Int64[Tensor, " B"], widths: Int64[Tensor, " B"], ratio: tuple[float, float]
) -> tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]:
    """Height and width of the largest box whose width / height lies inside the bounds, at least one pixel."""
    height = torch.minimum(heights, (widths.double() / ratio[0]).round().long()).clamp(min=1)
    width = torch.minimum(widths, (heights.double() * ratio[1]).round().long()).clamp(min=1)
    return height, width


def resized_crop(
    image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"],
    box: tuple[int, int, int, int],
    flip: bool,
    size: tuple[int, int],
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """A box of an image, resized by antialiased bicubic interpolation and perhaps flipped.

    uint8 stays uint8, limited to 0..255; float32 may overshoot its range a little at sharp edges.

    Args:
        image: pixels in any scale.
        box: top, left, height and width in pixels, inside the image.
        flip: whether to mirror left and right.
        size: height and width of the result.
    """
    crop: Tensor = F.resized_crop(image, *box, list(size), interpolation=InterpolationMode.BICUBIC, antialias=True)
    return torch.flip(crop, (-1,)) if flip else crop


def central_crop(
    image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"], size: tuple[int, int]
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """The field's evaluation crop: resized so that the tighter side is `size / 0.875`, then the centre.

    An image that already has the size is returned unchanged.
    """
    height, width = image.shape[-2:]
    if (height, width) == size:
        return image
    reach = int(size[0] / _CROP_RATIO), int(size[1] / _CROP_RATIO)
    # Integer arithmetic, as torchvision's, so that a side never falls short by a rounding error.
    if reach[0] * width >= reach[1] * height:
        resized = [reach[0], reach[0] * width // height]
    else:
        resized = [reach[1] * height // width, reach[1]]
    whole: Tensor = F.resize(image, resized, interpolation=InterpolationMode.BICUBIC, antialias=True)
    crop: Tensor = F.center_crop(whole, list(size))
    return crop
