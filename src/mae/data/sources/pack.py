"""Images in a pack: tar shards with an index, read at any place without unpacking; `mae.data.packs` writes them."""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mae.data.decode.limits import ImageInfo, UnreadableImage, check_size
from mae.data.items import Names, fingerprint_of
from mae.data.remote.storage import MANIFEST, MAX_MANIFEST, Storage, StoredFile
from mae.data.sources.pack_format import DTYPES, Manifest, Shard, check_content, read_index, read_manifest, read_names
from mae.data.sources.source import Source
from mae.errors import MAEError


@dataclass(frozen=True, kw_only=True, eq=False)
class PackSource(Source):
    """Images of a pack in the order of its shards.

    The index is held in memory, 31 bytes an image, and not mapped: truncating a mapped file would kill the process.

    Attributes:
        storage: where its files are.
        tars: the shards' tars.
        shards: the number of each image's shard, `[n]`.
        index: a row of `mae.data.sources.pack_format.INDEX` for each image, `[n]`.
        names: the members' names.
    """

    storage: Storage
    tars: tuple[StoredFile, ...]
    shards: np.ndarray
    index: np.ndarray
    names: Names

    def __len__(self) -> int:
        return len(self.index)

    @property
    def block_sizes(self) -> np.ndarray:
        """How many images each shard holds, in order; shards without an image are left out."""
        return np.diff(self._ends, prepend=0)

    @property
    def _ends(self) -> np.ndarray:
        return np.flatnonzero(np.diff(self.shards, append=-1)) + 1

    @property
    def cache_footprint(self) -> tuple[int, int] | None:
        """Bytes of the largest tar, and bytes of the cache that tars are fetched into; None for a local pack."""
        if self.storage.room is None:
            return None
        return max((tar.num_bytes for tar in self.tars), default=0), self.storage.room

    def prefetch(self, blocks: Sequence[int], *, then: Sequence[int]) -> None:
        """Fetches the tars of `blocks` and begins to fetch those of `then`; see `Source.prefetch`."""
        of_blocks = self.shards[self._ends - 1]
        now, later = ([self.tars[of_blocks[block]] for block in each] for each in (blocks, then))
        self.storage.prefetch([*now, *later])
        for tar in now:
            self.storage.local(tar)

    def item_name(self, index: int) -> str:
        """The pack and the member, for messages."""
        return f"{self.storage.place}/{self.names[index]}"

    def read(self, index: int) -> bytes:
        """The image file; raises `UnreadableImage` where it does not match its checksum."""
        row, tar = self.index[index], self.tars[self.shards[index]]
        data = self.storage.part(tar, int(row["offset"]), int(row["length"]))
        if zlib.crc32(data) != row["crc32"]:
            raise UnreadableImage(f"{self.item_name(index)} does not match its checksum; {tar.name} is damaged")
        return data

    def recorded(self, index: int) -> ImageInfo:
        """What the index says of an image; raises `UnreadableImage` where that is impossible."""
        row, name = self.index[index], self.item_name(index)
        info = ImageInfo(
            height=int(row["height"]),
            width=int(row["width"]),
            channels=int(row["channels"]),
            dtype=DTYPES[row["dtype"]],
            names=self.channels,
            nodata=self.nodata,
        )
        check_size(info, name=name)
        if self.channels is not None and len(self.channels) != info.channels:
            raise UnreadableImage(
                f"{name} has {info.channels} channels, and {MANIFEST} names {len(self.channels)}; expected as many"
            )
        return info

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums in order."""
        return fingerprint_of(self.names, self.index["length"], self.index["crc32"])

    def content(self, index: int) -> str:
        """The image's checksum in the index."""
        return f"{self.index['crc32'][index]:08x}"

    def version(self) -> str:
        """16 hexadecimal digits of the names, sizes, checksums, the channel names and the files that hold them."""
        made = "\0".join([self.fingerprint(), self.storage.version(), *(self.channels or ())])
        return hashlib.sha256(made.encode()).hexdigest()[:16]

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the images at `indices` only."""
        names, rows, shards = self.names.take(indices), self.index[indices], self.shards[indices]
        return replace(self, names=names, index=rows, shards=shards, note=note)


def open_pack(storage: Storage, name: str) -> PackSource:
    """Opens a pack from its `pack.json`, the indices and the names; no tar is read.

    Args:
        storage: where it is.
        name: what the user called it.

    Raises:
        UsageError: it is not a whole pack, or has impossible content.
        MAEError: a file listed in `pack.json` cannot be read or fetched.
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
        nodata=manifest.nodata,
    )


def manifest_of(storage: Storage) -> Manifest:
    """A pack's `pack.json`; raises as `read_manifest`."""
    return read_manifest(storage.whole(MANIFEST, limit=MAX_MANIFEST), place=storage.place)


def _index(storage: Storage, shard: Shard) -> np.ndarray:
    return read_index(whole_file(storage, shard.index_file()), shard, place=storage.place)


def _names(storage: Storage, manifest: Manifest) -> Iterator[str]:
    for shard in manifest.shards:
        yield from read_names(whole_file(storage, shard.names_file()), shard, place=storage.place)


def whole_file(storage: Storage, file: StoredFile) -> bytes:
    """A file beside the tars, its checksum verified.

    Raises:
        UsageError: it does not match its checksum.
        MAEError: it cannot be read or fetched.
    """
    path = storage.local(file)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MAEError(f"{path} cannot be read: {error.strerror}") from error
    return check_content(data, file, place=storage.place)
