"""A source opened for use: one number of channels, one dtype, decoded into memory when it is small enough."""

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property

import numpy as np
import psutil
import torch
from jaxtyping import Float32, Int64, UInt8
from torch import Tensor

from mae.data.dataset.channel_stats import Moments, join, moments_of, no_moments
from mae.data.dataset.channels import ImageFormat
from mae.data.dataset.decoded import DecodedImages, decode_all, load_image, load_reduced, num_threads, try_image
from mae.data.dataset.reading import ImageReader, Reduction, WholeSize
from mae.data.dataset.sampled import Sampled, sample, sampled
from mae.data.dataset.survey import Survey, notices, resolve_format, survey_headers
from mae.data.dataset.unreadable import UnreadableFiles
from mae.data.decode.limits import ImageInfo, UnreadableImage
from mae.data.items import fingerprint_of
from mae.data.sources.source import Source
from mae.errors import MAEError
from mae.records import PixelDtype
from mae.text import without_common_folders

_STATISTICS_SEED = 0


class ImageSet:
    """Images by number, with one number of channels and one dtype; made by `load_images`.

    Every item of the source has its number here, whether it can be read or not, so that what a run trains on does
    not depend on how much of the set fits in memory.

    Attributes:
        name: the source's name.
        channels: C of every image.
        channel_names: their names, in order; None where nothing names them.
        nodata: the value that means nodata in the files, as text; such values are NaN in the images. None: no value.
        dtype: the type of the files; images are given as uint8, or as float32 for the other two. float32 where values
            may be missing, or are converted to another unit than their files'.
        pixel_dtype: the unit of the values, see `MethodConfig`: that of the model the images were opened for, else that
            of the files.
        found_dtypes: the types of the files that were sampled when the set was opened.
        most_bytes: of pixels that are decoded for an image, by the files that were sampled; 0 for images in memory.
        left_out: what is not read of these files, a band taken as alpha or further pages: each in a line, with how to
            keep it after a semicolon.
    """

    def __init__(
        self,
        *,
        reader: ImageReader,
        image_format: ImageFormat,
        survey: Survey,
        channel_names: tuple[str, ...] | None,
        nodata: str | None,
        decoded: DecodedImages | None,
        broken: dict[int, str],
        sizes: np.ndarray,
        unreadable: UnreadableFiles,
    ) -> None:
        self.name = reader.source.name
        self.channels = image_format.channels
        self.channel_names = channel_names
        self.nodata = nodata
        self.dtype = image_format.dtype
        self.pixel_dtype: PixelDtype = image_format.pixel_dtype or survey.pixel_dtype
        self.found_dtypes = frozenset(info.dtype for info in survey.infos)
        self.most_bytes = 0 if decoded is not None else max(info.num_bytes for info in survey.infos)
        self.left_out = tuple(notices(survey.infos, image_format.channels))
        self._reader, self._source, self._format = reader, reader.source, image_format
        self._decoded = decoded
        self._broken = broken
        self._sizes = sizes
        self._unreadable = unreadable

    def __len__(self) -> int:
        return len(self._source)

    @cached_property
    def readable(self) -> Int64[Tensor, " n"]:
        """The numbers of the images that are not known to be broken since the set was opened."""
        return torch.from_numpy(_without(len(self), self._broken))

    @cached_property
    def block_sizes(self) -> Int64[Tensor, " b"] | None:
        """See `Source.block_sizes`."""
        sizes = self._source.block_sizes
        return None if sizes is None else torch.from_numpy(sizes.astype(np.int64))

    @property
    def cache_footprint(self) -> tuple[int, int] | None:
        """See `Source.cache_footprint`; None for images in memory, which are fetched once."""
        return None if self.in_memory else self._source.cache_footprint

    def sample(self, seed: int, epoch: int, count: int) -> Int64[Tensor, " n"]:
        """Numbers of `count` images, or of all if there are fewer; see `mae.data.dataset.sampled.sample`."""
        return sample(self._source, seed, epoch, count)

    def prefetch(self, blocks: Sequence[int], *, then: Sequence[int]) -> None:
        """See `Source.prefetch`; does nothing for images in memory."""
        if not self.in_memory:
            self._source.prefetch(blocks, then=then)

    @property
    def in_memory(self) -> bool:
        """Whether all images are decoded in memory."""
        return self._decoded is not None

    @property
    def is_integer(self) -> bool:
        """Whether values are those of integer files, given as uint8 or scaled to [0, 1]."""
        return self._format.integers

    @property
    def unreadable(self) -> list[str]:
        """What is wrong with each unreadable file met so far, one message a file."""
        return list(self._unreadable.messages)

    def get(self, index: int) -> UInt8[Tensor, "C h w"] | Float32[Tensor, "C h w"]:
        """One image: uint8 0..255; float32 in [0, 1] for 16-bit data; float32 raw values for the rest; NaN for nodata.

        In the unit of the model that the set was opened for, if any: uint8 or float32.

        The uint8 tensor may be a view of shared memory: do not write to it.

        Raises:
            UnreadableImage: the file cannot be used.
        """
        if self._decoded is not None:
            if index in self._broken:
                raise UnreadableImage(self._broken[index])
            pixels = self._decoded.image(index)
        else:
            pixels = load_image(self._reader, index, self._format)
        if self.dtype == np.uint16:
            pixels = pixels.astype(np.float32)
            pixels /= np.float32(65535)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def get_reduced(self, index: int, reduction: Reduction) -> tuple[UInt8[Tensor, "C h w"], WholeSize]:
        """One image of a set of uint8, of a JPEG no larger than it needs to be; always from the source.

        Args:
            index: of the image.
            reduction: see `ImageReader.load_reduced`.

        Raises:
            UnreadableImage: the file cannot be used.
        """
        pixels, whole = load_reduced(self._reader, index, self._format, reduction)
        return torch.from_numpy(pixels).permute(2, 0, 1), whole

    def probe(self, index: int) -> ImageInfo:
        """What the file of an image holds, from its header; see `ImageReader.probe`."""
        return self._reader.probe(index)

    def item_name(self, index: int) -> str:
        """The file, member or element an image comes from, for messages."""
        return self._source.item_name(index)

    def short_names(self, indices: Iterable[int]) -> list[str]:
        """What some images are called beside each other: their names without the folders that all of these are in."""
        return without_common_folders([self.item_name(index) for index in indices])

    def report_unreadable(self, messages: Iterable[str]) -> None:
        """Counts files that a loader could not read, each once.

        Raises:
            MAEError: more of them than `max_unreadable` allows.
        """
        self._unreadable.add(messages)
        self._unreadable.check()

    def statistics(self, limit: int = 2000) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and std of each channel, over the whole pixels of up to `limit` images.

        In the units of a batch: integers scaled to [0, 1], float data as they are. A constant channel gets the median
        std of the others: normalising it gives zeros, and an error in it counts as in those.

        Args:
            limit: how many images to read; unreadable ones are skipped.

        Raises:
            MAEError: every channel is constant, or no image can be read.
        """
        count, mean, squares = self.moments(limit)
        std = np.sqrt(squares / np.maximum(count, 1))
        # A constant channel's mean is off by a rounding error, and so its std is not exactly zero.
        varies = std > 1e-12 * np.abs(mean)
        if not varies.any():
            raise MAEError(f"{self.name}: every sampled pixel has the same value; expected images with content")
        std = np.where(varies, std, np.median(std[varies]))
        return tuple(float(value) for value in mean), tuple(float(value) for value in std)

    def moments(self, limit: int) -> Moments:
        """Those of up to `limit` images together, in the units of a batch; unreadable ones are skipped."""
        total = no_moments(self.channels)
        with ThreadPoolExecutor(num_threads()) as pool:
            for moments in pool.map(self._moments, self.sample(_STATISTICS_SEED, 0, limit).tolist()):
                total = join(total, moments)
        return total

    def size_range(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Height and width of the smallest and the largest image by area, among those sampled at the start."""
        order = np.argsort(self._sizes.prod(axis=1), kind="stable")
        smallest, largest = self._sizes[order[0]], self._sizes[order[-1]]
        return (int(smallest[0]), int(smallest[1])), (int(largest[0]), int(largest[1]))

    def fingerprint(self) -> str:
        """16 hexadecimal digits that change with the source's items and with what is made of them.

        Of items without checksums the content of `sampled` ones is compared.
        """
        return self._as_opened(fingerprint_of([self._listed, *self.sampled.contents]))

    def version(self) -> str:
        """16 hexadecimal digits that change with the `fingerprint`, the location or the modification times."""
        return self._as_opened(fingerprint_of([self._source.version(), *self.sampled.contents]))

    @property
    def listing(self) -> str:
        """16 hexadecimal digits of names, sizes and known checksums: the `fingerprint` as far as no item is read."""
        return self._as_opened(self._listed)

    @cached_property
    def sampled(self) -> Sampled:
        """The content of some items."""
        return sampled(self._source)

    @cached_property
    def _listed(self) -> str:
        return self._source.fingerprint()  # takes seconds for millions of names

    def _as_opened(self, source: str) -> str:
        """A digest of the source's and of the format that its images are brought to."""
        opened = f"{source} {self.channels} {self.dtype}"
        if self._format.picked is not None or self.nodata is not None:
            opened += f" {self._format.picked} {self.nodata}"
        if self._format.pixel_dtype is not None:
            opened += f" in the unit of {self._format.pixel_dtype}"
        return hashlib.sha256(opened.encode()).hexdigest()[:16]

    def _moments(self, index: int) -> Moments:
        try:
            return moments_of(self.get(index))
        except UnreadableImage:
            return no_moments(self.channels)


