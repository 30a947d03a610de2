"""Images with a mask each, which has the class of every pixel: found by looking at a folder."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

import numpy as np
from jaxtyping import UInt8

from mae.data.annotations.parts import HELD_OUT, PARTS, below, check_one_each, first, held_out, without_images
from mae.data.annotations.pixel_classes import PixelClasses, packed, pixel_classes, read_classes, tells_colours
from mae.data.annotations.written import left_out
from mae.data.decode.image import decode_mask, probe
from mae.data.decode.limits import check_num_bytes
from mae.data.items import fingerprint_of
from mae.data.sources.folder import FileSource, count_of, is_image, open_folder, walk
from mae.errors import MAEError, UsageError

_IMAGES = ("images", "image", "imgs", "img", "jpegimages")
_MASKS = ("masks", "mask", "labels", "label", "annotations", "segmentationclass", "gt")
_BESIDE = "annot"
"""SegNet's folders: `train/` has images, `trainannot/` their masks."""
_LAYOUTS = (
    "expected images/ and masks/ with files of the same names, in the folder itself or in train/ and val/ of it; or "
    "both with train/ and val/ in them"
)
_SCANNED = 32
"""Masks whose names tell how masks are called, and whose kinds are looked at."""
CLASSES = "classes.txt"


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentationSplit:
    """Images and the mask of each.

    Attributes:
        source: the images, in files.
        masks: of each image, in the same order.
        classes: what the values in the masks stand for.
    """

    source: FileSource
    masks: tuple[Path, ...]
    classes: PixelClasses

    def labels(self, index: int) -> UInt8[np.ndarray, "H W"]:
        """The class of each pixel of an image; `IGNORED` where there is none.

        Raises:
            MAEError: a mask that cannot be read, with unknown values, or of another size than its image.
        """
        path, image = self.masks[index], self.source.item_name(index)
        mask = read_mask(path)
        info = probe(self.source.read(index), name=image)
        if mask.shape[:2] != (info.height, info.width):
            raise MAEError(
                f"{path} has {mask.shape[0]} x {mask.shape[1]} pixels, and {image}, turned as its EXIF data say, "
                f"{info.height} x {info.width}; expected a mask of the image's size"
            )
        return self.classes.of(mask, name=str(path))

    def take(self, indices: np.ndarray, note: str) -> Self:
        """The images and masks at `indices` only."""
        return type(self)(
            source=self.source.take(indices, note), masks=tuple(self.masks[i] for i in indices), classes=self.classes
        )

    def version(self) -> str:
        """16 hexadecimal digits that change with the images' names, sizes and times, and with the masks'."""
        status = [path.stat() for path in self.masks]
        names = [self.source.version(), repr(self.classes), *map(str, self.masks)]
        sizes, times = ([getattr(each, field) for each in status] for field in ("st_size", "st_mtime_ns"))
        return fingerprint_of(names, np.array([0, 0, *sizes]), np.array([0, 0, *times]))


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentationData:
    """Images with masks in two parts.

    Attributes:
        train: to learn from.
        test: to be evaluated on.
        note: one line on what was found.
    """

    train: SegmentationSplit
    test: SegmentationSplit
    note: str

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, in the order of their numbers."""
        return self.train.classes.names

    def without(self, numbers: Collection[int]) -> Self:
        """The same without some test images.

        Raises:
            UsageError: none is left.
        """
        test = without_images(self.test, numbers)
        return replace(
            self, test=test, note=f"{self.note}; {count_of(len(numbers), 'test image')} left out: trained on"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Paired:
    """Images, the mask of each, how many images without one were left out, and how many masks without an image."""

    images: FileSource
    masks: tuple[Path, ...]
    left: int
    alone: int


def read_mask(path: Path) -> np.ndarray:
    """The values in a mask's file; see `decode_mask`.

    Raises:
        MAEError: it cannot be read.
    """
    try:
        check_num_bytes(path.stat().st_size, name=str(path))
        return decode_mask(path.read_bytes(), name=str(path))
    except OSError as error:
        raise MAEError(f"{path} cannot be read: {error.strerror}") from error


def open_segmentation(spec: str | Path, *, ignore: Collection[int] = ()) -> SegmentationData:
    """The images and masks of a folder; where it has no test part a fifth of the images is held out.

    Args:
        spec: the folder. Beside the images' folders may lie `classes.txt`, see `read_classes`; without it the classes
            are the numbers in the masks.
        ignore: numbers in the masks that do not count, beside 255 and classes called unlabelled or void.

    Raises:
        UsageError: no such layout, no image with a mask, or classes that are not known.
        MAEError: a mask that cannot be read.
    """
    name = str(spec)
    paired, listed = find_masks(spec)
    coloured, found = _values(paired["train"].masks, listed)
    classes = pixel_classes(listed, found, coloured=coloured, ignore=ignore, name=name)
    splits = {
        part: SegmentationSplit(source=pairs.images, masks=pairs.masks, classes=classes)
        for part, pairs in paired.items()
    }
    if "test" not in splits:
        splits = held_out(splits["train"], name=name, what="a mask")
    return SegmentationData(**splits, note=_note(splits, classes, paired))


def find_masks(spec: str | Path) -> tuple[dict[str, Paired], dict[str, int | None] | None]:
    """The images with masks of each part, no mask read; and what `read_classes` gives, None without `classes.txt`.

    Raises:
        UsageError: no such layout, or no image with a mask.
    """
    root, name = Path(spec), str(spec)
    if not root.is_dir():
        raise UsageError(f"{name} is no folder; images with masks are read from folders: {_LAYOUTS}")
    parts = _parts(root, name)
    listed = read_classes(path) if (path := _classes_file(root, parts.values())) is not None else None
    return {part: _paired(*folders, name=name) for part, folders in parts.items()}, listed


def _note(splits: dict[str, SegmentationSplit], classes: PixelClasses, parts: Mapping[str, Paired]) -> str:
    train, test = (len(splits[part].masks) for part in ("train", "test"))
    held = "" if "test" in parts else f", {HELD_OUT}"
    remarks = left_out(sum(pairs.left for pairs in parts.values()), "without a mask")
    remarks += left_out(sum(pairs.alone for pairs in parts.values()), "without an image", of="mask")
    kind = "colours" if classes.coloured else "numbers"
    text = (
        f"{count_of(train, 'training image')} and {count_of(test, 'test image')}{held}, masks of {kind}, "
        f"{len(classes.names)} classes"
    )
    return "; ".join([text, *remarks])


def _pair(folder: Path) -> tuple[Path, Path] | None:
    there = below(folder)
    images, masks = first(there, _IMAGES), first(there, _MASKS)
    return None if images is None or masks is None else (images, masks)


def _parts(root: Path, name: str) -> dict[str, tuple[Path, Path]]:
    """The folders of images and of masks of each part: `train`, and `test` where there is one."""
    there = below(root)
    if (both := _pair(root)) is not None:
        images, masks = map(below, both)
        # By one name: masks of test/ are not those of val/, though their files may be called alike.
        shared = {
            part: next((name for name in names if name in images and name in masks), None) for part, names in PARTS
        }
        found = {part: (images[name], masks[name]) for part, name in shared.items() if name is not None}
        return found if len(found) == 2 else {"train": both}
    parts: dict[str, tuple[Path, Path]] = {}
    for part, names in PARTS:
        if (folder := first(there, names)) is None:
            continue
        beside = there.get(f"{folder.name.lower()}{_BESIDE}")
        if (pair := _pair(folder) if beside is None else (folder, beside)) is not None:
            parts[part] = pair
    if "train" not in parts:
        folders = ", ".join(f"{folder}/" for folder in there) or "no folders"
        raise UsageError(f"{name} holds {folders}; {_LAYOUTS}")
    return parts


def _paired(folder: Path, masks: Path, *, name: str) -> Paired:
    """The images that have a mask.

    Raises:
        UsageError: no image has one, or it cannot be told which mask is whose.
    """
    images = open_folder(folder, name=str(folder))
    by_stem: dict[str, str] = {}
    for path, _, _ in walk(masks):
        if is_image(path) and (stem := _stem(path)) in by_stem:
            raise UsageError(f"{masks} holds {by_stem[stem]} and {path}; expected one mask for each image")
        elif is_image(path):
            by_stem[stem] = path
    stems = [_stem(image) for image in images.names]
    before, after = _affixes(stems, by_stem)
    found = [by_stem.get(_called(stem, before, after)) for stem in stems]
    rows = np.array([row for row, path in enumerate(found) if path is not None], dtype=np.int64)
    if not len(rows):
        example = f"{images.names[0]}, {next(iter(by_stem.values()))}" if by_stem else "no mask"
        raise UsageError(
            f"{name}: no image of {folder} has a mask in {masks} ({example}); expected files of the same names, such "
            "as images/1.jpg and masks/1.png or masks/1_mask.png"
        )
    pairs = zip(images.names, found, strict=True)
    check_one_each(folder, ((image, f"the mask {mask}") for image, mask in pairs if mask is not None))
    kept = images if len(rows) == len(stems) else images.take(rows, f"{count_of(len(rows), 'image')} with a mask")
    of_kept = tuple(masks / path for path in found if path is not None)
    return Paired(images=kept, masks=of_kept, left=len(stems) - len(rows), alone=len(by_stem) - len(rows))


def _stem(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


def _called(stem: str, before: str, after: str) -> str:
    folder, slash, name = stem.rpartition("/")
    return f"{folder}{slash}{before}{name}{after}"


def _affixes(stems: Sequence[str], masks: Collection[str]) -> tuple[str, str]:
    """What masks have before and after the names of their images, such as `_mask`: the commonest."""
    if any(stem in masks for stem in stems):
        return "", ""
    counts: Counter[tuple[str, str]] = Counter()
    for stem in stems[:_SCANNED]:
        name = stem.rpartition("/")[2]
        for mask in masks:
            before, found, after = mask.rpartition("/")[2].partition(name)
            if found:
                counts[before, after] += 1
    return counts.most_common(1)[0][0] if counts else ("", "")


def _classes_file(root: Path, parts: Iterable[tuple[Path, Path]]) -> Path | None:
    """The list of classes: in the folder itself, or beside the masks."""
    places = [root, *(masks for _, masks in parts)]
    return next((place / CLASSES for place in places if (place / CLASSES).is_file()), None)


def _values(masks: Sequence[Path], listed: Mapping[str, int | None] | None) -> tuple[bool, set[int]]:
    """Whether masks hold colours, and the values in them.

    Args:
        masks: to look at; without a list all of them, for all their values.
        listed: what `classes.txt` tells, None where there is none.
    """
    found: set[int] = set()
    # Three channels that are alike are numbers, or nothing but background among colours.
    coloured, told = False, tells_colours(listed)
    for path in masks if listed is None else masks[:_SCANNED]:
        mask = read_mask(path)
        if mask.ndim == 3 and (told or not (mask == mask[:, :, :1]).all()):
            coloured = True
        found.update(np.unique(packed(mask) if mask.ndim == 3 and coloured else mask).tolist())
    return coloured, found
