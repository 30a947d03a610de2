"""Images in a pack: tar shards with an index, read at any place without unpacking; `packing.py` writes them."""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mae.data.base import Names, fingerprint_of
from mae.data.decoding import decode, probe
from mae.data.limits import ImageInfo, UnreadableImage, check_size
from mae.data.pack_format import (
    DTYPES,
    MANIFEST,
    MAX_MANIFEST,
    Manifest,
    Shard,
    check_content,
    read_index,
    read_manifest,
    read_names,
)
from mae.data.storage import Storage, StoredFile
from mae.errors import MAEError


@dataclass(frozen=True, kw_only=True, eq=False)
class PackSource:
    """Images of a pack in the order of its shards.

    The index is held in memory, 31 bytes an image, and not mapped: a mapped file that is cut short meanwhile would end
    the process.

    Attributes:
        name: what the user called it.
        note: what it holds.
        storage: where its files lie.
        tars: the shards' tars.
        shards: the number of each image's shard, `[n]`.
        index: a row of `pack_format.INDEX` for each image, `[n]`.
        names: the members' names.
        channels: what every image's channels are called; None where nothing names them.
        no_data: the value that the files say stands for no measurement; None where they say none.
        bands: see `decode`.
    """

    name: str
    note: str
    storage: Storage
    tars: tuple[StoredFile, ...]
    shards: np.ndarray
    index: np.ndarray
    names: Names
    channels: tuple[str, ...] | None = None
    no_data: str | None = None
    bands: int | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def block_sizes(self) -> np.ndarray:
        """How many images lie in the same shard, for each shard in order; shards without an image are not told."""
        return np.diff(self._ends, prepend=0)

    @property
    def _ends(self) -> np.ndarray:
        return np.flatnonzero(np.diff(self.shards, append=-1)) + 1

    @property
    def fetched(self) -> tuple[int, int] | None:
        """Bytes of the largest tar, and bytes that the cache may hold which tars are fetched into; None: into none."""
        if self.storage.room is None:
            return None
        return max((tar.num_bytes for tar in self.tars), default=0), self.storage.room

    def bring_near(self, blocks: Sequence[int], *, then: Sequence[int]) -> None:
        """Have the tars of some blocks on this machine, and begin to fetch those of others.

        Args:
            blocks: numbers of those that are about to be read, as `block_sizes` counts them.
            then: of those that come after them.

        Raises:
            MAEError: a tar cannot be had.
        """
        of_blocks = self.shards[self._ends - 1]
        now, later = ([self.tars[of_blocks[block]] for block in each] for each in (blocks, then))
        self.storage.prefetch([*now, *later])
        for tar in now:
            self.storage.local(tar)

    def item_name(self, index: int) -> str:
        """The pack and the member, for messages."""
        return f"{self.storage.place}/{self.names[index]}"

    def load(self, index: int) -> np.ndarray:
        """The image `[H, W, C]`; raises `UnreadableImage`, and `MAEError` where its shard cannot be had."""
        name, info = self.item_name(index), self._indexed(index)
        image = decode(self.read(index), name=name, bands=self.bands)
        height, width, channels = image.shape
        found = ImageInfo(height=height, width=width, channels=channels, dtype=image.dtype)
        expected = replace(info, names=None, no_data=None)
        if channels == self.bands == info.channels + 1:  # alpha, which the index does not count
            expected = replace(expected, channels=channels)
        if found != expected:
            raise UnreadableImage(f"{name} is {_told(found)}, and {_told(expected)} in the index; the pack is damaged")
        return image

    def read(self, index: int) -> bytes:
        """The image file; raises `UnreadableImage` where it does not match its checksum."""
        row, tar = self.index[index], self.tars[self.shards[index]]
        data = self.storage.part(tar, int(row["offset"]), int(row["length"]))
        if zlib.crc32(data) != row["crc32"]:
            raise UnreadableImage(f"{self.item_name(index)} does not match its checksum; {tar.name} is damaged")
        return data

    def probe(self, index: int) -> ImageInfo:
        """What `load` would give, by the index where that tells; raises `UnreadableImage`."""
        info = self._indexed(index)
        if self.bands == info.channels + 1:  # which may be alpha, and the index does not count that
            return probe(self.read(index), name=self.item_name(index), bands=self.bands)
        return info

    def _indexed(self, index: int) -> ImageInfo:
        row, name = self.index[index], self.item_name(index)
        info = ImageInfo(
            height=int(row["height"]),
            width=int(row["width"]),
            channels=int(row["channels"]),
            dtype=DTYPES[row["dtype"]],
            names=self.channels,
            no_data=self.no_data,
        )
        check_size(info, name=name)
        if self.channels is not None and len(self.channels) != info.channels:
            told = f"{MANIFEST} names {len(self.channels)}"
            raise UnreadableImage(f"{name} has {info.channels} channels, and {told}; expected as many")
        return info

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums in order."""
        return fingerprint_of(self.names, self.index["length"], self.index["crc32"])

    def content(self, index: int) -> str:
        """The image's checksum in the index."""
        return f"{self.index['crc32'][index]:08x}"

    def version(self) -> str:
        """16 hexadecimal digits of the names, sizes, checksums, the channels' names and the files they lie in."""
        made = "\0".join([self.fingerprint(), self.storage.version(), *(self.channels or ())])
        return hashlib.sha256(made.encode()).hexdigest()[:16]

    def take(self, indices: np.ndarray, note: str) -> "PackSource":
        """The images at `indices` alone."""
        names, rows, shards = self.names.take(indices), self.index[indices], self.shards[indices]
        return replace(self, names=names, index=rows, shards=shards, note=note)


