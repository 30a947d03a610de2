"""Read files of `torch.save`: a zip archive, or before 2020 a sequence of pickles, and the data of their tensors.

Everything is read here, from the directory to the last byte: if one program checked a file and another read it, they
could see different contents. The archive is a zip as PyTorch writes it; other features of zips are refused.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from math import prod
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mae import records
from mae.errors import MAEError
from mae.interop.imports.pickles import MAX_BYTES, StoredTensor, read_pickle

_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What files of the format before 2020 begin with, a pickle each."""
_NUMEL = struct.Struct("<q")
_MAX_DIRECTORY = 16 << 20
"""Bytes of an archive's directory; an entry takes about a hundred."""
_MAX_VALUES = 1 << 60
_ALIGNMENT = 16  # bytes of the widest dtype
_BYTE_ORDER = "its data is big-endian; expected little-endian"
_STORED, _ENCRYPTED = 0, 1
_BEYOND = 0xFFFFFFFF
"""Stands for a number that needs more than four bytes and is stored elsewhere."""
_END = struct.Struct("<4s8xLLH")
_END64_PLACE, _END64 = struct.Struct("<4s4xQ4x"), struct.Struct("<4s36xQQ")
_ENTRY, _LOCAL = struct.Struct("<4s4xHH4xLLLHHH8xL"), struct.Struct("<4s22xHH")
_EXTRA, _WIDE = struct.Struct("<HH"), struct.Struct("<Q")
_EXTRA64 = 1


class _Part(NamedTuple):
    """A byte range of a file.

    Attributes:
        start: of the first byte.
        size: in bytes.
        crc: of the bytes; 0: unknown.
    """

    start: int
    size: int
    crc: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a file of `torch.save`.

    Attributes:
        path: of the file.
        content: see `mae.interop.imports.pickles.read_pickle`.
    """

    path: Path
    content: Any
    _data: mmap
    _parts: Mapping[str, _Part]

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Tensors by name; they share the mapped file's memory where its alignment allows.

        Raises:
            MAEError: a tensor whose data is not all in the file, or does not match its checksum.
        """
        numbers, read = torch.frombuffer(self._data, dtype=torch.uint8), dict[str, Tensor]()
        made = {}
        for name, tensor in stored.items():
            try:
                if (key := tensor.storage.key) not in read:
                    read[key] = self._storage(key, numbers)
                made[name] = _tensor_of(tensor, read[key])
            except ValueError as error:
                raise MAEError(
                    f"{self.path} cannot be read: {records.shown(name)} {error}; download it again"
                ) from error
        return made

    def _storage(self, key: str, numbers: Tensor) -> Tensor:
        """The bytes of a storage, `[bytes]`."""
        start, size, crc = self._parts.get(key, _Part(0, 0))
        if crc and zlib.crc32(memoryview(self._data)[start : start + size]) != crc:
            raise ValueError("does not match its checksum")
        found = numbers[start : start + size]
        return found if start % _ALIGNMENT == 0 else found.clone()


def _tensor_of(stored: StoredTensor, raw: Tensor) -> Tensor:
    """A view of the bytes of its storage."""
    storage, shape, strides, bytes_each = stored.storage, stored.shape, stored.strides, stored.dtype.itemsize
    if (size := storage.numel * storage.dtype.itemsize) != len(raw):
        raise ValueError(f"has a storage of {size:,} bytes, of which the file holds {len(raw):,}")
    if 0 in shape:
        return torch.empty(0, dtype=stored.dtype)
    room = len(raw) // bytes_each
    last = stored.offset + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if last >= room or prod(shape) > _MAX_VALUES:
        raise ValueError(f"of shape {records.shown(list(shape))} does not fit into its storage of {room:,} values")
    values = raw[: room * bytes_each].view(stored.dtype)
    return values.as_strided(shape, strides, values.storage_offset() + stored.offset)


def read_checkpoint(path: Path) -> Checkpoint:
    """The contents of a file of `torch.save`; tensor data is not read yet.

    Raises:
        MAEError: damaged, or not as `torch.save` writes it.
    """
    try:
        with path.open("rb") as file:
            data = mmap(file.fileno(), 0, access=ACCESS_COPY)
        content, parts = (_in_archive if data[:2] == b"PK" else _in_sequence)(data)
    except (OSError, ValueError, struct.error) as error:
        raise MAEError(f"{path} cannot be read: {error}; it is damaged, or not a file of torch.save") from error
    except MAEError as error:
        raise MAEError(f"{path} cannot be read: {error}") from error
    return Checkpoint(path, content, data, parts)


def _in_archive(data: mmap) -> tuple[Any, dict[str, _Part]]:
    entries = _entries(data)
    folders = {name.partition("/")[0] for name in entries if name.partition("/")[2] == "data.pkl"}
    if len(folders) != 1:
        raise ValueError(f"an archive with {len(folders)} entries FOLDER/data.pkl; expected one")
    folder = folders.pop()
    content = _bytes_of(data, entries[f"{folder}/data.pkl"])
    if (order := entries.get(f"{folder}/byteorder")) and _bytes_of(data, order) != b"little":
        raise ValueError(_BYTE_ORDER)
    beginning = f"{folder}/data/"
    parts = {name.removeprefix(beginning): part for name, part in entries.items() if name.startswith(beginning)}
    return read_pickle(BytesIO(content))[0], parts


