"""Telling which images show the same thing, whatever they were saved as: by the slowest waves of each."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt8
from torch import Tensor

NEAR = 0.997
"""Cosine between the outlines of two images from which they count as near copies.

Different pictures: of 1,797 handwritten digits of 8 x 8 pixels the two most alike have 0.9962, of 200 photographs of
ImageNet 0.91. Of 10,000 test images of CIFAR-10 twelve exceed 0.997 with one of the 50,000 to train on, of 2,000 of
Tiny ImageNet one does with one of 20,000: pictures that are there twice. The same picture saved anew as JPEG of quality
75 keeps 0.9997 or more (300 images of both sets); at half its size photographs keep 0.9992, Tiny ImageNet's 0.9977,
CIFAR-10's 0.989.
"""

PLAIN = 0.03
"""Contrast of an image, as a share of the mean one, up to which it shows nothing that could be copied."""

WAVES = 63
"""Numbers of an outline."""

SURE_PAIRS = 3
"""Pairs of copies in a sample from which their share of the whole set is estimated: one or two may be chance."""

_SHOWN = 3
_SIDE, _SLOWEST = 32, 8
_CHUNK = 2048
_ROUNDING = 1e-6
_LUMA = (0.299, 0.587, 0.114)
"""Of red, green and blue in the brightness of JPEG, which keeps that best; harmless where three channels are others."""
_COSINES = np.cos(np.pi * np.arange(_SLOWEST)[:, None] * (np.arange(_SIDE) + 0.5) / _SIDE) * np.sqrt(2) / _SIDE
_COSINES[0] /= np.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Images that show what another one shows.

    Attributes:
        pairs: how many pairs of images are copies of each other.
        extra: how many images could be left out.
        share: the share of the whole set, 0 to 1, that could be left out. Where a sample was looked at and it holds
            at least `SURE_PAIRS`, it is estimated: a copy is seldom drawn together with its original, so there are
            more than the sample shows.
        groups: the names of the first few images of the first few groups.
    """

    pairs: int
    extra: int
    share: float
    groups: tuple[tuple[str, ...], ...]


def outline(image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]) -> Float32[np.ndarray, " waves"]:
    """63 numbers whose direction stays when an image is saved anew, resized, or changed in brightness or contrast.

    The grey image (luma, or the mean of other than three channels), averaged to 32 x 32 pixels, is written as a sum of
    cosines (the discrete cosine transform), of which the 8 x 8 slowest count but for the mean.

    Args:
        image: pixels in any scale; NaN stands for no measurement.

    Returns:
        The waves. Their length is the std of the image that they make up, in the pixels' units.
    """
    scale = 1.0
    if image.is_floating_point():  # values near the type's limits would overflow on the way
        scale = float(image.nan_to_num(nan=0.0).abs().amax().clamp(min=torch.finfo(torch.float32).tiny))
        image = image / scale
        if (gaps := image.isnan()).any():
            image = torch.where(gaps, image.nanmean(dim=(1, 2), keepdim=True).nan_to_num(nan=0.0), image)
    weights = torch.tensor(_LUMA) if len(image) == len(_LUMA) else torch.full((len(image),), 1 / len(image))
    grey = torch.einsum("c,chw->hw", weights, image.float()).double()
    # PyTorch's product, not NumPy's: callers limit its threads, and two images at once wait for each other in NumPy's.
    waves = (_slowest(grey.shape[0]) @ grey @ _slowest(grey.shape[1]).T).flatten()[1:].numpy()
    # What is left of a constant image has no direction.
    lowest, highest = grey.aminmax()
    waves[np.abs(waves) < _ROUNDING * max(float(highest), -float(lowest))] = 0
    return (waves * scale).astype(np.float32)


