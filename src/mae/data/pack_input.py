"""What `mae pack` packs: every image of a source, with the name it gets in the pack."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mae.data import sampled
from mae.data.base import LabelledData, Names, Source
from mae.data.decoding import HEADER_BYTES, decode, probe, recognise
from mae.data.limits import ImageInfo, UnreadableImage
from mae.data.pack_forms import Original
from mae.data.sources import Files, directories_of, open_whole
from mae.errors import UsageError

_MAX_KEY = 4000  # bytes; with the extension and a line's end no more than a name in a pack may have


@dataclass(frozen=True, kw_only=True, eq=False)
class PackInput:
    """Images to be packed, by number.

    Attributes:
        name: what the source is called in the pack, without the folders that lead there.
        sources: they come one after another.
        keys: directories and stem of each image's name in the pack, all different.
        place: the folder of the images, where they lie in one.
    """

    name: str
    sources: tuple[Source, ...]
    keys: Names
    place: Path | None

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(source) for source in self.sources])

    def _found(self, index: int) -> tuple[Source, int]:
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[number], index - int(self._ends[number]) + len(self.sources[number])

    def item_name(self, index: int) -> str:
        """The file, member or element, for messages."""
        source, number = self._found(index)
        return source.item_name(number)

    def probe(self, index: int) -> ImageInfo:
        """What the image holds, by its header."""
        source, number = self._found(index)
        return source.probe(number)

    def original(self, index: int, channels: tuple[str, ...] | None) -> Original:
        """The image, wholly decoded.

        Args:
            index: its number.
            channels: what its channels must be called.

        Raises:
            UnreadableImage: it cannot be used.
            UsageError: its channels are called otherwise.
        """
        source, number = self._found(index)
        name, data = source.item_name(number), _file(source, number)
        beside = getattr(source, "channels", None)
        bands = getattr(source, "bands", None)
        image = source.load(number) if data is None else decode(data, name=name, bands=bands)
        if beside is not None and len(beside) != image.shape[2]:
            raise UnreadableImage(f"{name} has {image.shape[2]} channels, {len(beside)} are named; expected as many")
        info = source.probe(number) if data is None else _told_by(data, name)
        names = beside or (info.names if info else None)
        if names != channels:
            raise UsageError(f"{name} has {_told(names)}, others have {_told(channels)}; {_NAME_THEM}")
        return Original(
            name=name, image=image, data=data, no_data=info.no_data if info else getattr(source, "no_data", None)
        )

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the items' names, sizes and sampled content, and of their names in the pack."""
        return _digest([*map(sampled.fingerprint, self.sources), *self.keys])

    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, and with the place or times of the last change."""
        return _digest([self.fingerprint(), *(source.version() for source in self.sources)])


_NAME_THEM = "pack images of the same channels, or name these in one channels.txt beside the images"


def open_input(spec: str, *, data_root: Path) -> PackInput:
    """All images of a source, those of its test part too.

    Raises:
        UsageError: nothing of that name, or no images there.
        MAEError: a known data set that cannot be had.
    """
    opened = open_whole(spec, data_root=data_root)
    if isinstance(opened, LabelledData):
        parts = {"train": opened.train, "test": opened.test}
        sources: tuple[Source, ...] = tuple(split.source for split in parts.values())
        paths = [
            f"{part}/{opened.class_names[label]}/{number:06d}"
            for part, split in parts.items()
            for number, label in enumerate(split.labels.tolist())
        ]
        keys = _different(map(_key, paths))
    else:
        sources, keys = (opened,), _different(_keys(opened))
    path = Path(spec)
    # Neither the folders above a path nor what a URL may hold besides its place.
    name = path.resolve().name if path.exists() else spec if isinstance(opened, LabelledData) else opened.name
    return PackInput(name=name, sources=sources, keys=Names(keys), place=path if path.is_dir() else None)


def common_names(
    images: PackInput, looked_at: Iterable[int]
) -> tuple[tuple[str, ...] | None, str | None, frozenset[str]]:
    """What some images' headers say.

    Returns:
        What the channels are called, the first value that a file says stands for no measurement, and what of the files
        is not read: `alpha`, a band that is taken as that; `pages` behind the first.

    Raises:
        UsageError: the channels are not called alike.
    """
    found: list[ImageInfo] = []
    for index in looked_at:
        try:
            found.append(images.probe(index))
        except UnreadableImage:  # told when it is packed
            continue
    names = list(dict.fromkeys(info.names for info in found))
    if len(names) > 1:
        raise UsageError(
            f"{images.name} has {_told(names[0])} in some files, {_told(names[1])} in others; {_NAME_THEM}"
        )
    marked = next((info.no_data for info in found if info.no_data is not None), None)
    unread = {"alpha": any(info.alpha for info in found), "pages": any(info.more_pages for info in found)}
    return names[0] if names else None, marked, frozenset(name for name, there in unread.items() if there)


def _told(names: tuple[str, ...] | None) -> str:
    return "channels without names" if names is None else f"the channels {', '.join(names)}"


def _file(source: Source, index: int) -> bytes | None:
    """The image's file; None where it lies in none."""
    read = getattr(source, "read", None)
    return None if read is None else read(index)


def _told_by(data: bytes, name: str) -> ImageInfo | None:
    """What a file says of its channels; only TIFF says anything."""
    return probe(data, name=name) if recognise(data[:HEADER_BYTES], name=name) == "TIFF" else None


def _keys(source: Source) -> Iterator[str]:
    if not isinstance(source, Files):
        return (f"{number:09d}" for number in range(len(source)))
    folders = directories_of(source)
    return (
        _key("/".join([*above, name.rsplit("/", 1)[-1]])) for above, name in zip(folders, source.names, strict=True)
    )


def _key(path: str) -> str:
    """Directories and stem, without what leads elsewhere, dots in the stem and signs that cannot be printed.

    Readers of webdataset take everything behind a name's first dot for its kind.
    """
    *folders, file = path.split("/")
    stem = os.path.splitext(file)[0].replace(".", "_")
    parts = [part for part in folders if part not in ("", ".", "..")]
    key = "/".join([*parts, stem or "_"])
    key = key if key.isprintable() and "\\" not in key else "".join(map(_printable, key))
    if len(key.encode()) > _MAX_KEY:
        raise UsageError(f"{key[:100]}… is a name of {len(key):,} characters; a pack takes up to {_MAX_KEY:,} bytes")
    return key


def _printable(sign: str) -> str:
    if sign.isprintable() and sign != "\\":
        return sign
    return "".join(f"%{byte:02X}" for byte in sign.encode("utf-8", "surrogateescape"))


def _different(keys: Iterable[str]) -> Iterator[str]:
    """Keys that were there before get `_2`, `_3` and so on."""
    seen: set[str] = set()
    for key in keys:
        number, each = 1, key
        while each in seen:
            number += 1
            each = f"{key}_{number}"
        seen.add(each)
        yield each


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
