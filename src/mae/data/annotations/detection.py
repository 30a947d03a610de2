"""Images with objects that people drew on them, found by looking at a folder."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from jaxtyping import Int64

from mae.data.annotations import coco, voc, yolo
from mae.data.annotations.objects import Objects, RunLengths
from mae.data.annotations.parts import HELD_OUT, held_out, without_images
from mae.data.annotations.written import Written
from mae.data.decode.image import probe
from mae.data.items import pixel_digest
from mae.data.sources.folder import FileSource, count_of
from mae.errors import MAEError, UsageError
from mae.text import listed

LAYOUTS = (
    "expected Annotations/*.xml beside JPEGImages/ (Pascal VOC), labels/*.txt beside images/ with a YAML file of names "
    "(YOLO), or annotations/instances_train*.json or train/_annotations.coco.json (COCO)"
)


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionSplit:
    """Images and the objects of each.

    Attributes:
        source: the images, in files.
        written: of each image, in the same order, what its labels' file says.
        class_names: in the order of their numbers.
        sizes: width and height of each image as its labels' file tells them; 0 where it does not.
        normalised: whether what is written is in shares of the image's sides.
        has_masks: whether every object has an outline.
    """

    source: FileSource
    written: tuple[Objects, ...]
    class_names: tuple[str, ...]
    sizes: Int64[np.ndarray, "n 2"]
    normalised: bool
    has_masks: bool

    @property
    def has_objects(self) -> bool:
        """Whether any object counts: crowds and difficult ones, which are neither learnt nor missed, do not."""
        return not all(objects.crowd.all() for objects in self.written)

    def objects(self, index: int) -> Objects:
        """The objects of an image; boxes are cut at its edges, and those that are empty then are left out.

        Raises:
            MAEError: an image that cannot be read, or of another size than its labels were made for.
        """
        image = self.source.item_name(index)
        info = probe(self.source.read(index), name=image)
        width, height = self.sizes[index].tolist()
        if (width and width != info.width) or (height and height != info.height):
            raise MAEError(
                f"{image}, turned as its EXIF data say, has {info.height} x {info.width} pixels, and its labels are "
                f"for {height} x {width}; expected the same: see 'mae doctor labels'"
            )
        written = self.written[index]
        return (written.scaled(info.width, info.height) if self.normalised else written).within(info.height, info.width)

    def take(self, indices: np.ndarray, note: str) -> Self:
        """The images and their objects at `indices` only."""
        return replace(
            self,
            source=self.source.take(indices, note),
            written=tuple(self.written[index] for index in indices),
            sizes=self.sizes[indices],
        )

    def version(self) -> str:
        """16 hexadecimal digits that change with the images' names, sizes and times, and with their objects."""
        arrays = []
        for objects in self.written:
            arrays += [objects.boxes, objects.classes, objects.crowd]
            for outline in objects.outlines or ():
                arrays += [outline.counts] if isinstance(outline, RunLengths) else list(outline)
        start = [self.source.version(), *self.class_names, str(self.normalised)]
        return pixel_digest([self.sizes, *arrays], start=repr(start)).hex()


@dataclass(frozen=True, kw_only=True, eq=False)
class DetectionData:
    """Images with objects in two parts.

    Attributes:
        train: to learn from.
        test: to be evaluated on.
        note: one line on what was found.
    """

    train: DetectionSplit
    test: DetectionSplit
    note: str

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, in the order of their numbers."""
        return self.train.class_names

    def without(self, numbers: Collection[int]) -> Self:
        """The same without some test images.

        Raises:
            UsageError: none is left.
        """
        test = without_images(self.test, numbers)
        return replace(
            self, test=test, note=f"{self.note}; {count_of(len(numbers), 'test image')} left out: trained on"
        )


def open_detection(spec: str | Path) -> DetectionData:
    """The images and objects of a folder; where it has no test part a fifth of the images is held out.

    Args:
        spec: the folder, in one of the field's layouts.

    Raises:
        UsageError: no such layout, no image with labels, or no classes.
        MAEError: labels that cannot be read, or of a class without a name.
    """
    data = read_detection(spec)
    if data is None:
        raise UsageError(f"{spec} holds no labels of a known kind; {LAYOUTS}")
    if not data.class_names:
        raise UsageError(f"{spec}: the labels name no classes; expected one or more, as in COCO's categories")
    for split in (data.train, data.test):
        for index, objects in enumerate(split.written):
            if (objects.classes < 0).any():
                raise MAEError(
                    f"the labels of {split.source.item_name(index)} hold a class that has no name; expected one of "
                    f"{listed(data.class_names)}: see 'mae doctor labels'"
                )
    return data


def read_detection(spec: str | Path) -> DetectionData | None:
    """`open_detection` of labels that may hold classes without a name, which are -1; None: the folder has none.

    Raises:
        UsageError: no such folder, no image with labels, a class with a blank name, or two classes of one name.
        MAEError: labels that cannot be read.
    """
    root, name = Path(spec), str(spec)
    if not root.is_dir():
        raise UsageError(f"{name} is no folder; labelled images are read from folders: {LAYOUTS}")
    readers = (voc.read, yolo.read, coco.read)
    written = next((found for read in readers if (found := read(root, name=name)) is not None), None)
    return None if written is None else _data(written, name)


def _data(written: Written, name: str) -> DetectionData:
    if blank := [number for number, label in enumerate(written.class_names, start=1) if not label.strip()]:
        raise UsageError(f"{name}: class {blank[0]} of {len(written.class_names)} has no name; give it one")
    if twice := [label for label, count in Counter(written.class_names).items() if count > 1]:
        raise UsageError(f"{name}: two classes are called {twice[0]!r}; give each a name of its own")
    drawn = [objects for part in written.parts.values() for objects in part.objects if len(objects)]
    boxes_alone = sum(objects.outlines is None for objects in drawn)
    has_masks = boxes_alone == 0
    if 0 < boxes_alone < len(drawn):
        remark = f"outlines are not used: {count_of(boxes_alone, 'image')} with boxes alone"
        written = replace(written, remarks=(*written.remarks, remark))
    splits = {
        part: DetectionSplit(
            source=found.source,
            written=tuple(found.objects if has_masks else [replace(one, outlines=None) for one in found.objects]),
            class_names=written.class_names,
            sizes=found.sizes,
            normalised=written.normalised,
            has_masks=has_masks,
        )
        for part, found in written.parts.items()
    }
    if whole := "test" not in splits:
        splits = held_out(splits["train"], name=name, what="labels")
    train, test = (splits[part] for part in ("train", "test"))
    return DetectionData(train=train, test=test, note=_note(written, train, test, held=whole))


def _note(written: Written, train: DetectionSplit, test: DetectionSplit, *, held: bool) -> str:
    objects = sum(len(each) for split in (train, test) for each in split.written)
    classes = "1 class" if len(train.class_names) == 1 else f"{len(train.class_names)} classes"
    text = (
        f"{written.kind}: {count_of(len(train.written), 'training image')} and "
        f"{count_of(len(test.written), 'test image')}{f', {HELD_OUT}' if held else ''}, "
        f"{objects:,} {'outlined objects' if train.has_masks else 'boxes'} of {classes}"
    )
    return "; ".join([text, *written.remarks])
