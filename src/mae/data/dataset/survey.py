"""What the headers of some files say: the format that all images get, and what of the files is not read."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from mae.data.dataset.channels import ImageFormat, choose_channels
from mae.data.dataset.reading import ImageReader
from mae.data.dataset.sampled import sample
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.errors import MAEError, UsageError
from mae.records import PixelDtype
from mae.text import listed

_SURVEYED = 256
_SHOWN = 5
_FLOAT32 = np.dtype(np.float32)
_NAMES: tuple[PixelDtype, ...] = get_args(PixelDtype)
_SIZE_RANK = tuple(np.dtype(name) for name in _NAMES)


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The headers of some files, and by number what is wrong with those that cannot be read."""

    infos: list[ImageInfo]
    broken: dict[int, str]

    @property
    def pixel_dtype(self) -> PixelDtype:
        """The widest type of the files; of integers and raw floats, which do not mix, what most of them hold."""
        floats = 2 * sum(info.dtype == _FLOAT32 for info in self.infos) > len(self.infos)
        return _widest(info.dtype for info in self.infos if (info.dtype == _FLOAT32) is floats)

    @property
    def widest_dtype(self) -> PixelDtype:
        """The widest type of the files, for a model to whose unit all are converted."""
        return _widest(info.dtype for info in self.infos)


def _widest(dtypes: Iterable[np.dtype]) -> PixelDtype:
    return _NAMES[max(map(_SIZE_RANK.index, dtypes))]


def survey_headers(reader: ImageReader) -> Survey:
    """Reads the headers of up to 256 files.

    Raises:
        MAEError: none of them can be read.
    """
    source, infos, broken = reader.source, [], dict[int, str]()
    for index in sorted(sample(source, 0, 0, _SURVEYED).tolist()):
        try:
            infos.append(reader.probe(index))
        except UnreadableImage as error:
            broken[index] = str(error)
    if not infos:
        raise MAEError(
            f"{source.name}: none of the {len(broken):,} sampled images can be read: "
            f"{'; '.join(list(broken.values())[:_SHOWN])}"
        )
    return Survey(infos=infos, broken=broken)


def _common_channels(infos: Sequence[ImageInfo]) -> int:
    found = Counter(info.channels for info in infos)
    most = max(found, key=lambda channels: (found[channels], channels))
    return 3 if most == 1 and found[3] else most


def _names(infos: Sequence[ImageInfo], *, name: str) -> tuple[str, ...] | None:
    """The channels' names; None where nothing names them. Only files with the most common number of channels count."""
    commonest = Counter(info.channels for info in infos).most_common(1)[0][0]
    named = Counter(info.names for info in infos if info.channels == commonest)
    names, other = [*(names for names, _ in named.most_common(2)), None][:2]
    if len(named) == 1:
        return names
    first, second = ("without names" if each is None else listed(each) for each in (names, other))
    raise UsageError(
        f"{name}: the channels are {first} in some files and {second} in others; keep files with the same channels, "
        "or name them all in one channels.txt beside the images"
    )


def notices(infos: Sequence[ImageInfo], channels: int) -> Iterator[str]:
    """What of the files is not read where images have so many channels, a line each; see `ImageSet.left_out`."""
    bands = Counter(info.channels + 1 for info in infos if info.alpha and info.channels + 1 != channels)
    if bands:
        (most, _), count = bands.most_common(1)[0], bands.total()
        yield (
            f"the last band of {count:,} of {len(infos):,} sampled files is taken as alpha and composited over white; "
            f"to keep it as a channel: --in-chans {most}"
        )
    if count := sum(info.more_pages for info in infos):
        yield (
            f"{count:,} of {len(infos):,} sampled files are TIFFs with several pages, of which only the first is read; "
            "put bands into one page (tifffile: photometric='minisblack', planarconfig='separate' or 'contig') and "
            "each image of a stack into its own file"
        )


def resolve_format(
    survey: Survey,
    in_chans: int | None,
    wanted: Sequence[str] | None,
    nodata: str | None,
    pixel_dtype: PixelDtype | None,
    *,
    name: str,
) -> tuple[ImageFormat, tuple[str, ...] | None]:
    """The format of all images, and the names of the channels they then have; arguments as of `load_images`.

    Raises:
        UsageError: files with different channel names, a name that does not exist, or other than `in_chans` names.
    """
    infos = survey.infos
    if wanted is not None and in_chans not in (None, len(wanted)):
        raise UsageError(f"{name}: --in-chans is {in_chans}, and --channels names {len(wanted)}; expected as many")
    found = _names(infos, name=name)
    names, picked = choose_channels(found, wanted, name=name)
    if in_chans is None:
        in_chans = _common_channels(infos) if names is None else len(names)
    dtype = np.dtype(survey.pixel_dtype if pixel_dtype is None else survey.widest_dtype)
    converted = nodata is not None or pixel_dtype == "float32"
    image_format = ImageFormat(
        channels=in_chans,
        dtype=_FLOAT32 if converted else dtype,
        picked=picked,
        named=found,
        own_names=any(info.own_names for info in infos),
        missing=None if nodata is None else float(nodata),
        integers=np.dtype(pixel_dtype or dtype).kind == "u",
        pixel_dtype=pixel_dtype,
    )
    return image_format, names if names is not None and len(names) == in_chans else None
