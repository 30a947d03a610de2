"""Verifying every byte of a pack against its index and checksums."""

import hashlib
import json
import zlib
from collections.abc import Iterator

import numpy as np

from mae.data.remote.storage import Storage, StoredFile
from mae.data.sources.pack import manifest_of, whole_file
from mae.data.sources.pack_format import REPORT, Manifest, Shard, read_index, read_names
from mae.data.sources.tar_index import members
from mae.errors import MAEError, UsageError

_PART = 1 << 22  # bytes read at a time
_MAX_REPORT = 1 << 30


def verify_pack(storage: Storage) -> Iterator[str]:
    """Each fault of a pack in a line; none if it is intact.

    Every byte is read, so a pack behind a URL is fetched; images are not decoded, as they were when packed.
    """
    try:
        manifest = manifest_of(storage)
    except MAEError as error:
        yield str(error)
        return
    seen: set[str] = set()
    for shard in manifest.shards:
        try:
            names = read_names(whole_file(storage, shard.names_file()), shard, place=storage.place)
            rows = read_index(whole_file(storage, shard.index_file()), shard, place=storage.place)
            yield from _tar_faults(storage, shard, names, rows)
        except MAEError as error:
            yield str(error)
            continue
        yield from (f"{storage.place}/{shard.tar_file().name}: {name} occurs twice" for name in names if name in seen)
        seen.update(names)
    yield from _report_faults(storage, manifest)


def _tar_faults(storage: Storage, shard: Shard, names: list[str], rows: np.ndarray) -> Iterator[str]:
    """What is wrong with a tar; its own checksum is reported only where nothing else is wrong."""
    tar, place = shard.tar_file(), f"{storage.place}/{shard.tar_file().name}"
    faults = [f"{place}: {fault}" for fault in (*_places(storage, tar, names, rows), *_sums(storage, tar, names, rows))]
    if not faults and _sha256(storage, tar) != tar.sha256:
        faults = [f"{place} does not match its checksum in pack.json, though each image in it does"]
    yield from faults


def _places(storage: Storage, tar: StoredFile, names: list[str], rows: np.ndarray) -> Iterator[str]:
    """Whether the tar's own headers agree with the index."""

    def read(offset: int, length: int) -> bytes:
        return storage.part(tar, offset, min(length, max(tar.num_bytes - offset, 0)))

    expected = zip(names, rows["offset"].tolist(), rows["length"].tolist(), strict=True)
    try:
        for member in members(read, tar.num_bytes, name=tar.name):
            wanted = next(expected, None)
            if wanted is None:
                yield f"{member.name} is in the tar and not in the index"
                return
            name, offset, length = wanted
            if (member.name, member.offset, member.length, member.kind) != (name, offset, length, "file"):
                yield (
                    f"{member.name} ({member.kind}) has {member.length:,} bytes at {member.offset:,} by the tar; by "
                    f"the index {name} has {length:,} at {offset:,}"
                )
                return
    except UsageError as error:
        yield str(error)
        return
    if (missing := next(expected, None)) is not None:
        yield f"{missing[0]} is in the index and not in the tar"


def _sums(storage: Storage, tar: StoredFile, names: list[str], rows: np.ndarray) -> Iterator[str]:
    for name, row in zip(names, rows, strict=True):
        if zlib.crc32(storage.part(tar, int(row["offset"]), int(row["length"]))) != row["crc32"]:
            yield f"{name} does not match its checksum"


def _sha256(storage: Storage, tar: StoredFile) -> str:
    digest = hashlib.sha256()
    for offset in range(0, tar.num_bytes, _PART):
        digest.update(storage.part(tar, offset, min(_PART, tar.num_bytes - offset)))
    return digest.hexdigest()


def _report_faults(storage: Storage, manifest: Manifest) -> Iterator[str]:
    try:
        listed = len(json.loads(storage.whole(REPORT, limit=_MAX_REPORT))["left_out"])
    except MAEError as error:
        yield str(error)
    except (ValueError, TypeError, KeyError, RecursionError):
        yield f"{storage.place}/{REPORT} does not list what was left out"
    else:
        if listed != manifest.left_out:
            yield f"{storage.place}/{REPORT} lists {listed:,} images left out, pack.json {manifest.left_out:,}"
