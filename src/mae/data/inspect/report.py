"""Inspecting some images before a run for what would make it worthless or unexpected.

Images are read one by one and discarded; a hash, an outline and some numbers a channel are kept of each.
"""

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from math import inf

import numpy as np
import torch
from jaxtyping import Bool, Float32, Float64, Int64
from torch import Tensor

from mae.data.dataset.channel_stats import join, no_moments
from mae.data.dataset.decoded import num_threads
from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import UnreadableImage
from mae.data.inspect.look import Contents, Look, look_at
from mae.data.inspect.near_duplicates import Copies, copies, near, same
from mae.data.loading.loader import normalise
from mae.data.loading.worker import CropDataset, one_thread
from mae.errors import MAEError, UsageError
from mae.modalities.images.crop import Augmentation
from mae.randomness import permutation, sample_keys

AT_LEAST = 16
"""Images that are inspected however long they take: a check of none would find nothing wrong."""

ELONGATED = 3.0
"""Longer side over shorter from which an image is extreme: a square crop shows a third of it at most."""

NEARLY_CONSTANT = 0.03
"""Std of an image as a fraction of the set's: 2 of 255 levels among photographs, like a dark frame's noise."""

_SHOWN = 3
_SELDOM = 1e-3  # share of all values; a hot pixel is less
_NOT_FINITE = "infinite values; expected finite ones"  # as `ImageFormat` words it


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Images of one type and number of channels, before the set brought them to its own.

    Attributes:
        dtype: uint8, uint16 or float32.
        channels: how many.
        images: how many of those looked at are of this kind.
    """

    dtype: str
    channels: int
    images: int


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Heights and widths in pixels, ordered by area.

    Attributes:
        smallest: of the smallest image.
        median: of the one in the middle.
        largest: of the largest image.
        smaller: fraction of images, 0 to 1, with a side shorter than a crop's, which are upscaled.
        elongated: fraction of images, 0 to 1, whose longer side is over `ELONGATED` times the shorter.
    """

    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    smaller: float
    elongated: float


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What one channel holds. Each image counts alike, whatever its size.

    Attributes:
        low: fraction of values, 0 to 1, that are the type's smallest; 0 for raw float values.
        high: the same of its largest, 255 or 65535.
        largest: the largest value as a fraction of the type's range, 0 to 1; None for raw float values.
        varies: whether any two values differ.
        mean: of the run's own crops, normalised; 0 is expected.
        std: std of the same; 1 is expected.
        mean_error: standard error of `mean`, from how much the images differ; infinite for a single image.
        std_error: the same of `std`.
        whole_mean: of the whole images, pixel by pixel, normalised alike; 0 where the statistics are these images' own.
        whole_std: std of the same; 1 where they are.
    """

    low: float
    high: float
    largest: float | None
    varies: bool
    mean: float
    std: float
    mean_error: float
    std_error: float
    whole_mean: float
    whole_std: float


@dataclass(frozen=True, kw_only=True)
class DataReport:
    """What a set of images holds, by those looked at.

    Attributes:
        name: the set's name.
        total: how many images there are.
        looked_at: how many were looked at.
        unreadable: how many of those could not be read.
        messages: what was wrong with the first few.
        not_finite: how many of the unreadable hold NaN or infinite values.
        kinds: types and channels of the files, most frequent first; without those whose header cannot be read.
        dtype: the type they are brought to.
        pixel_dtype: the type of the files that values have the range of; unlike `dtype` also where some are missing.
        nodata: the value that means nodata, as given to the run; None: none was given.
        missing: fraction of values, 0 to 1, that are such; each image counts alike.
        marked: values that files themselves mark as nodata, most frequent first.
        apart: of raw float values the smallest or the largest one, where it lies further from all others than these lie
            from each other, and its fraction of the values; None: there is none, or too rarely.
        img_size: height and width of the crops in pixels.
        sizes: of the readable images.
        channels: each channel.
        constant: how many images hold one value a channel.
        nearly_constant: how many others have a std below `NEARLY_CONSTANT` of the set's.
        duplicates: images of the same pixels.
        near_duplicates: images that are not the same and have the same outlines, as a picture saved anew or resized;
            cut or mirrored copies do not.
        left_out: see `ImageSet.left_out`.
    """

    name: str
    total: int
    looked_at: int
    unreadable: int
    messages: tuple[str, ...]
    not_finite: int
    kinds: tuple[Kind, ...]
    dtype: str
    pixel_dtype: str
    nodata: str | None
    missing: float
    marked: tuple[str, ...]
    apart: tuple[float, float] | None
    img_size: tuple[int, int]
    sizes: Sizes
    channels: tuple[Channel, ...]
    constant: int
    nearly_constant: int
    duplicates: Copies
    near_duplicates: Copies
    left_out: tuple[str, ...] = ()


def inspect_images(
    images: ImageSet,
    *,
    img_size: tuple[int, int],
    mean: Sequence[float],
    std: Sequence[float],
    seed: int,
    limit: int = 256,
    seconds: float = 8.0,
) -> DataReport:
    """Looks at some images as they lie in the files and as a run's first epoch would show them.

    Args:
        images: the set; nothing is counted against its share of unreadable files.
        img_size: height and width of the run's crops in pixels.
        mean: of each channel, what the run subtracts.
        std: of each channel, what it then divides by.
        seed: the run's; which images are looked at and how they are cropped depend on it.
        limit: how many images to look at.
        seconds: after these no further image is begun, beyond the first `AT_LEAST`.

    Raises:
        UsageError: not one mean and one std a channel.
        MAEError: no inspected image can be read.
    """
    if not len(mean) == len(std) == images.channels:
        raise UsageError(
            f"{images.name} has {images.channels} channels, and there are {len(mean)} means and {len(std)} "
            f"stds; expected one of each per channel: use --statistics data"
        )
    chosen = permutation(seed, 0, len(images))[:limit]
    keys = sample_keys(seed, 0, chosen).tolist()
    crops = CropDataset(images=images, numbers=chosen, img_size=img_size, augmentation=Augmentation())
    end = time.monotonic() + seconds

    def look(position: int, number: int, key: int) -> Look | None:
        if position >= AT_LEAST and time.monotonic() > end:
            return None
        return look_at(images, number, lambda: _crop(crops, number, key, mean, std))

    # Each crop sets PyTorch's threads to one and back, which from several threads at once must find one there.
    with one_thread(), ThreadPoolExecutor(num_threads()) as pool:
        found = [seen for seen in pool.map(look, range(len(keys)), chosen.tolist(), keys) if seen is not None]
    if all(seen.problem for seen in found):
        raise MAEError(
            f"{images.name}: none of {len(found):,} inspected images can be read; check that the files are still "
            f"there: {found[0].problem}"
        )
    return _report(images, found, img_size, (np.array(mean), np.array(std)))


def _crop(
    crops: CropDataset, number: int, key: int, mean: Sequence[float], std: Sequence[float]
) -> Float32[Tensor, "C H W"]:
    """The image as a training step of the first epoch would get it, by that step's own code."""
    piece = crops[[number], [key]]
    if piece.images is None:
        raise UnreadableImage(piece.unreadable[0])
    return normalise(piece.images, torch.tensor(mean), torch.tensor(std))[0]


