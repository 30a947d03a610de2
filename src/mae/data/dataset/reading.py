"""From a source's items to images: the one place where bytes are decoded and compared with what is known of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mae.data.decode.image import decode, probe, reducible
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.data.sources.channel_names import NAMES_FILE
from mae.data.sources.source import Source

Reduction = Callable[[int, int], int]
"""From an image's height and width to how many times smaller it may be decoded: 1, 2, 4 or 8."""


class WholeSize(NamedTuple):
    """The size of an image of which a smaller one was decoded.

    Attributes:
        height: in pixels.
        width: in pixels.
        reduction: how many times smaller the decoded one is; 1: it is the whole image.
    """

    height: int
    width: int
    reduction: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageReader:
    """The images of a source, by number.

    Attributes:
        source: where the items are.
        bands: how many channels are wanted, see `decode`; a source that names its channels has as many as names.
    """

    source: Source
    bands: int | None = None

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`, uint8, uint16 or float32; raises `UnreadableImage`."""
        return self.image_of(index, self.source.read(index))

    def image_of(self, index: int, item: bytes | np.ndarray) -> np.ndarray:
        """The image of an item that has been read.

        Raises:
            UnreadableImage: it cannot be decoded, or is not what was recorded of it.
        """
        return self._image_of(index, item, None)[0]

    def load_reduced(self, index: int, reduction: Reduction) -> tuple[np.ndarray, WholeSize]:
        """`load`, but of a JPEG no larger than it needs to be; raises `UnreadableImage`.

        Args:
            index: of the image.
            reduction: asked for grey and RGB JPEGs; other images are decoded whole.
        """
        return self._image_of(index, self.source.read(index), reduction)

    def _image_of(
        self, index: int, item: bytes | np.ndarray, reduction: Reduction | None
    ) -> tuple[np.ndarray, WholeSize]:
        if isinstance(item, np.ndarray):
            return item, WholeSize(item.shape[0], item.shape[1], 1)
        name, recorded = self.source.item_name(index), self.source.recorded(index)
        known, times = None if reduction is None else reducible(item, name=name), 1
        if reduction is not None and known is not None:
            times = min(reduction(known.height, known.width), known.most)
        image = decode(item, name=name, bands=self._bands, reduction=times)
        height, width = image.shape[:2] if known is None or times == 1 else known[:2]
        if recorded is not None:
            self._check_recorded((height, width, image.shape[2]), image.dtype, recorded, name)
        elif self.source.channels is not None:
            _check_count(image.shape[2], self.source.channels, name)
        return image, WholeSize(height, width, times)

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give, without decoding; raises `UnreadableImage`."""
        recorded = self.source.recorded(index)
        # One channel more may be alpha, which records do not count.
        if recorded is not None and self._bands != recorded.channels + 1:
            return recorded
        item, name, names = self.source.read(index), self.source.item_name(index), self.source.channels
        if isinstance(item, np.ndarray):
            height, width, channels = item.shape
            return ImageInfo(height=height, width=width, channels=channels, dtype=item.dtype)
        info = probe(item, name=name, bands=self._bands)
        if names is None:
            return info
        _check_count(info.channels, names, name)
        return replace(info, names=names, own_names=False)

    @property
    def _bands(self) -> int | None:
        return self.bands if self.source.channels is None else len(self.source.channels)

    def _check_recorded(self, shape: tuple[int, int, int], dtype: np.dtype, recorded: ImageInfo, name: str) -> None:
        expected = (recorded.height, recorded.width, recorded.channels, recorded.dtype)
        with_alpha = (*expected[:2], recorded.channels + 1, recorded.dtype)
        found = (*shape, dtype)
        if found != expected and not (found == with_alpha and shape[2] == self._bands):
            raise UnreadableImage(
                f"{name} is {_described(found)}, and {_described(expected)} in the index; the pack is damaged"
            )


def _check_count(channels: int, names: tuple[str, ...], name: str) -> None:
    if channels != len(names):
        raise UnreadableImage(f"{name} has {channels} channels, and {NAMES_FILE} names {len(names)}; expected as many")


def _described(shape: tuple[object, ...]) -> str:
    height, width, channels, dtype = shape
    return f"{width} x {height} x {channels} of {dtype}"
