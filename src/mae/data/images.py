"""A source opened for use: one number of channels, one type, and decoded in memory when it is small enough."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

import numpy as np
import psutil
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from mae.data.base import Source, fingerprint_of
from mae.data.forms import Form, choose_channels
from mae.data.limits import ImageInfo, UnreadableImage
from mae.data.moments import Moments, join, moments_of, no_moments
from mae.data.sampled import Sampled, first_of, sampled
from mae.errors import MAEError, UsageError
from mae.randomness import Stream, permutation
from mae.records import PixelDtype

_SURVEYED = 256
_SAMPLED_BLOCKS = 8  # a shard of a pack is a fair sample of it, and each of them may have to be fetched
_CHUNK = 64
_STATISTICS_SEED = 0
_SHOWN = 5
_FLOAT32 = np.dtype(np.float32)
_NAMES: tuple[PixelDtype, ...] = get_args(PixelDtype)
_SIZE_RANK = tuple(np.dtype(name) for name in _NAMES)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Decoded:
    """Images `[h, w, C]` of any sizes one after another in one array, which forked processes share.

    An image that could not be read has the shape (0, 0, 0).
    """

    pixels: np.ndarray
    offsets: np.ndarray
    shapes: np.ndarray

    def image(self, index: int) -> np.ndarray:
        shape = tuple(int(side) for side in self.shapes[index])
        start = int(self.offsets[index])
        return self.pixels[start : start + int(np.prod(shape))].reshape(shape)


class ImageSet:
    """Images by number, of one number of channels and one type; made by `load_images`.

    Every item of the source has its number here, whether it can be read or not, so that what a run trains on does
    not depend on how much of the set fits in memory.

    Attributes:
        name: the source's name.
        channels: C of every image.
        channel_names: what they are called, in order; None where nothing names them.
        no_data: what stands for no measurement in the files, as text; such values are NaN in the images. None: nothing.
        dtype: the type the files hold; images are given as uint8, or as float32 for the other two. float32 where values
            may be missing, or are brought to another unit than their files'.
        pixel_dtype: tells the unit of the values, see `ModelConfig`: that of the model the images were opened for, else
            that of the files.
        found_dtypes: the types that the files looked at when the set was opened hold.
        left_out: what of these files is not read, a band that is taken as alpha or further pages: each in a line, with
            how to keep it behind a semicolon.
    """

    def __init__(
        self,
        *,
        source: Source,
        form: Form,
        survey: "_Survey",
        channel_names: tuple[str, ...] | None,
        no_data: str | None,
        decoded: _Decoded | None,
        broken: dict[int, str],
        sizes: np.ndarray,
        ledger: "_Ledger",
    ) -> None:
        self.name = source.name
        self.channels = form.channels
        self.channel_names = channel_names
        self.no_data = no_data
        self.dtype = form.dtype
        self.pixel_dtype: PixelDtype = form.pixel_dtype or survey.pixel_dtype
        self.found_dtypes = frozenset(info.dtype for info in survey.infos)
        self.left_out = (*_told_of_alpha(survey.infos, form.channels), *_told_of_pages(survey.infos))
        self._source, self._form = source, form
        self._decoded = decoded
        self._broken = broken
        self._sizes = sizes
        self._ledger = ledger

    def __len__(self) -> int:
        return len(self._source)

    @cached_property
    def readable(self) -> Int64[Tensor, " n"]:
        """The numbers of the images that are not known to be broken since the set was opened."""
        return torch.from_numpy(_without(len(self), self._broken))

    @cached_property
    def block_sizes(self) -> Int64[Tensor, " b"] | None:
        """How many images lie in each block of the source, in order, as in the shards of a pack; None: not in blocks.

        A block is best read as a whole: it may have to be fetched.
        """
        return _block_sizes(self._source)

    @property
    def fetched(self) -> tuple[int, int] | None:
        """Bytes of the largest block, and bytes that the cache may hold which blocks are fetched into; None: into none.

        Images in memory are fetched once.
        """
        return None if self.in_memory else getattr(self._source, "fetched", None)

    def sample(self, seed: int, epoch: int, count: int) -> Int64[Tensor, " n"]:
        """Numbers of `count` images, or of all if they are fewer, chosen by a key; of few blocks where there are any.

        Of images in blocks those of eight are chosen from, or of as many as it takes.
        """
        return _sample(self._source, seed, epoch, count)

    def bring_near(self, blocks: Sequence[int], *, then: Sequence[int]) -> None:
        """Have some blocks on this machine before they are read, if they have to come from elsewhere.

        Args:
            blocks: numbers of those that are about to be read.
            then: of those that come after them.

        Raises:
            MAEError: they cannot be had.
        """
        # Not of the protocol, since the images of most sources are where they are.
        bring_near = getattr(self._source, "bring_near", None)
        if bring_near is not None and not self.in_memory:
            bring_near(blocks, then=then)

    @property
    def in_memory(self) -> bool:
        """Whether all images lie decoded in memory."""
        return self._decoded is not None

    @property
    def is_integer(self) -> bool:
        """Whether values are those of integer files, given as uint8 or scaled to [0, 1]."""
        return self._form.integers

    @property
    def unreadable(self) -> list[str]:
        """What was wrong with each unreadable file met so far, one message a file."""
        return list(self._ledger.messages)

    def get(self, index: int) -> UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]:
        """One image: uint8 0..255; float32 in [0, 1] for 16-bit data; float32 raw values for the rest; NaN: no data.

        In the unit of a model that the set was opened for: uint8 or float32.

        The uint8 tensor may be a view of shared memory: do not write to it.

        Raises:
            UnreadableImage: the file cannot be used.
        """
        if self._decoded is not None:
            if index in self._broken:
                raise UnreadableImage(self._broken[index])
            pixels = self._decoded.image(index)
        else:
            pixels = _load(self._source, index, self._form)
        if self.dtype == np.uint16:
            pixels = pixels.astype(np.float32)
            pixels /= np.float32(65535)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def probe(self, index: int) -> ImageInfo:
        """What the file of an image holds, by its header; see `Source.probe`."""
        return self._source.probe(index)

    def item_name(self, index: int) -> str:
        """The file, member or element an image comes from, for messages."""
        return self._source.item_name(index)

    def report_unreadable(self, messages: Iterable[str]) -> None:
        """Counts files that a loader could not read, each once.

        Raises:
            MAEError: more of them than `max_unreadable` allows.
        """
        self._ledger.add(messages)
        self._ledger.check()

    def statistics(self, limit: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, over the whole pixels of up to `limit` images.

        In the units of a batch: integers scaled to [0, 1], float data as they are. A channel that is constant
        gets a deviation of 1, so that normalising it gives zeros.

        Args:
            limit: how many to look at; unreadable ones are passed over.

        Raises:
            MAEError: every channel is constant, or no image could be read.
        """
        count, mean, squares = self.moments(limit)
        deviation = np.sqrt(squares / np.maximum(count, 1))
        # A constant channel's mean is off by a rounding error, and so is its deviation from zero.
        varies = deviation > 1e-12 * np.abs(mean)
        if not varies.any():
            raise MAEError(f"{self.name}: every pixel looked at has the same value; expected images with content")
        std = np.where(varies, deviation, 1.0)
        return tuple(float(value) for value in mean), tuple(float(value) for value in std)

    def moments(self, limit: int) -> Moments:
        """Those of up to `limit` images together, in the units of a batch; unreadable ones are passed over."""
        total = no_moments(self.channels)
        with ThreadPoolExecutor(_threads()) as pool:
            for moments in pool.map(self._moments, self.sample(_STATISTICS_SEED, 0, limit).tolist()):
                total = join(total, moments)
        return total

    def size_range(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of the smallest and of the largest image by area, among those looked at at the start."""
        order = np.argsort(self._sizes.prod(axis=1), kind="stable")
        smallest, largest = self._sizes[order[0]], self._sizes[order[-1]]
        return (int(smallest[0]), int(smallest[1])), (int(largest[0]), int(largest[1]))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the source's items and with what is made of them.

        Of items that have no checksum the content of `sampled` ones is compared.
        """
        return self._made_of(fingerprint_of([self._listed, *self.sampled.contents]))

    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, and with the place or times of the last change."""
        return self._made_of(fingerprint_of([self._source.version(), *self.sampled.contents]))

    @property
    def listing(self) -> str:
        """16 hexadecimal digits of the fingerprint for which no item is read: names, sizes and known checksums."""
        return self._made_of(self._listed)

    @cached_property
    def sampled(self) -> Sampled:
        """What some of the items hold."""
        return sampled(self._source)

    @cached_property
    def _listed(self) -> str:
        return self._source.fingerprint()  # of millions of names it takes seconds

    def _made_of(self, source: str) -> str:
        made = f"{source} {self.channels} {self.dtype}"
        if self._form.picked is not None or self.no_data is not None:
            made += f" {self._form.picked} {self.no_data}"
        if self._form.pixel_dtype is not None:
            made += f" in the unit of {self._form.pixel_dtype}"
        return hashlib.sha256(made.encode()).hexdigest()[:16]

    def _moments(self, index: int) -> Moments:
        try:
            return moments_of(self.get(index))
        except UnreadableImage:
            return no_moments(self.channels)


class _Ledger:
    """Which files of a source could not be read, and how many may be."""

    def __init__(self, *, name: str, total: int, max_unreadable: float) -> None:
        self.messages: dict[str, None] = {}
        self._name, self._total, self._share = name, total, max_unreadable

    def add(self, messages: Iterable[str]) -> None:
        self.messages.update(dict.fromkeys(messages))

    def check(self) -> None:
        if len(self.messages) <= self._share * self._total:
            return
        shown = "; ".join(list(self.messages)[:_SHOWN])
        more = f"; and {len(self.messages) - _SHOWN} more" if len(self.messages) > _SHOWN else ""
        raise MAEError(
            f"{self._name}: {len(self.messages):,} of {self._total:,} images cannot be used, over the allowed share "
            f"of {self._share:g}: {shown}{more}. Remove these files; to pre-train without them raise --max-unreadable"
        )


def load_images(
    source: Source,
    *,
    in_chans: int | None,
    channels: Sequence[str] | None = None,
    no_data: str | None = None,
    pixel_dtype: PixelDtype | None = None,
    max_unreadable: float = 0.001,
    memory_limit: int | None = None,
    processes: int = 1,
) -> ImageSet:
    """Opens a source: looks at some headers, then decodes everything into memory if it is small enough.

    Args:
        source: where the images are.
        in_chans: channels of every image; None takes what most of the files have, and 3 where grey and colour mix.
        channels: which of them by name, in order; None: all. Where nothing names them, these are their names.
        no_data: the value that stands for no measurement, a number or `nan`; None: every value is one.
        pixel_dtype: of the model that the images are for, to whose unit files of any type are then brought; None: they
            keep their own, and integers and raw float values do not mix.
        max_unreadable: share of the files, 0 to 1, that may be unreadable.
        memory_limit: bytes that decoded images may take; never more than a quarter of the free memory is used.
        processes: of this machine that do the same and share that quarter.

    Raises:
        UsageError: a channel of a name that is not there, or fewer or more names than `in_chans`.
        MAEError: more unreadable files than allowed, or no readable one.
    """
    ledger = _Ledger(name=source.name, total=len(source), max_unreadable=max_unreadable)
    source = _with_bands(source, in_chans if channels is None else len(channels))
    survey = _survey(source)
    form, names = _settled(survey, in_chans, channels, no_data, pixel_dtype, name=source.name)
    source = _with_bands(source, form.channels if form.named is None else len(form.named))
    sizes = np.array([(info.height, info.width) for info in survey.infos])
    free = psutil.virtual_memory().available // (4 * processes)
    limit = free if memory_limit is None else min(memory_limit, free)
    estimate = int(sizes.prod(axis=1).mean() * form.channels * form.dtype.itemsize * len(source))
    broken: dict[int, str] = {}
    decoded = _decode_all(source, form, broken, ledger, limit) if estimate < limit else None
    if decoded is None:
        # By loading them, so that the message is the one a training step will meet, and counts once.
        for index in survey.broken:
            _attempt(source, index, form, broken)
        ledger.add(broken.values())
        ledger.check()
    else:
        sizes = decoded.shapes[_without(len(source), broken), :2]
    if len(broken) == len(source):
        raise MAEError(f"{source.name}: none of {len(source):,} images could be read")
    return ImageSet(
        source=source,
        form=form,
        survey=survey,
        channel_names=names,
        no_data=no_data,
        decoded=decoded,
        broken=broken,
        sizes=sizes,
        ledger=ledger,
    )


def _without(length: int, broken: Iterable[int]) -> np.ndarray:
    return np.delete(np.arange(length), list(broken))


def _block_sizes(source: Source) -> Int64[Tensor, " b"] | None:
    # Not of the protocol, since most sources have none.
    sizes = getattr(source, "block_sizes", None)
    return None if sizes is None else torch.from_numpy(np.asarray(sizes, dtype=np.int64))


def _sample(source: Source, seed: int, epoch: int, count: int) -> Int64[Tensor, " n"]:
    sizes = _block_sizes(source)
    if sizes is None:
        return first_of(seed, epoch, len(source), count)
    blocks = permutation(seed, epoch, len(sizes), Stream.BLOCKS)
    enough = int(torch.searchsorted(sizes[blocks].cumsum(0), count)) + 1
    starts = sizes.cumsum(0) - sizes
    chosen = blocks[: max(enough, _SAMPLED_BLOCKS)]
    pool = torch.cat([starts[block] + torch.arange(int(sizes[block])) for block in chosen])
    return pool[first_of(seed, epoch, len(pool), count)]


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """The headers of some files, and what was wrong with those that could not be read, by number."""

    infos: list[ImageInfo]
    broken: dict[int, str]

    @property
    def pixel_dtype(self) -> PixelDtype:
        """The widest type of the files."""
        widest = max((info.dtype for info in self.infos), key=_SIZE_RANK.index)
        return _NAMES[_SIZE_RANK.index(widest)]


def _survey(source: Source) -> _Survey:
    infos, broken = [], {}
    for index in sorted(_sample(source, 0, 0, _SURVEYED).tolist()):
        try:
            infos.append(source.probe(index))
        except UnreadableImage as error:
            broken[index] = str(error)
    if not infos:
        raise MAEError(
            f"{source.name}: none of {len(broken):,} images looked at could be read: "
            f"{'; '.join(list(broken.values())[:_SHOWN])}"
        )
    return _Survey(infos=infos, broken=broken)


def _common_channels(infos: Sequence[ImageInfo]) -> int:
    found = Counter(info.channels for info in infos)
    most = max(found, key=lambda channels: (found[channels], channels))
    return 3 if most == 1 and found[3] else most


def _names(infos: Sequence[ImageInfo], *, name: str) -> tuple[str, ...] | None:
    """What the channels are called; None where nothing says it. Only files with the commonest number have a say."""
    commonest = Counter(info.channels for info in infos).most_common(1)[0][0]
    named = Counter(info.names for info in infos if info.channels == commonest)
    names, other = [*(names for names, _ in named.most_common(2)), None][:2]
    if len(named) == 1:
        return names
    first, second = ("without names" if each is None else ", ".join(each) for each in (names, other))
    raise UsageError(
        f"{name}: the channels are {first} in some files, {second} in others; give those with the same ones, or name "
        "them all in one channels.txt beside the images"
    )


def _with_bands(source: Source, bands: int | None) -> Source:
    """The source, told how many channels are wanted where it reads files that none names: alpha may be one of them."""
    if bands is None or not hasattr(source, "bands") or getattr(source, "channels", None) is not None:
        return source
    return replace(source, bands=bands)  # type: ignore[type-var]


def _told_of_alpha(infos: Sequence[ImageInfo], channels: int) -> Iterator[str]:
    bands = Counter(info.channels + 1 for info in infos if info.alpha and info.channels + 1 != channels)
    if bands:
        (most, _), count = bands.most_common(1)[0], bands.total()
        yield (
            f"the last band of {count:,} of {len(infos):,} files looked at counts as alpha and is composited over "
            f"white; to keep it as a channel: --in-chans {most}"
        )


def _told_of_pages(infos: Sequence[ImageInfo]) -> Iterator[str]:
    if count := sum(info.more_pages for info in infos):
        yield (
            f"{count:,} of {len(infos):,} files looked at are TIFFs of several pages, of which the first alone is "
            "read; bands go into one page (tifffile: photometric='minisblack', planarconfig='separate' or 'contig'), "
            "images of a stack into a file each"
        )


def _settled(
    survey: _Survey,
    in_chans: int | None,
    wanted: Sequence[str] | None,
    no_data: str | None,
    pixel_dtype: PixelDtype | None,
    *,
    name: str,
) -> tuple[Form, tuple[str, ...] | None]:
    """What all images are brought to, and the names of the channels that they then have."""
    infos = survey.infos
    if wanted is not None and in_chans not in (None, len(wanted)):
        raise UsageError(f"{name}: {in_chans} channels are asked for and {len(wanted)} are named; expected as many")
    found = _names(infos, name=name)
    names, picked = choose_channels(found, wanted, name=name)
    if in_chans is None:
        in_chans = _common_channels(infos) if names is None else len(names)
    dtype = np.dtype(survey.pixel_dtype)
    converted = no_data is not None or pixel_dtype == "float32"
    form = Form(
        channels=in_chans,
        dtype=_FLOAT32 if converted else dtype,
        picked=picked,
        named=found,
        own_names=any(info.own_names for info in infos),
        missing=None if no_data is None else float(no_data),
        integers=np.dtype(pixel_dtype or dtype).kind == "u",
        pixel_dtype=pixel_dtype,
    )
    return form, names if names is not None and len(names) == in_chans else None


def _load(source: Source, index: int, form: Form) -> np.ndarray:
    image, name = source.load(index), source.item_name(index)
    if form.named is not None and form.own_names and (names := source.probe(index).names) != form.named:
        told = "no names" if names is None else ", ".join(names)
        raise UnreadableImage(f"{name} has the channels {told}; the others have {', '.join(form.named)}")
    image = form.of(image, name=name)
    return image if image.flags.writeable else image.copy()  # torch warns of arrays it may not write to


def _attempt(source: Source, index: int, form: Form, broken: dict[int, str]) -> np.ndarray | None:
    """The image; None, and a message in `broken`, if it cannot be used."""
    try:
        return _load(source, index, form)
    except UnreadableImage as error:
        broken[index] = str(error)
        return None


def _decode_all(source: Source, form: Form, broken: dict[int, str], ledger: "_Ledger", limit: int) -> _Decoded | None:
    """All images; None if they turn out to need more than `limit` bytes. What cannot be read goes into `broken`."""
    nothing = np.empty((0, 0, 0), form.dtype)
    shapes: list[tuple[int, ...]] = []
    pieces: list[np.ndarray] = []
    num_bytes = 0
    with ThreadPoolExecutor(_threads()) as pool:
        for start in range(0, len(source), _CHUNK):
            numbers = range(start, min(start + _CHUNK, len(source)))
            results = list(pool.map(lambda index: _attempt(source, index, form, broken), numbers))
            ledger.add(broken[number] for number in numbers if number in broken)
            ledger.check()
            images = [nothing if result is None else result for result in results]
            shapes += [image.shape for image in images]
            pieces.append(np.concatenate([image.ravel() for image in images]))
            num_bytes += pieces[-1].nbytes
            # Joining the pieces takes the same again for a moment, which a quarter of the free memory allows.
            if num_bytes > limit:
                return None
    sides = np.array(shapes, dtype=np.int64).reshape(-1, 3)
    offsets = np.concatenate([[0], np.cumsum(sides.prod(axis=1))[:-1]])
    return _Decoded(pixels=np.concatenate(pieces), offsets=offsets, shapes=sides)


def _threads() -> int:
    return min(os.cpu_count() or 1, 16)
