"""The input of `mae pack`: every image of a source, with its name in the pack."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mae.data.dataset import sampled
from mae.data.dataset.reading import ImageReader
from mae.data.decode.image import HEADER_BYTES, probe, recognise
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.data.items import Names
from mae.data.packs.encodings import Original
from mae.data.sources.huggingface import RowSource
from mae.data.sources.labels import LabelledData
from mae.data.sources.open import Files, directories_of, open_whole
from mae.data.sources.source import TEST, TRAIN, Source
from mae.errors import UsageError
from mae.text import listed

_MAX_KEY = 4000  # bytes; with the extension and a line's end no more than a name in a pack may have


@dataclass(frozen=True, kw_only=True, eq=False)
class PackInput:
    """Images to be packed, by number.

    Attributes:
        name: of the source in the pack, without the folders above it.
        sources: they follow one another.
        keys: directories and stem of each image's name in the pack, all different.
        place: the folder of the images, if they are in one.
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
        """What the image holds, from its header."""
        source, number = self._found(index)
        return ImageReader(source=source).probe(number)

    def original(self, index: int, channels: tuple[str, ...] | None) -> Original:
        """The decoded image.

        Args:
            index: its number.
            channels: the names its channels must have.

        Raises:
            UnreadableImage: it cannot be used.
            UsageError: its channels have other names.
        """
        source, number = self._found(index)
        name, item = source.item_name(number), source.read(number)
        image = ImageReader(source=source).image_of(number, item)
        data = item if isinstance(item, bytes) else None
        info = None if data is None else _tiff_info(data, name)
        names = source.channels or (info.names if info else None)
        if names != channels:
            raise UsageError(f"{name} has {_described(names)}, others have {_described(channels)}; {_NAME_THEM}")
        return Original(name=name, image=image, data=data, nodata=info.nodata if info else source.nodata)

    def fingerprint(self) -> str:
        """16 hexadecimal digits of the items' names, sizes and sampled content, and of their names in the pack."""
        return _digest([*map(sampled.fingerprint, self.sources), *self.keys])

    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, the location or the modification times."""
        return _digest([self.fingerprint(), *(source.version() for source in self.sources)])


_NAME_THEM = "pack images with the same channels, or name them in one channels.txt beside the images"


def open_input(spec: str, *, data_root: Path) -> PackInput:
    """All images of a source, including its test split.

    Raises:
        UsageError: nothing of that name, or no images there.
        MAEError: a known data set that cannot be downloaded.
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
        keys = _unique(map(_key, paths))
    else:
        sources, keys = (opened,), _unique(_keys(opened))
    path = Path(spec)
    # Neither the folders above a path nor the credentials in a URL.
    name = path.resolve().name if path.exists() else spec if isinstance(opened, LabelledData) else opened.name
    return PackInput(name=name, sources=sources, keys=Names(keys), place=path if path.is_dir() else None)


def common_names(
    images: PackInput, looked_at: Iterable[int]
) -> tuple[tuple[str, ...] | None, str | None, frozenset[str]]:
    """What some images' headers say.

    Returns:
        The names of the channels, the first value that means nodata in a file, and what of the files is not read: a
        band taken as `alpha`, or `pages` after the first.

    Raises:
        UsageError: different channel names.
    """
    found: list[ImageInfo] = []
    for index in looked_at:
        try:
            found.append(images.probe(index))
        except UnreadableImage:  # reported when it is packed
            continue
    names = list(dict.fromkeys(info.names for info in found))
    if len(names) > 1:
        raise UsageError(
            f"{images.name} has {_described(names[0])} in some files and {_described(names[1])} in others; {_NAME_THEM}"
        )
    marked = next((info.nodata for info in found if info.nodata is not None), None)
    unread = {"alpha": any(info.alpha for info in found), "pages": any(info.more_pages for info in found)}
    return names[0] if names else None, marked, frozenset(name for name, there in unread.items() if there)


def _described(names: tuple[str, ...] | None) -> str:
    return "unnamed channels" if names is None else f"the channels {listed(names)}"


def _tiff_info(data: bytes, name: str) -> ImageInfo | None:
    """What a TIFF's tags say; None for other formats, which say nothing of channels."""
    return probe(data, name=name) if recognise(data[:HEADER_BYTES], name=name) == "TIFF" else None


def _keys(source: Source) -> Iterator[str]:
    if not isinstance(source, Files):
        return (f"{number:09d}" for number in range(len(source)))
    folders: Iterable[list[str]] = directories_of(source)
    if isinstance(source, RowSource):  # whose classes may be called anything
        folders = [[_folder(part) for part in above] for above in folders]
        splits = (*TRAIN, *TEST)
        if not source.within(splits).any() and any(above and above[0].lower() in splits for above in folders):
            folders = [["train", *above] for above in folders]
    return (
        _key("/".join([*above, name.rsplit("/", 1)[-1]])) for above, name in zip(folders, source.names, strict=True)
    )


def _folder(name: str) -> str:
    """A class's name as that of one folder."""
    return "%2E" * len(name) if name in (".", "..") else name.replace("/", "%2F")


def _key(path: str) -> str:
    """Directories and stem, without parts that lead elsewhere, dots in the stem and unprintable characters.

    webdataset takes everything after a name's first dot for its extension.
    """
    *folders, file = path.split("/")
    stem = os.path.splitext(file)[0].replace(".", "_")
    parts = [part for part in folders if part not in ("", ".", "..")]
    key = "/".join([*parts, stem or "_"])
    key = key if key.isprintable() and "\\" not in key else "".join(map(_printable, key))
    if len(key.encode()) > _MAX_KEY:
        raise UsageError(f"{key[:100]}… is a name of {len(key):,} characters; expected up to {_MAX_KEY:,} bytes")
    return key


def _printable(character: str) -> str:
    if character.isprintable() and character != "\\":
        return character
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogateescape"))


def _unique(keys: Iterable[str]) -> Iterator[str]:
    """Makes keys unique: repeated ones get `_2`, `_3` and so on."""
    seen: set[str] = set()
    numbers: dict[str, int] = {}  # of repeated ones: the last that was given, or each would be counted up to from 1
    for key in keys:
        number, each = numbers.get(key, 1), key
        while each in seen:
            number += 1
            each = f"{key}_{number}"
        if each != key:
            numbers[key] = number
        seen.add(each)
        yield each


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
