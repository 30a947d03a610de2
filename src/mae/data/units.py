"""Whether pixel values are in the unit a model expects: a wrong one gives the same features for every image.

Types tell how values convert (`forms.divisor`), but not everything: floats may lie in [0, 1] or be raw counts, and
files of 16 bits may hold 12. So the values themselves are looked at.
"""

from collections.abc import Collection, Sequence

import numpy as np

from mae.data.images import ImageSet
from mae.data.moments import Moments
from mae.errors import UsageError
from mae.records import PixelDtype

_LOOKED_AT = 32
"""Images; a wrong unit is off by far more than their number leaves open."""

_LOUD, _QUIET = 10.0, 0.1
"""Values this many of the model's deviations from its mean, or spread by this share of one, are worth a warning."""

_CONVERTED = (10.0, 1 / 50)
"""The same for a refusal where the files' type is not the model's; dark images of the right unit stay above 1/50."""

_SAME_FLOATS = (1000.0, 1 / 1000)
"""Where both are floats: honest images may lie far off, as mountains beside plains, and have no other type to take."""

_UNKNOWN = (10.0, 1 / 1000)
"""Where the model does not say: its mean and deviation are then those of values in [0, 1]."""


def check_units(
    images: ImageSet, *, mean: Sequence[float], std: Sequence[float], pixel_dtype: PixelDtype | None
) -> str | None:
    """Compare some images with what a model expects.

    Args:
        images: opened for the model.
        mean: of each channel, as the model subtracts it.
        std: of each channel, as the model divides by it.
        pixel_dtype: the model's.

    Returns:
        What is unusual about the values and yet may be right; None: nothing.

    Raises:
        UsageError: they are in another unit.
    """
    if not _says_something(mean, std, pixel_dtype, images.found_dtypes):
        return None
    moments = images.moments(_LOOKED_AT)
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
    """The same of images whose moments are known, in the model's unit; `found` are the types of their files."""
    count, own_mean, squares = moments
    known = count > 0
    if not known.any() or not _says_something(mean, std, pixel_dtype, found):
        return None
    deviation = np.sqrt(squares / np.maximum(count, 1))
    deviation[deviation <= 1e-12 * np.abs(own_mean)] = 0  # of one value, but for rounding
    off, spread = np.abs(own_mean - mean) / std, deviation / std
    furthest = np.maximum(off, spread)
    loud, quiet = float(np.median(furthest[known])), float(spread[known].max())
    most, least = _bounds(pixel_dtype, found)
    # Images of one value are plain, whatever their unit.
    is_wrong = loud > most or 0 < quiet < least
    if not is_wrong and loud <= _LOUD and not 0 < quiet < _QUIET:
        return None
    shown = int(np.argmax(np.where(known, furthest, -1)))
    types = " and ".join(sorted(map(str, found)))
    told = (
        f"{name}: the values ({types}) have mean {own_mean[shown]:.4g} and deviation {deviation[shown]:.4g} in channel "
        f"{shown}, the model expects {mean[shown]:.4g} and {std[shown]:.4g}{_unit(pixel_dtype)}"
    )
    if not is_wrong:
        return f"{told}; features of such images mean little unless they really are like this"
    raise UsageError(f"{told}: they are on another scale; {_advice(pixel_dtype)}")


def _says_something(
    mean: Sequence[float], std: Sequence[float], pixel_dtype: PixelDtype | None, found: Collection[np.dtype]
) -> bool:
    """Whether the values can be in a wrong unit, and the statistics tell."""
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
    return f"save them as {pixel_dtype} with the numbers that the training images would have"
