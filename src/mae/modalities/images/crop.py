"""What is done to a training image, drawn from its sample's key, and the central crop for evaluation."""

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from mae.errors import UsageError
from mae.randomness import Stream, drawing_from, uniform

if TYPE_CHECKING:  # torchvision takes longer to import than everything else here, and few crops need it
    from torchvision.transforms.v2 import RandAugment

_OPERATIONS, _OPERATION_PROBABILITY = 2, 0.5
_LEVELS = 100  # the strongest of RandAugment's levels
_LEVEL_MEAN, _LEVEL_SPREAD = 90, 5  # magnitude 9 and its std 0.5 on timm's scale of ten
_GREY = 128
_COLOURS = ("brightness", "contrast", "saturation", "hue")
_COLOUR_REACH = (0.8, 0.8, 0.8, 0.2)
_JITTERED = 0.8  # of the crops
LARGEST_JITTER = 0.5 / _COLOUR_REACH[-1]
"""Hue is a circle, which a half of it on either side covers."""


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """How a training image is cropped and changed; the default is pre-training's (He et al. 2021, appendix A.1).

    Every image is also mirrored by a fair coin.

    Attributes:
        scale: bounds of the crop's area as a share of the image's, in (0, 1].
        ratio: bounds of the crop's width / height.
        draws: how often an area and a ratio are drawn until the crop fits the image; if none fits, the largest
            central crop with a ratio inside the bounds is taken. With 1 they are drawn once and the sides limited to
            the image's: the official linear probe's crop.
        rand_augment: also change colours and geometry, see `rand_augment`; for uint8 images of 1 or 3 channels.
        color_jitter: how strongly to change colours, see `colour_changes`; for uint8 images in red, green and blue.
        grayscale: share of the crops that are made grey, in [0, 1]; likewise.
        reduced_decoding: decode JPEGs at 1/2, 1/4 or 1/8 of their size where crops are smaller than their boxes by as
            much, see `reduction`; for uint8 images of 1 or 3 channels.
    """

    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    draws: int = 10
    rand_augment: bool = False
    color_jitter: float = 0.0
    grayscale: float = 0.0
    reduced_decoding: bool = False

    @property
    def changes_colours(self) -> bool:
        """Whether it needs colours."""
        return self.color_jitter > 0 or self.grayscale > 0

    def __post_init__(self) -> None:
        """Refuses bounds that hold no crop.

        Raises:
            UsageError: an area outside (0, 1], a ratio that is not positive, bounds in the wrong order, no draw, a
                strength or share of colour changes out of range.
        """
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(f"scale is {self.scale}; expected two shares of the image's area, 0 < low <= high <= 1")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"ratio is {self.ratio}; expected two values of width / height, 0 < low <= high")
        if self.draws < 1:
            raise UsageError(f"draws is {self.draws}; expected 1 or more")
        if not 0 <= self.color_jitter <= LARGEST_JITTER:
            raise UsageError(f"color_jitter is {self.color_jitter}; expected 0 to {LARGEST_JITTER}")
        if not 0 <= self.grayscale <= 1:
            raise UsageError(f"grayscale is {self.grayscale}; expected a share of the crops, 0 to 1")