def _apart(contents: Sequence[Contents]) -> tuple[float, float] | None:
    """See `DataReport.apart`."""
    both = list(zip(*(of.ends for of in contents if of.ends is not None), strict=True))
    if not both:
        return None
    for ends, opposite, sign in ((both[0], both[1], 1), (both[1], both[0], -1)):
        value, furthest = min(end.value for end in ends), -min(end.value for end in opposite)
        following = min(end.value if end.value > value else end.following for end in ends)
        share = sum(end.share for end in ends if end.value == value) / len(ends)
        # Others of one value, as those of a mask, lie nowhere from each other.
        if share >= _SELDOM and 0 < furthest - following < following - value < inf:
            return sign * value, share
    return None


def _report(
    images: ImageSet, found: Sequence[Look], img_size: tuple[int, int], statistics: tuple[np.ndarray, np.ndarray]
) -> DataReport:
    problems = [seen.problem for seen in found if seen.problem]
    read = [seen for seen in found if not seen.problem]
    seen_whole = [(seen.number, seen.contents) for seen in read if seen.contents is not None]
    numbers, contents = [number for number, _ in seen_whole], [of for _, of in seen_whole]
    count, mean, squares = reduce(join, (of.whole for of in contents), no_moments(images.channels))
    std = np.sqrt(squares / np.maximum(count, 1))
    constant, nearly = _plain(contents, std)
    whole = (mean - statistics[0]) / statistics[1], std / statistics[1]
    infos = [seen.info for seen in read if seen.info is not None]
    kinds = Counter((str(info.dtype), info.channels) for info in infos)
    marked = Counter(info.nodata for info in infos if info.nodata is not None)
    duplicates, near_duplicates = _copies(images, numbers, contents, ~(constant | nearly))
    return DataReport(
        name=images.name,
        total=len(images),
        looked_at=len(found),
        unreadable=len(problems),
        messages=tuple(problems[:_SHOWN]),
        not_finite=sum(_NOT_FINITE in problem for problem in problems),
        kinds=tuple(Kind(dtype=dtype, channels=many, images=n) for (dtype, many), n in kinds.most_common()),
        dtype=str(images.dtype),
        pixel_dtype=images.pixel_dtype,
        left_out=images.left_out,
        nodata=images.nodata,
        missing=float(np.mean([of.missing for of in contents])),
        marked=tuple(value for value, _ in marked.most_common()),
        apart=_apart(contents),
        img_size=img_size,
        sizes=_sizes(np.array([seen.size for seen in read]), img_size),
        channels=_channels(contents, whole, bounded=images.is_integer),
        constant=int(constant.sum()),
        nearly_constant=int(nearly.sum()),
        duplicates=duplicates,
        near_duplicates=near_duplicates,
    )


