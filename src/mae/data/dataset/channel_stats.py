"""Mean and variance of an image's channels, in little memory beside the image."""

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

_VALUES = 1 << 20
"""Numbers processed at a time: in 64 bits a whole image of 64 million pixels would take gigabytes."""

Moments = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Number of values that are not NaN, their mean and sum of squared differences from it, of each channel `[C]`."""


def no_moments(channels: int) -> Moments:
    """The moments of no pixels."""
    return np.zeros(channels, dtype=np.int64), np.zeros(channels), np.zeros(channels)


def moments_of(image: UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]) -> Moments:
    """The moments of an image's channels; uint8 counts as [0, 1], and its sums are exact. NaN is skipped."""
    if image.dtype == torch.uint8:
        return moments_of_levels(levels_of(image))
    pixels = image.numpy()
    channels, height, width = pixels.shape
    rows = max(1, _VALUES // max(width * channels, 1))
    blocks = [pixels[:, start : start + rows] for start in range(0, height, rows)]
    total = no_moments(channels)
    for block in blocks:
        values = block.reshape(channels, -1).astype(np.float64)
        known = ~np.isnan(values)
        number = known.sum(axis=1)
        values[~known] = 0
        mean = values.sum(axis=1) / np.maximum(number, 1)
        values -= mean[:, None]
        values[~known] = 0
        total = join(total, (number, mean, (values**2).sum(axis=1)))
    return total


def join(first: Moments, second: Moments) -> Moments:
    """The moments of two sets of pixels together.

    By the rule of Chan et al., which combines sums of squares about the mean without cancellation.
    """
    total = first[0] + second[0]
    shift = second[1] - first[1]
    share = second[0] / np.maximum(total, 1)
    mean = first[1] + shift * share
    return total, mean, first[2] + second[2] + shift**2 * first[0] * share


def levels_of(image: UInt8[Tensor, "C h w"]) -> Int64[np.ndarray, "C 256"]:
    """How often each channel holds each value of a byte: one pass, from which moments and extremes follow exactly."""
    counts = np.zeros((len(image), 256), dtype=np.int64)
    for channel, plane in enumerate(image.contiguous().flatten(1)):
        for values in plane.split(_VALUES):  # PyTorch counts bytes as they are, three times as fast as NumPy
            counts[channel] += values.bincount(minlength=256).numpy()
    return counts


def moments_of_levels(counts: Int64[np.ndarray, "C 256"]) -> Moments:
    """The moments of channels of which it is known how often each value occurs, see `levels_of`."""
    number, levels = counts.sum(axis=1), np.arange(256)
    mean = (counts @ levels) / number
    squares = (counts * (levels - mean[:, None]) ** 2).sum(axis=1)
    return number, mean / 255, squares / 255**2