def random_crop_boxes(
    keys: Int64[Tensor, " B"],
    heights: Int64[Tensor, " B"],
    widths: Int64[Tensor, " B"],
    how: Augmentation,
) -> tuple[Int64[Tensor, "B 4"], Bool[Tensor, " B"]]:
    """Boxes and flips with the distribution of torchvision's `RandomResizedCrop` and a fair coin.

    Areas are drawn uniformly and aspect ratios uniformly in their logarithm.

    Args:
        keys: the samples' keys; a box depends on its key and its image's size alone.
        heights: the images' heights in pixels.
        widths: the images' widths in pixels.
        how: bounds and number of draws.

    Returns:
        Boxes (top, left, height, width) in pixels, and whether to flip from left to right.
    """
    # float64, so that no size of image is rounded differently from torchvision's Python floats
    numbers = uniform(keys, 2 * how.draws + 3, Stream.CROP).double()
    area_at, ratio_at, rest = torch.split(numbers, [how.draws, how.draws, 3], dim=1)
    areas = (heights * widths).unsqueeze(1)
    tall, wide = box_sides(area_at, ratio_at, areas, scale=how.scale, ratio=how.ratio)
    if how.draws == 1:
        height = torch.minimum(tall.squeeze(1).clamp(min=1), heights)
        width = torch.minimum(wide.squeeze(1).clamp(min=1), widths)
        centred = torch.zeros_like(keys, dtype=torch.bool)
    else:
        fits = (tall > 0) & (tall <= heights.unsqueeze(1)) & (wide > 0) & (wide <= widths.unsqueeze(1))
        first, centred = fits.long().argmax(dim=1, keepdim=True), ~fits.any(dim=1)
        central_height, central_width = _largest_box(heights, widths, how.ratio)
        height = torch.where(centred, central_height, tall.gather(1, first).squeeze(1))
        width = torch.where(centred, central_width, wide.gather(1, first).squeeze(1))
    spare_height, spare_width = heights - height, widths - width
    top = torch.where(centred, spare_height // 2, (rest[:, 0] * (spare_height + 1)).long())
    left = torch.where(centred, spare_width // 2, (rest[:, 1] * (spare_width + 1)).long())
    return torch.stack([top, left, height, width], dim=1), rest[:, 2] < 0.5


def box_sides(
    area_at: Float64[Tensor, "B n"],
    ratio_at: Float64[Tensor, "B n"],
    areas: Int64[Tensor, "B 1"],
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Int64[Tensor, "B n"], Int64[Tensor, "B n"]]:
    """Heights and widths of boxes whose area and width / height lie inside bounds.

    Args:
        area_at: where between its bounds each area lies, in [0, 1).
        ratio_at: where between its bounds the logarithm of each ratio lies, in [0, 1).
        areas: the images' areas in pixels.
        scale: bounds of the box's area as a share of the image's.
        ratio: bounds of width / height.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    area = areas * (scale[0] + (scale[1] - scale[0]) * area_at)
    aspect = torch.exp(low + (high - low) * ratio_at)
    return (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()


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
    *,
    reduction: int = 1,
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """A box of an image, resized by antialiased bicubic interpolation and perhaps flipped.

    uint8 stays uint8, limited to 0..255; float32 may overshoot its range a little at sharp edges.

    Args:
        image: pixels in any scale.
        box: top, left, height and width in pixels of the whole image, inside it.
        flip: whether to mirror left and right.
        size: height and width of the result.
        reduction: how many times smaller the image was decoded; if it was, it is uint8 of 1 or 3 channels.
    """
    top, left, height, width = box
    if reduction == 1:
        crop = resize(image[:, top : top + height, left : left + width], size)
    else:
        crop = _resized_between_pixels(image, [each / reduction for each in box], size)
    return torch.flip(crop, (-1,)) if flip else crop


def _resized_between_pixels(
    image: UInt8[Tensor, "C h w"], box: list[float], size: tuple[int, int]
) -> UInt8[Tensor, "C H W"]:
    """A box whose edges may lie between two pixels, as Pillow resizes it."""
    top, left, height, width = box
    upper, near = int(top), int(left)
    # Cut out first: what lies further outside must not mix in, as it does not in crops of whole images.
    around = image[:, upper : math.ceil(top + height), near : math.ceil(left + width)]
    inside = left - near, top - upper, left - near + width, top - upper + height
    pixels = Image.fromarray(around.permute(1, 2, 0).squeeze(2).numpy())
    resized = pixels.resize(size[::-1], Image.Resampling.BICUBIC, inside)
    return torch.from_numpy(np.array(resized)).reshape(*size, len(image)).permute(2, 0, 1)


def reduction(
    keys: Int64[Tensor, " n"], height: int, width: int, how: Augmentation, size: tuple[int, int]
) -> Literal[1, 2, 4, 8]:
    """How many times smaller an image may be decoded for its crops.

    The most at which the box of each crop still has as many pixels on each side as the crop, or more.

    Args:
        keys: of the crops.
        height: the whole image's.
        width: the whole image's.
        how: bounds of the boxes.
        size: height and width of the crops.
    """
    times = min(height // size[0], width // size[1])
    if times > 1:  # else no box can be large enough, and drawing them takes time
        heights, widths = torch.full_like(keys, height), torch.full_like(keys, width)
        boxes, _ = random_crop_boxes(keys, heights, widths, how)
        times = int((boxes[:, 2:] // torch.tensor(size)).min())
    return 8 if times >= 8 else 4 if times >= 4 else 2 if times >= 2 else 1


def resize(
    image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"],
    size: tuple[int, int],
    *,
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """An image of another size, antialiased; what `torchvision.transforms.v2.functional.resize` gives.

    uint8 stays uint8, limited to 0..255; float32 may overshoot its range a little at sharp edges.

    Args:
        image: pixels in any scale.
        size: height and width of the result.
        interpolation: how values between pixels are found.
    """
    if image.shape[-2:] == size:
        return image
    return interpolate(image.unsqueeze(0), size, mode=interpolation, align_corners=False, antialias=True).squeeze(0)


def colour_changes(keys: Int64[Tensor, " B"], how: Augmentation) -> list[list[tuple[str, float]]]:
    """What is done to the colours of each crop, in order: SimCLR's distortion (Chen et al. 2020, appendix A).

    With a probability of 0.8 brightness, contrast and saturation are multiplied by factors from 1 - 0.8 s to 1 + 0.8 s,
    none below 0, and hue is turned by -0.2 s to 0.2 s of its circle, all drawn uniformly, in a random order; s is
    `how.color_jitter`. Then a share of the crops, `how.grayscale`, is made grey: saturation 0.

    Args:
        keys: the crops' keys; the changes depend on them alone.
        how: how strongly, and how many crops are made grey.

    Returns:
        For each crop the names of what is adjusted, and by which factors.
    """
    numbers = uniform(keys, 2 + 2 * len(_COLOURS), Stream.COLOUR)
    reach = how.color_jitter * torch.tensor(_COLOUR_REACH)
    middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
    low, high = middle - reach, middle + reach
    low[:-1].clamp_(min=0)
    jittered, greyed = (numbers[:, 0] < _JITTERED) & (how.color_jitter > 0), numbers[:, 1] < how.grayscale
    at, order = numbers[:, 2:].chunk(2, dim=1)
    factors = (low + (high - low) * at).tolist()
    return [
        [(_COLOURS[each], factors[row][each]) for each in places if jitter] + [("saturation", 0.0)] * grey
        for row, (places, jitter, grey) in enumerate(
            zip(order.argsort(dim=1).tolist(), jittered.tolist(), greyed.tolist(), strict=True)
        )
    ]


def change_colours(image: UInt8[Tensor, "C H W"], changes: list[tuple[str, float]]) -> UInt8[Tensor, "C H W"]:
    """An image in red, green and blue with some of `colour_changes`, by torchvision."""
    from torchvision.transforms.v2 import functional as F

    for name, factor in changes:
        image = getattr(F, f"adjust_{name}")(image, factor)
    return image


def rand_augment(image: UInt8[Tensor, "C H W"], seed: int) -> UInt8[Tensor, "C H W"]:
    """Up to two random changes of colour or geometry (RandAugment, Cubuk et al. 2020), as near to timm as can be.

    Stands for timm's `rand-m9-mstd0.5-inc1`, which MAE is fine-tuned with: two operations, each applied by a fair
    coin at a strength of 0.9 of its range, with a std of 0.05, by Pillow with bicubic interpolation.
    The operations are torchvision's. So there is an identity among them and neither `invert` nor `solarize-add`,
    `posterize` keeps 4 bits at strength 0.9 rather than 1, and what is moved in from outside is grey rather than
    ImageNet's mean colour.

    Args:
        image: of 1 or 3 channels.
        seed: what is drawn depends on it, and on the versions of PyTorch and torchvision.
    """
    from torchvision.transforms.v2 import functional as F

    # Pillow, because torchvision turns and shears tensors by bilinear interpolation at best.
    changed = F.to_pil_image(image)
    with drawing_from(seed):
        for _ in range(_OPERATIONS):
            if torch.rand(()) < _OPERATION_PROBABILITY:
                level = round(_LEVEL_MEAN + _LEVEL_SPREAD * torch.randn(()).item())
                changed = _operation(min(max(level, 0), _LEVELS))(changed)
    result: Tensor = F.pil_to_tensor(changed)
    return result


@cache
def _operation(level: int) -> "RandAugment":
    from torchvision.transforms.v2 import InterpolationMode, RandAugment

    bicubic = InterpolationMode.BICUBIC
    return RandAugment(1, magnitude=level, num_magnitude_bins=_LEVELS + 1, interpolation=bicubic, fill=_GREY)


def central_crop(
    image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"],
    size: tuple[int, int],
    share: float | None = 0.875,
    *,
    interpolation: Literal["bicubic", "bilinear"] = "bicubic",
) -> UInt8[Tensor, "C H W"] | Float32[Tensor, "C H W"]:
    """The field's evaluation crop: resized so that the tighter side is `size / share`, then the centre.

    An image that already has the size is returned unchanged.

    Args:
        image: pixels in any scale.
        size: height and width of the result.
        share: 0.875 resizes to 256 for a crop of 224; 1 leaves out only what another shape must lose; None loses
            nothing: the whole image takes the size's shape.
        interpolation: how it is resized, always antialiased.
    """
    height, width = image.shape[-2:]
    if (height, width) == size:
        return image
    if share is None:
        return resize(image, size, interpolation=interpolation)
    reach = int(size[0] / share), int(size[1] / share)
    # Integer arithmetic, as torchvision's, so that a side never falls short by a rounding error.
    if reach[0] * width >= reach[1] * height:
        resized = reach[0], reach[0] * width // height
    else:
        resized = reach[1] * height // width, reach[1]
    whole = resize(image, resized, interpolation=interpolation)
    top, left = (round((found - wanted) / 2) for found, wanted in zip(resized, size, strict=True))
    return whole[:, top : top + size[0], left : left + size[1]]
