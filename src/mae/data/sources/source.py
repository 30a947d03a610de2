"""The contract of every source: items in a fixed order, given as bytes or arrays, whatever they show."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mae.data.decode.limits import ImageInfo

TRAIN, TEST = ("train",), ("test", "val", "validation")
"""What the folders, archives and splits of the two parts of labelled images are called, in small letters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Source(ABC):
    """Items in a fixed order, each known by its number; labels are never read.

    A source lists items and hands out their content; `mae.data.dataset.reading` turns that into images.

    Attributes:
        name: what the user called it.
        note: one line on what it holds and what was left out.
        channels: the names of every item's channels, in order, where something beside the items gives them.
        nodata: the value that means nodata in the items, as text, where something beside the items gives it.
    """

    name: str
    note: str
    channels: tuple[str, ...] | None = None
    nodata: str | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def item_name(self, index: int) -> str:
        """The file, member or element, for messages."""

    @abstractmethod
    def read(self, index: int) -> bytes | np.ndarray:
        """The item: the content of its file, or its pixels `[H, W, C]` where it has no file.

        Raises:
            UnreadableImage: it cannot be read, or does not match its checksum.
            MAEError: the file that holds it cannot be fetched.
        """

    def recorded(self, index: int) -> ImageInfo | None:
        """What is known of an item without reading it; None: nothing. Raises `UnreadableImage`."""
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the order, names or sizes of the items, and with known checksums.

        Reads no item; `content` covers what this cannot see.
        """

    @abstractmethod
    def content(self, index: int) -> str:
        """Hexadecimal digits that change with an item's content; raises `UnreadableImage`.

        Reads at most about one image; of a large file only some parts, see `digest_of_parts`.
        """

    @abstractmethod
    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, the location or the modification times."""

    @abstractmethod
    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the items at `indices` only, in that order."""

    @property
    def block_sizes(self) -> np.ndarray | None:
        """How many consecutive items each block holds, in order; None: items are not in blocks.

        A block, such as a shard, is best read as a whole.
        """
        return None

    @property
    def cache_footprint(self) -> tuple[int, int] | None:
        """Bytes of the largest block, and bytes of the cache that blocks are fetched into; None: nothing is fetched."""
        return None

    def prefetch(self, blocks: Sequence[int], *, then: Sequence[int]) -> None:  # noqa: B027
        """Make blocks available on this machine if they have to be fetched; does nothing by default.

        Args:
            blocks: numbers of those about to be read, as `block_sizes` counts them.
            then: numbers of those that follow, which may be fetched in the background.

        Raises:
            MAEError: a block of `blocks` cannot be fetched.
        """