def _sizes(sizes: Int64[np.ndarray, "n 2"], img_size: tuple[int, int]) -> Sizes:
    order = np.argsort(sizes.prod(axis=1), kind="stable")
    smallest, median, largest = (tuple(sizes[order[at]].tolist()) for at in (0, len(order) // 2, -1))
    return Sizes(
        smallest=smallest,
        median=median,
        largest=largest,
        smaller=float((sizes < img_size).any(axis=1).mean()),
        elongated=float((sizes.max(axis=1) > ELONGATED * sizes.min(axis=1)).mean()),
    )


def _plain(
    contents: Sequence[Contents], whole: Float64[np.ndarray, " C"]
) -> tuple[Bool[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Which images hold one value a channel, and which others nearly do in every channel, whose std is `whole`."""
    constant = np.array([(of.smallest == of.largest).all() for of in contents], dtype=bool)
    stds = [np.sqrt(of.whole[2] / np.maximum(of.whole[0], 1)) for of in contents]
    nearly = np.array([(std <= NEARLY_CONSTANT * whole).all() for std in stds], dtype=bool)
    return constant, nearly & ~constant


def _channels(
    contents: Sequence[Contents], whole: tuple[np.ndarray, np.ndarray], *, bounded: bool
) -> tuple[Channel, ...]:
    """What each channel holds; `whole` are mean and std of all values, normalised."""
    low, high = (np.mean([getattr(of, end) for of in contents], axis=0) for end in ("low", "high"))
    smallest, largest = (
        np.min([of.smallest for of in contents], axis=0),
        np.max([of.largest for of in contents], axis=0),
    )
    counts, means, squares = (np.stack(part) for part in zip(*(of.crop for of in contents), strict=True))
    weights = counts / np.maximum(counts.mean(axis=0), 1)  # crops have as many pixels, but for those without data
    mean = (weights * means).mean(axis=0)
    means = np.where(counts > 0, means, mean)
    # Each crop's part in the variance about the common mean.
    spreads = weights * (squares / np.maximum(counts, 1) + (means - mean) ** 2)
    std = np.sqrt(spreads.mean(axis=0))
    mean_error, spread_error = (_standard_error(each) for each in (means, spreads))
    return tuple(
        Channel(
            low=float(low[c]),
            high=float(high[c]),
            largest=float(largest[c]) if bounded else None,
            varies=bool(smallest[c] < largest[c]),
            mean=float(mean[c]),
            std=float(std[c]),
            mean_error=float(mean_error[c]),
            std_error=float(spread_error[c] / (2 * std[c])) if std[c] else 0.0,
            whole_mean=float(whole[0][c]),
            whole_std=float(whole[1][c]),
        )
        for c in range(len(mean))
    )


def _standard_error(values: Float64[np.ndarray, "n C"]) -> Float64[np.ndarray, " C"]:
    if len(values) == 1:
        return np.full(values.shape[1], np.inf)
    return values.std(axis=0, ddof=1) / np.sqrt(len(values))


def _copies(
    images: ImageSet, numbers: list[int], contents: Sequence[Contents], pictured: Bool[np.ndarray, " n"]
) -> tuple[Copies, Copies]:
    """Duplicates, and near ones among the `pictured` that are not the same: what is plain has no outline."""
    alike = same([of.digest for of in contents])
    firsts = [group[0] for group in alike if pictured[group[0]]]
    pairs, groups = near(np.stack([of.outline for of in contents])[firsts])
    sample = {"looked_at": len(contents), "total": len(images)}

    def name(place: int) -> str:
        return images.item_name(numbers[place])

    return (
        copies(alike, pairs=sum(len(group) * (len(group) - 1) // 2 for group in alike), name=name, **sample),
        copies([[firsts[place] for place in group] for group in groups], pairs=pairs, name=name, **sample),
    )
