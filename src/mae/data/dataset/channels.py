"""The format of every image of a set: the same channels by name, one type and unit, nodata marked as NaN."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mae.data.decode.image import conform
from mae.data.decode.limits import UnreadableImage
from mae.errors import UsageError
from mae.records import PixelDtype
from mae.text import listed

_FLOAT32 = np.dtype(np.float32)


def divisor(found: np.dtype, pixel_dtype: PixelDtype | None) -> float:
    """The divisor that brings pixel values of a file to the unit of a model.

    A raster holds the same numbers whether saved as integers or as floating point, so these are divided by the scale
    of the files that the model was trained on. Between 8 and 16 bits a photograph keeps its fraction of the range.

    Args:
        found: type of the values: uint8, uint16 or float32.
        pixel_dtype: of the model; see `MethodConfig`.
    """
    if pixel_dtype == "float32":
        return 1.0
    if found.kind == "u":
        return float(np.iinfo(found).max)
    return 1.0 if pixel_dtype is None else float(np.iinfo(pixel_dtype).max)


def in_unit(image: np.ndarray, pixel_dtype: PixelDtype | None) -> np.ndarray:
    """Pixel values of a file in the unit of a model, float32; see `divisor`."""
    return image.astype(_FLOAT32) / np.float32(divisor(image.dtype, pixel_dtype))


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How decoded files are converted to images of a set.

    Attributes:
        channels: of every converted image.
        dtype: of every converted image.
        picked: positions of its channels among those `named`; None: all in order.
        named: the channel names that each file must have, in order; None: any number that converts to `channels`.
        own_names: whether the names are in the files, so that each must be checked.
        missing: the value that means nodata, may be NaN; None: every value is a measurement and must be finite.
        integers: whether values are those of integer files, over the range of their type.
        pixel_dtype: of the model that the images are for, in whose unit they are given; None: they keep their own, and
            integers and raw float values do not mix.
    """

    channels: int
    dtype: np.dtype
    picked: tuple[int, ...] | None = None
    named: tuple[str, ...] | None = None
    own_names: bool = False
    missing: float | None = None
    integers: bool = False
    pixel_dtype: PixelDtype | None = None

    def of(self, image: np.ndarray, *, name: str) -> np.ndarray:
        """The image `[H, W, channels]`; NaN for nodata.

        Raises:
            UnreadableImage: other channels, integers mixed with raw float values, or values that are not finite.
        """
        if self.named is not None and image.shape[2] != len(self.named):
            expected = f"expected {listed(self.named)}"
            raise UnreadableImage(f"{name} has {image.shape[2]} channels; {expected}")
        if self.picked is not None:
            image = image[..., self.picked]
        if self.missing is not None:
            image = self._marked(image, self.missing, name)
        _check_finite(image, name, may_miss=self.missing is not None)
        if self.missing is None and self.pixel_dtype is not None and self.dtype == _FLOAT32:
            image = in_unit(image, self.pixel_dtype)
        return conform(image, channels=self.channels, dtype=self.dtype, name=name)

    def _marked(self, image: np.ndarray, missing: float, name: str) -> np.ndarray:
        if self.pixel_dtype is None and (image.dtype.kind == "u") != self.integers:
            kind = "integers" if self.integers else "raw float values"
            raise UnreadableImage(f"{name} is read as {image.dtype}, the data set as {kind}: use files of one kind")
        marked = in_unit(image, self.pixel_dtype)
        if _fits(missing, image.dtype):
            with np.errstate(over="ignore"):  # infinite, as it is in the image
                marked[image == image.dtype.type(missing)] = np.nan
        return marked


def _fits(value: float, dtype: np.dtype) -> bool:
    """Whether values of a type can equal it; NaN equals none, and is the mark itself."""
    if dtype.kind == "f":
        return not np.isnan(value)
    return value.is_integer() and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max


def _check_finite(image: np.ndarray, name: str, *, may_miss: bool) -> None:
    if image.dtype.kind != "f":
        return
    if may_miss and np.isinf(image).any():
        raise UnreadableImage(f"{name} holds infinite values; expected finite ones, or NaN for nodata")
    if not may_miss and not np.isfinite(image).all():
        raise UnreadableImage(
            f"{name} holds NaN or infinite values; expected finite ones (if NaN means nodata: --nodata nan)"
        )


def choose_channels(
    found: Sequence[str] | None, wanted: Sequence[str] | None, *, name: str
) -> tuple[tuple[str, ...] | None, tuple[int, ...] | None]:
    """Selects channels by name.

    Args:
        found: the names of the images' channels, in order; None where nothing names them.
        wanted: the names to select, in order; None: all. Where nothing names them, these are their names.
        name: of the images, for the message.

    Returns:
        The selected names, and their positions among those found; None for the latter: all in order.

    Raises:
        UsageError: a name that does not exist.
    """
    if found is None or wanted is None:
        names = found if wanted is None else wanted
        return (None if names is None else tuple(names)), None
    if absent := [channel for channel in wanted if channel not in found]:
        raise UsageError(f"{name} has no channel {absent[0]!r}; its channels are {listed(found)}")
    places = tuple(found.index(channel) for channel in wanted)
    return tuple(wanted), None if places == tuple(range(len(found))) else places
