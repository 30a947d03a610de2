"""Images in zip archives, which are read in place and never extracted."""

import os
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from stat import S_ISLNK
from typing import Self

import numpy as np

from mae.data.decode.image import HEADER_BYTES, recognise
from mae.data.decode.limits import UnreadableImage, check_num_bytes
from mae.data.items import Names, fingerprint_of
from mae.data.sources.channel_names import MAX_NAMES_BYTES, NAMES_FILE, parse_names
from mae.data.sources.folder import check_any, count_of, endings, is_image, is_visible, plain_path, unread_note
from mae.data.sources.source import Source
from mae.errors import UsageError

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_READABLE_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, kw_only=True, eq=False)
class ZipSource(Source):
    """Image members of a zip archive; `table` has a row for each member: offset, packed, size, crc, method.

    `channels` are the names in the `channels.txt` at its top.

    The archive is opened anew for each read. That costs 20 us, and leaves no open file or position that worker
    processes or threads could share.
    """

    path: Path
    names: Names
    table: np.ndarray

    def __len__(self) -> int:
        return len(self.names)

    def item_name(self, index: int) -> str:
        """The path, for messages."""
        return f"{self.path}/{self.names[index]}"

    def read(self, index: int) -> bytes:
        """The member's content; raises `UnreadableImage`."""
        offset, packed, size, crc, method = (int(value) for value in self.table[index])
        name = self.item_name(index)
        for count in (packed, size):  # of nothing, zlib would inflate all there is
            check_num_bytes(count, name=name)
        if method not in _READABLE_METHODS:
            raise UnreadableImage(f"{name} is compressed by zip method {method}; expected stored or deflate")
        try:
            with self.path.open("rb") as archive:
                if offset + packed > os.fstat(archive.fileno()).st_size:  # else memory would be taken for it
                    raise UnreadableImage(f"{name} reaches beyond the archive's end; the zip is broken")
                archive.seek(offset)
                magic, name_length, extra_length = _LOCAL_HEADER.unpack(archive.read(_LOCAL_HEADER.size))
                if magic != b"PK\3\4":
                    raise UnreadableImage(f"{name} is not where the archive's directory says; the zip is broken")
                archive.seek(name_length + extra_length, os.SEEK_CUR)
                data = archive.read(packed)
            data = _inflate(data, size, name) if method == zipfile.ZIP_DEFLATED else data
        except (OSError, struct.error, zlib.error) as error:
            raise UnreadableImage(f"{name} cannot be read from the archive: {error}") from error
        if len(data) != size or zlib.crc32(data) != crc:
            raise UnreadableImage(f"{name} does not match its checksum; the zip is damaged")
        return data

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums in order."""
        return fingerprint_of(self.names, self.table[:, 2], self.table[:, 3])

    def content(self, index: int) -> str:
        """The member's checksum."""
        return f"{self.table[index, 3]:08x}"

    def version(self) -> str:
        """16 hexadecimal digits of the names, sizes and checksums, and the channel names."""
        return fingerprint_of([self.fingerprint(), *(self.channels or ())])

    def take(self, indices: np.ndarray, note: str) -> Self:
        """A source of the members at `indices` only."""
        return replace(self, names=self.names.take(indices), table=self.table[indices], note=note)


def _inflate(packed: bytes, size: int, name: str) -> bytes:
    """At most `size + 1` bytes, and none beyond the header unless that is an image's: bombs stay small."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    head = inflater.decompress(packed, min(HEADER_BYTES, size))
    recognise(head, name=name)
    return head + inflater.decompress(inflater.unconsumed_tail, size - len(head) + 1)


def open_zip(path: Path, *, name: str) -> ZipSource:
    """All images of a zip archive, sorted by member name.

    Raises:
        UsageError: broken, encrypted, or without images.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members, skipped = _files_in(archive)
            channels = _names_in(archive, members, name=name)
    except UsageError:  # of the channel names
        raise
    # Reading a member may raise zlib's own error.
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
        raise UsageError(f"{name} is not a whole zip archive: {error}") from error
    images = {path: member for path, member in members.items() if is_image(path)}
    others = endings(members)
    check_any(images, others, name=name)
    if any(member.flag_bits & 1 for member in images.values()):
        raise UsageError(f"{name} is encrypted; expected a zip without a password")
    table = [(m.header_offset, m.compress_size, m.file_size, m.CRC, m.compress_type) for m in images.values()]
    for path_in_zip, row in zip(images, table, strict=True):
        if max(row) > np.iinfo(np.int64).max:
            raise UsageError(f"{name} is not a whole zip archive: {path_in_zip} has an impossible size or offset")
    left_out = "; skipped: " if skipped else ""
    left_out += ", ".join(f"{count:,} {what}" for what, count in sorted(skipped.items()))
    return ZipSource(
        name=name,
        note=f"zip, {count_of(len(images), 'file')}{left_out}{unread_note(others)}",
        path=path,
        names=Names(images),
        table=np.array(table, dtype=np.int64),
        channels=channels,
    )


def _files_in(archive: zipfile.ZipFile) -> tuple[dict[str, zipfile.ZipInfo], Counter[str]]:
    """The visible files by path, sorted, as they would be extracted; and what is skipped over."""
    members = [member for member in archive.infolist() if member.filename and not member.is_dir()]
    of_windows = not any("/" in member.filename for member in members)
    found: dict[str, zipfile.ZipInfo] = {}
    skipped: Counter[str] = Counter()
    for member in members:
        written = member.filename.replace("\\", "/") if of_windows else member.filename
        path = plain_path(written)
        if ".." in path.split("/") or written.startswith("/"):
            skipped["names that lead out"] += 1
        elif S_ISLNK(member.external_attr >> 16):
            skipped["links"] += 1
        elif is_visible(path):
            skipped["older versions of a file"] += path in found
            found[path] = member  # the last one counts, as where a zip is extracted
    return dict(sorted(found.items())), +skipped


def _names_in(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], *, name: str) -> tuple[str, ...] | None:
    """The channel names at the top of an archive, or of its one folder."""
    tops = {path.split("/")[0] for path in members}
    places = [NAMES_FILE, *(f"{top}/{NAMES_FILE}" for top in tops if len(tops) == 1)]
    found = [path for path in places if path in members]
    if not found:
        return None
    member = members[found[0]]
    if member.compress_type not in _READABLE_METHODS:
        raise UsageError(
            f"{name}/{found[0]} is compressed by zip method {member.compress_type}; expected stored or deflate"
        )
    with archive.open(member) as file:
        return parse_names(file.read(MAX_NAMES_BYTES + 1), name=f"{name}/{found[0]}")