def open_pack(storage: Storage, name: str) -> PackSource:
    """A pack by its `pack.json`, the indices and the names; no tar is read.

    Args:
        storage: where it lies.
        name: what the user called it.

    Raises:
        UsageError: it is no whole pack, or one that holds what no pack can have.
        MAEError: a file that `pack.json` tells of cannot be had.
    """
    manifest = manifest_of(storage)
    rows = [_index(storage, shard) for shard in manifest.shards]
    return PackSource(
        name=name,
        note=f"pack, {manifest.images:,} images in {len(manifest.shards):,} shards",
        storage=storage,
        tars=tuple(shard.tar_file() for shard in manifest.shards),
        shards=np.repeat(np.arange(len(rows), dtype=np.int32), [len(part) for part in rows]),
        index=np.concatenate(rows),
        names=Names(_names(storage, manifest)),
        channels=manifest.channel_names,
        bands=None if manifest.channel_names is None else len(manifest.channel_names),
        no_data=manifest.no_data,
    )


def manifest_of(storage: Storage) -> Manifest:
    """What a pack's `pack.json` tells; raises `UsageError` as `read_manifest` does."""
    return read_manifest(storage.whole(MANIFEST, limit=MAX_MANIFEST), place=storage.place)


def _index(storage: Storage, shard: Shard) -> np.ndarray:
    return read_index(whole_file(storage, shard.index_file()), shard, place=storage.place)


def _names(storage: Storage, manifest: Manifest) -> Iterator[str]:
    for shard in manifest.shards:
        yield from read_names(whole_file(storage, shard.names_file()), shard, place=storage.place)


def whole_file(storage: Storage, file: StoredFile) -> bytes:
    """A file beside the tars, its checksum compared.

    Raises:
        UsageError: another content than `pack.json` tells.
        MAEError: it cannot be had.
    """
    path = storage.local(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MAEError(f"{path} cannot be read: {error.strerror}") from error
    return check_content(data, file, place=storage.place)


def _told(info: ImageInfo) -> str:
    return f"{info.width} x {info.height} x {info.channels} of {info.dtype}"