@lru_cache(maxsize=64)
def _slowest(length: int) -> Float64[Tensor, "waves length"]:
    """From a line of pixels to its slowest waves: averaged to 32 by triangles (bilinear, antialiased), then cosines."""
    scale = length / _SIDE
    centres = (np.arange(_SIDE)[:, None] + 0.5) * scale
    weights = np.maximum(0, 1 - np.abs(np.arange(length) + 0.5 - centres) / max(scale, 1))
    return torch.from_numpy(_COSINES @ (weights / weights.sum(axis=1, keepdims=True)))


def near_copies(
    outlines: Float32[np.ndarray, "n waves"], others: Float32[np.ndarray, "m waves"]
) -> Int64[np.ndarray, " m"]:
    """For each of `others` the position of the image it is nearest to, where it is a near copy of that; else -1.

    Plain images are copies of none. All pairs are compared, in chunks: a million images with 50,000 cost 6e12
    multiplications, minutes of a few cores where reading the images takes hours.
    """
    plain = PLAIN * float(np.mean(np.concatenate([_contrast(outlines), _contrast(others)]))) if len(others) else 0.0
    found = np.full(len(others), -1)
    for start in range(0, len(others), _CHUNK):
        asked = torch.from_numpy(_directions(others[start : start + _CHUNK], plain))
        best, nearest = torch.full((len(asked),), NEAR), torch.full((len(asked),), -1)
        for first in range(0, len(outlines), _CHUNK):
            bank = torch.from_numpy(_directions(outlines[first : first + _CHUNK], plain))
            cosines = asked @ bank.T
            if len(nearer := (cosines.amax(dim=1) > best).nonzero().flatten()):  # seldom, and the places take long
                best[nearer], place = cosines[nearer].max(dim=1)
                nearest[nearer] = place + first
        found[start : start + len(asked)] = nearest.numpy()
    return found


def _contrast(outlines: Float32[np.ndarray, "n waves"]) -> Float64[np.ndarray, " n"]:
    return np.linalg.norm(outlines.astype(np.float64), axis=1)


def _directions(outlines: Float32[np.ndarray, "n waves"], plain: float) -> Float32[np.ndarray, "n waves"]:
    """Of length 1; of plain images 0, so that they are near none."""
    contrast = _contrast(outlines)[:, None]
    shows = contrast > plain
    return np.where(shows, outlines / np.where(shows, contrast, 1.0), 0.0).astype(np.float32)


def same(codes: Sequence[int]) -> list[list[int]]:
    """Positions of equal codes, a list for each code, in order of their first."""
    places = defaultdict(list)
    for place, code in enumerate(codes):
        places[code].append(place)
    return list(places.values())


def near(outlines: Float32[np.ndarray, "n waves"]) -> tuple[int, list[list[int]]]:
    """Number of pairs of near copies among some images, and the positions that such pairs join, group by group."""
    directions, pairs, group = _directions(outlines, 0.0), 0, np.arange(len(outlines))
    for place, direction in enumerate(directions):
        others = place + 1 + np.flatnonzero(directions[place + 1 :] @ direction > NEAR)
        pairs += len(others)
        for joined in np.unique(group[others]):
            group[group == joined] = group[place]
    return pairs, same(group.tolist())


def copies(
    groups: Sequence[Sequence[int]], *, pairs: int, looked_at: int, total: int, name: Callable[[int], str]
) -> Copies:
    """What groups of images amount to.

    Args:
        groups: positions in the sample; a group of one is no copy.
        pairs: how many pairs of copies are among them.
        looked_at: images in the sample.
        total: images in the set.
        name: an image's name by its position in the sample.
    """
    several = [group for group in groups if len(group) > 1]
    extra = sum(len(group) - 1 for group in several)
    share = extra / max(looked_at, 1)
    if pairs >= SURE_PAIRS:
        # A pair of the set is in the sample by the chance of drawing both.
        share = max(share, min(pairs / looked_at * (total - 1) / (looked_at - 1), 1.0) if looked_at < total else 0.0)
    shown = tuple(tuple(name(place) for place in group[:_SHOWN]) for group in several[:_SHOWN])
    return Copies(pairs=pairs, extra=extra, share=share, groups=shown)
