"""What one image holds, as it lies in its file and as a training step gets it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from mae.data.dataset.channel_stats import Moments, levels_of, moments_of, moments_of_levels
from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.data.inspect.near_duplicates import outline
from mae.data.items import pixel_digest


class End(NamedTuple):
    """The smallest value of an image (or the largest, both negated), the next one, and the fraction of the former."""

    value: float
    following: float
    share: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Contents:
    """What an image holds; arrays have a number a channel."""

    digest: int
    outline: np.ndarray
    missing: float
    smallest: np.ndarray
    largest: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ends: tuple[End, End] | None
    whole: Moments
    crop: Moments


@dataclass(frozen=True, kw_only=True, eq=False)
class Look:
    """One image; one with a `problem` cannot be read and has no `contents`."""

    number: int
    info: ImageInfo | None = None
    size: tuple[int, int] = (0, 0)
    problem: str = ""
    contents: Contents | None = None


def look_at(images: ImageSet, number: int, crop: Callable[[], Tensor]) -> Look:
    """Reads an image, and makes a crop of it.

    Args:
        images: the set.
        number: the image's.
        crop: gives its crop, normalised, `[C, H, W]`.
    """
    try:
        image = images.get(number)
        size, info = (image.shape[1], image.shape[2]), _info(images, number)
        return Look(number=number, info=info, size=size, contents=_contents(images, image, crop()))
    except UnreadableImage as error:
        return Look(number=number, problem=str(error))


def _info(images: ImageSet, number: int) -> ImageInfo | None:
    try:
        return images.probe(number)
    except UnreadableImage:
        return None  # decoded when the set was opened, and gone from the disk since


def _contents(
    images: ImageSet, image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"], crop: Float32[Tensor, "C H W"]
) -> Contents:
    image = image.contiguous()  # once: a decoder gives channels last, and each pass below is faster like this
    digest = int.from_bytes(pixel_digest([image.numpy()]), "little")
    missing = 0.0
    if image.dtype == torch.uint8:
        whole, ends = _of_levels(levels_of(image))
    else:
        whole = moments_of(image)
        if images.nodata is not None:
            gaps = image.isnan()
            missing = float(gaps.double().mean())
            image = torch.where(gaps, torch.from_numpy(whole[1]).to(image)[:, None, None], image)
        ends = _ends(image, bounded=images.is_integer)
    smallest, largest, low, high = ends
    return Contents(
        digest=digest,
        outline=outline(image),
        missing=missing,
        smallest=smallest,
        largest=largest,
        low=low,
        high=high,
        ends=None if images.is_integer else (_end(image), _end(-image)),
        whole=whole,
        crop=_moments(crop),
    )


def _of_levels(counts: Int64[np.ndarray, "C 256"]) -> tuple[Moments, tuple[np.ndarray, ...]]:
    """See `_ends`, of bytes."""
    found, pixels = counts > 0, counts.sum(axis=1)
    smallest, largest = found.argmax(axis=1), 255 - found[:, ::-1].argmax(axis=1)
    low, high = counts[:, 0] / pixels, counts[:, 255] / pixels
    return moments_of_levels(counts), (smallest / 255, largest / 255, low, high)


def _ends(image: Float32[Tensor, "C h w"], *, bounded: bool) -> tuple[np.ndarray, ...]:
    """Each channel's smallest and largest value, and how large a share of its values the type's own are."""
    smallest, largest = image.amin(dim=(1, 2)).numpy(), image.amax(dim=(1, 2)).numpy()
    pixels = image.shape[1] * image.shape[2]
    low, high = (bounded * (image == end).sum(dim=(1, 2)).numpy() / pixels for end in (0, 1))
    return smallest, largest, low, high


def _moments(crop: Float32[Tensor, "C H W"]) -> Moments:
    with np.errstate(invalid="ignore"):  # a crop of values near the type's limits may hold infinite ones
        return moments_of(crop)


def _end(image: Float32[Tensor, "C h w"]) -> End:
    value = image.min()
    others = image[image > value]
    following = float(others.min()) if len(others) else inf
    return End(float(value), following, 1 - len(others) / image.numel())