def _bytes_of(data: mmap, part: _Part) -> bytes:
    if part.size > MAX_BYTES:
        raise ValueError(f"it holds {part.size:,} bytes besides its tensors; expected at most {MAX_BYTES:,}")
    content = data[part.start : part.start + part.size]
    if part.crc and zlib.crc32(content) != part.crc:
        raise ValueError("its pickle does not match its checksum")
    return content


def _entries(data: mmap) -> dict[str, _Part]:
    """The files of an archive by name."""
    found: dict[str, _Part] = {}
    directory = _directory(data)
    at = 0
    while at < len(directory):
        magic, flags, method, crc, packed, size, *lengths, start = _ENTRY.unpack_from(directory, at)
        at += _ENTRY.size
        name, extra = directory[at : at + lengths[0]], directory[at + lengths[0] : at + sum(lengths[:2])]
        at += sum(lengths)
        if magic != b"PK\1\2" or at > len(directory):
            raise ValueError("a truncated directory")
        if method != _STORED or flags & _ENCRYPTED:
            raise ValueError("compressed or encrypted entries, which torch.save does not write")
        size, packed, start = _wide(extra, (size, packed, start))
        if (text := name.decode("utf-8")) in found or size != packed:
            raise ValueError(f"two entries or two sizes of {records.shown(text)}")
        found[text] = _located(data, start, size, crc)
    if sum(part.size for part in found.values()) > len(data):
        raise ValueError("entries that overlap")
    if len({name.lower() for name in found}) < len(found):
        raise ValueError("entries whose names differ only in case, of which PyTorch may read either")
    return found


def _wide(extra: bytes, numbers: tuple[int, ...]) -> list[int]:
    """An entry's numbers; those beyond four bytes are in its extra fields."""
    wide: Iterator[tuple[int]] = iter(())
    at = 0
    while at + _EXTRA.size <= len(extra):
        kind, length = _EXTRA.unpack_from(extra, at)
        at += _EXTRA.size
        if kind == _EXTRA64:
            wide = _WIDE.iter_unpack(extra[at : at + length - length % _WIDE.size])
            break
        at += length
    return [next(wide, (number,))[0] if number == _BEYOND else number for number in numbers]


def _located(data: mmap, start: int, size: int, crc: int) -> _Part:
    """The bytes after an entry's own header."""
    magic, *lengths = _LOCAL.unpack_from(data, start) if start + _LOCAL.size <= len(data) else (b"",)
    start += _LOCAL.size + sum(lengths)
    if magic != b"PK\3\4" or start + size > len(data):
        raise ValueError("an entry that is not where the directory says")
    return _Part(start, size, crc)


def _directory(data: mmap) -> bytes:
    """An archive's table of entries."""
    end = len(data) - _END.size
    magic, size, start, comment = _END.unpack_from(data, end)
    if magic != b"PK\5\6" or comment:
        raise ValueError("an archive that is truncated, or followed by other data")
    place = end - _END64_PLACE.size
    if place >= 0 and data[place : place + 4] == b"PK\6\7":
        _, end = _END64_PLACE.unpack_from(data, place)
        magic, size, start = _END64.unpack_from(data, end)
        if magic != b"PK\6\6" or end + _END64.size != place:
            raise ValueError("an archive whose end record is not where it claims")
    if size > _MAX_DIRECTORY or start + size != end:
        raise ValueError(
            f"an archive whose directory claims {size:,} bytes from offset {start:,}; expected at most "
            f"{_MAX_DIRECTORY:,}, ending at {end:,}"
        )
    return data[start : start + size]


def _in_sequence(data: mmap) -> tuple[Any, dict[str, _Part]]:
    """The format before 2020: five pickles, then the data of each storage after its length."""
    stream = BytesIO(data[:MAX_BYTES])
    magic, protocol, system = (read_pickle(stream)[0] for _ in range(3))
    if magic != _MAGIC or protocol != _PROTOCOL:
        raise ValueError("a pickle that torch.save did not write")
    if isinstance(system, dict) and system.get("little_endian") is False:
        raise ValueError(_BYTE_ORDER)
    content, dtypes = read_pickle(stream)
    keys, _ = read_pickle(stream)
    at, parts = stream.tell(), dict[str, _Part]()
    for key in keys if isinstance(keys, list) else ():
        (numel,) = _NUMEL.unpack_from(data, at)
        size = numel * dtypes[key].itemsize if isinstance(key, str) and key in dtypes else -1
        at += _NUMEL.size
        if size < 0 or at + size > len(data) or key in parts:
            raise ValueError("data that is truncated or belongs to no tensor")
        parts[key] = _Part(at, size)
        at += size
    return content, parts
