"""The members of a tar archive, from its headers alone; nothing is ever extracted.

Reads the formats that tools write: v7, ustar (POSIX 1003.1), pax and GNU. Every number is compared with the size of the
archive before it is trusted.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mae.errors import UsageError

MORE_BEHIND, NO_END = "with bytes behind its end, which are not read", "without its end, perhaps truncated"
"""What may be wrong with the end of an archive."""

_BLOCK = 512
_MAX_ENDING = 1 << 20  # bytes of zeros that a writer may fill the last record up with
_MAX_HEADER = 1 << 20  # bytes of an extended header, which holds a long name or the like
_FILES, _LINKS, _FOLDER = (b"0", b"\0", b"7"), (b"1", b"2"), b"5"
_WITHOUT_DATA = (*_LINKS, _FOLDER, b"3", b"4", b"6")
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class Member(NamedTuple):
    """A member of a tar.

    Attributes:
        name: as it is in the archive, which may lead anywhere; bytes that are not UTF-8 are kept by surrogateescape.
        kind: `file`, `folder`, `link`, or `other`, such as a device; `fault` where its name says what is wrong with the
            archive's end.
        offset: of its content.
        length: of its content in bytes, all inside the archive.
    """

    name: str
    kind: str
    offset: int
    length: int


def members(read: Callable[[int, int], bytes], num_bytes: int, *, name: str) -> Iterator[Member]:
    """The members of a tar, in order; after them perhaps a fault of its end.

    Args:
        read: reads bytes, given an offset and a length; fewer only at the end.
        num_bytes: the archive's size.
        name: of the archive, for messages.

    Raises:
        UsageError: it is compressed, damaged or truncated, or holds a sparse file.
    """
    at, extended = 0, dict[str, bytes]()
    while at < num_bytes:
        head = read(at, _BLOCK)
        if not head.strip(b"\0"):  # the end has blocks of zeros
            rest = num_bytes - at
            if rest > _MAX_ENDING or read(at, rest).strip(b"\0"):
                yield Member(MORE_BEHIND, "fault", at, 0)
            return
        _check_head(head, at, name=name)
        at, kind = at + _BLOCK, head[156:157]
        if kind in (b"x", b"X", b"g", b"L", b"K"):
            length = _number(head[124:136], name=name)
            _check_length(length, at, min(num_bytes, at + _MAX_HEADER), name=name)
            extended |= _extended(kind, read(at, length), name=name)
        else:
            length = _number(extended.get("size", head[124:136]), name=name, octal="size" not in extended)
            path = extended.get("path") or _path(head)
            _check_plain(kind, extended, path, name=name)
            _check_length(length, at, num_bytes, name=f"{name}: {_text(path)}")
            yield Member(name=_text(path), kind=_kind(kind, path), offset=at, length=length)
            extended.clear()
            length = 0 if kind in _WITHOUT_DATA else length
        at += -(-length // _BLOCK) * _BLOCK
    yield Member(NO_END, "fault", at, 0)


def _check_head(head: bytes, at: int, *, name: str) -> None:
    for magic, method in _COMPRESSED.items():
        if at == 0 and head.startswith(magic):
            raise UsageError(
                f"{name} is compressed with {method}, so that no image in it can be read by itself; "
                f"decompress it: the images in it are already compressed"
            )
    if len(head) < _BLOCK:
        raise UsageError(f"{name} is truncated; expected a whole tar archive")
    rest = head[:148] + head[156:]
    # Some old writers treated bytes above 127 as negative.
    sums = {256 + sum(rest), 256 + sum(rest) - 256 * sum(byte > 127 for byte in rest)}
    if _number(head[148:156], name=name) not in sums:
        raise UsageError(f"{name} is not a whole tar archive: the header at byte {at:,} does not match its checksum")


def _check_length(length: int, at: int, end: int, *, name: str) -> None:
    if at + length > end:
        raise UsageError(
            f"{name} claims {length:,} bytes where {max(end - at, 0):,} can be; the tar is truncated or broken"
        )


def _check_plain(kind: bytes, extended: dict[str, bytes], path: bytes, *, name: str) -> None:
    if kind == b"S" or any(key.startswith("GNU.sparse") for key in extended):
        raise UsageError(f"{name} holds the sparse file {_text(path)}; create the tar again without --sparse")


def _number(field: bytes, *, name: str, octal: bool = True) -> int:
    """A number in a header: octal or decimal digits, or GNU's binary form, which begins with the byte 128."""
    if octal and field[:1] == b"\x80":
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0")[0].strip() or b"0"
    try:
        if not digits.isdigit() or len(digits) > 20:
            raise ValueError
        return int(digits, 8 if octal else 10)
    except ValueError:
        raise UsageError(f"{name} is not a whole tar archive: {field[:20]!r} is not a number") from None


def _extended(kind: bytes, data: bytes, *, name: str) -> dict[str, bytes]:
    """What an extended header says of the next member."""
    if kind == b"K":  # the target of a link
        return {}
    if kind == b"L":
        return {"path": data.split(b"\0")[0]}
    extended = dict(_records(data, name=name))
    if kind == b"g":
        if extended.keys() & {"path", "size"}:
            raise UsageError(f"{name} gives one name or size to all its members; expected each to have its own")
        return {}
    return {key: value for key, value in extended.items() if key in ("path", "size") or key.startswith("GNU.sparse")}


def _records(data: bytes, *, name: str) -> Iterator[tuple[str, bytes]]:
    """The lines `LENGTH KEY=VALUE` of a pax header, whose lengths count all of a line."""
    at = 0
    while at < len(data) and data[at]:
        digits, _, _ = data[at : at + 20].partition(b" ")
        length = _number(digits, name=name, octal=False)
        line = data[at : at + length]
        key, equals, value = line[len(digits) + 1 : -1].partition(b"=")
        if not equals or len(line) != length or line[-1:] != b"\n" or b"\0" in value:
            raise UsageError(f"{name} is not a whole tar archive: {line[:40]!r} is not a line of a pax header")
        yield key.decode("utf-8", "replace"), value
        at += length


def _path(head: bytes) -> bytes:
    path = head[:100].split(b"\0")[0]
    above = head[345:500].split(b"\0")[0] if head[257:263] == b"ustar\0" else b""
    return above + b"/" + path if above else path


def _kind(kind: bytes, path: bytes) -> str:
    if kind == _FOLDER or (kind == b"\0" and path.endswith(b"/")):
        return "folder"
    return "file" if kind in _FILES else "link" if kind in _LINKS else "other"


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
