"""Checks that pixel values are in the unit a model expects: a wrong one gives the same features for every image.

Types say how values convert (`channels.divisor`), but not everything: floats may be in [0, 1] or raw counts, and 16-bit
files may hold 12 bits. So the values themselves are checked.
"""

from collections.abc import Collection, Sequence

import numpy as np

from mae.data.dataset.channel_stats import Moments
from mae.data.dataset.images import ImageSet
from mae.errors import UsageError
from mae.records import PixelDtype

_CHECKED = 32
"""Images; a wrong unit is off by far more than the sampling error of so many."""

_LOUD, _QUIET = 10.0, 0.1
"""A mean this many stds of the model from its mean, or a std this fraction of the model's, gives a warning."""

_CONVERTED = (10.0, 1 / 50)
"""The same for a refusal where the files' type is not the model's; dark images of the right unit stay above 1/50."""

_SAME_FLOATS = (1000.0, 1 / 1000)
"""Where both are floats: correct images may be far off, as mountains are from plains, and have no other type."""

_UNKNOWN = (10.0, 1 / 1000)
"""Where the model does not say: its mean and std are then those of values in [0, 1]."""


def check_units(
    images: ImageSet, *, mean: Sequence[float], std: Sequence[float], pixel_dtype: PixelDtype | None
) -> str | None:
    """Compares some images with what a model expects.

    Args:
        images: opened for the model.
        mean: of each channel, as the model subtracts it.
        std: of each channel, as the model divides by it.
        pixel_dtype: the model's.

    Returns:
        What is unusual about the values but may be right; None: nothing.

    Raises:
        UsageError: they are in another unit.
    """
    if not _can_tell(mean, std, pixel_dtype, images.found_dtypes):
        return None
    moments = images.moments(_CHECKED)
    return check_moments(
        moments, name=images.name, mean=mean, std=std, pixel_dtype=pixel_dtype, found=images.found_dtypes
    )


def check_moments(
    moments: Moments,
    *,
    name: str,
    mean: Sequence[float],
    std: Sequence[float],
    pixel_dtype: PixelDtype | None,
    found: Collection[np.dtype],
) -> str | None:
    """`check_units` for known moments, in the model's unit; `found` are the types of the files."""
    count, own_mean, squares = moments
    known = count > 0
    if not known.any() or not _can_tell(mean, std, pixel_dtype, found):
        return None
    own_std = np.sqrt(squares / np.maximum(count, 1))
    own_std[own_std <= 1e-12 * np.abs(own_mean)] = 0  # constant, but for rounding
    off, spread = np.abs(own_mean - mean) / std, own_std / std
    furthest = np.maximum(off, spread)
    loud, quiet = float(np.median(furthest[known])), float(spread[known].max())
    most, least = _bounds(pixel_dtype, found)
    # Constant images say nothing about their unit.
    is_wrong = loud > most or 0 < quiet < least
    if not is_wrong and loud <= _LOUD and not 0 < quiet < _QUIET:
        return None
    shown = int(np.argmax(np.where(known, furthest, -1)))
    types = " and ".join(sorted(map(str, found)))
    description = (
        f"{name}: the values ({types}) have mean {own_mean[shown]:.4g} and std {own_std[shown]:.4g} in channel "
        f"{shown}, the model expects {mean[shown]:.4g} and {std[shown]:.4g}{_unit(pixel_dtype)}"
    )
    if not is_wrong:
        return f"{description}; features of such images mean little unless they really are like this"
    raise UsageError(f"{description}: they are on another scale; {_advice(pixel_dtype)}")


def _can_tell(
    mean: Sequence[float], std: Sequence[float], pixel_dtype: PixelDtype | None, found: Collection[np.dtype]
) -> bool:
    """Whether the values can be in a wrong unit, and the statistics can tell."""
    same_integers = pixel_dtype in ("uint8", "uint16") and all(dtype == pixel_dtype for dtype in found)
    normalises = any(mean) or any(value != 1 for value in std)
    return normalises and not same_integers


def _bounds(pixel_dtype: PixelDtype | None, found: Collection[np.dtype]) -> tuple[float, float]:
    if pixel_dtype is None:
        return _UNKNOWN
    return _SAME_FLOATS if all(dtype == pixel_dtype for dtype in found) else _CONVERTED


def _unit(pixel_dtype: PixelDtype | None) -> str:
    if pixel_dtype is None:
        return " (integers scaled to [0, 1], floats as they are)"
    return {
        "uint8": " (of uint8 files, scaled to [0, 1])",
        "uint16": " (of uint16 files, scaled to [0, 1])",
        "float32": " (of raw float values)",
    }[pixel_dtype]


def _advice(pixel_dtype: PixelDtype | None) -> str:
    if pixel_dtype is None:
        return "save them as integers of 8 or 16 bits that use the range of their type, or as floats from 0 to 1"
    return f"save them as {pixel_dtype} with the same numbers as the training images"