def load_images(
    source: Source,
    *,
    in_chans: int | None,
    channels: Sequence[str] | None = None,
    nodata: str | None = None,
    pixel_dtype: PixelDtype | None = None,
    max_unreadable: float = 0.001,
    memory_limit: int | None = None,
    processes: int = 1,
) -> ImageSet:
    """Opens a source: reads some headers, then decodes everything into memory if it is small enough.

    Args:
        source: where the images are.
        in_chans: channels of every image; None takes what most of the files have, and 3 where grey and colour mix.
        channels: which of them by name, in order; None: all. Where nothing names them, these are their names.
        nodata: the value that means nodata, a number or `nan`; None: every value is a measurement.
        pixel_dtype: of the model that the images are for, to whose unit files of any type are converted; None: they
            keep their own, and integers and raw float values do not mix.
        max_unreadable: fraction of the files, 0 to 1, that may be unreadable.
        memory_limit: bytes that decoded images may take; never more than a quarter of the free memory is used.
        processes: of this machine that do the same and share that quarter.

    Raises:
        UsageError: a channel name that does not exist, or fewer or more names than `in_chans`.
        MAEError: more unreadable files than allowed, or no readable one.
    """
    unreadable = UnreadableFiles(name=source.name, total=len(source), max_unreadable=max_unreadable)
    reader = ImageReader(source=source, bands=in_chans if channels is None else len(channels))
    survey = survey_headers(reader)
    image_format, names = resolve_format(survey, in_chans, channels, nodata, pixel_dtype, name=source.name)
    reader = replace(reader, bands=image_format.channels if image_format.named is None else len(image_format.named))
    sizes = np.array([(info.height, info.width) for info in survey.infos])
    free = psutil.virtual_memory().available // (4 * processes)
    limit = free if memory_limit is None else min(memory_limit, free)
    image_bytes = sizes.prod(axis=1).mean() * image_format.channels * image_format.dtype.itemsize
    broken: dict[int, str] = {}
    small = int(image_bytes * len(source)) < limit
    decoded = decode_all(reader, image_format, broken, unreadable, limit) if small else None
    if decoded is None:
        # By loading them, so that the message is the one a training step will meet, and counts once.
        for index in survey.broken:
            try_image(reader, index, image_format, broken)
        unreadable.add(broken.values())
        unreadable.check()
    else:
        sizes = decoded.shapes[_without(len(source), broken), :2]
    if len(broken) == len(source):
        raise MAEError(f"{source.name}: none of {len(source):,} images can be read: {broken[min(broken)]}")
    return ImageSet(
        reader=reader,
        image_format=image_format,
        survey=survey,
        channel_names=names,
        nodata=nodata,
        decoded=decoded,
        broken=broken,
        sizes=sizes,
        unreadable=unreadable,
    )


def _without(length: int, broken: Iterable[int]) -> np.ndarray:
    return np.delete(np.arange(length), list(broken))
