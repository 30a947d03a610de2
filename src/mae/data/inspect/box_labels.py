"""Silent faults in boxes and outlines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from mae.data.annotations.detection import DetectionData, DetectionSplit
from mae.data.annotations.objects import RunLengths
from mae.data.inspect.labelled_images import (
    Level,
    Seen,
    copies,
    fault,
    in_both_parts,
    look_at,
    names_of,
    sizes,
    unreadable,
    without_labels,
)
from mae.findings import Finding

_SWAPPED = 0.2
"""Share of boxes beyond their image from which they may be corners written for sizes: real boxes cross few edges."""
_FITTING = 0.9
"""Share of these that fit their image as corners: a few are wrong in another way too."""
_SLACK = 1.0
"""Pixels that a box may reach over an edge: rounding, and pixels counted from 1."""
_LEAST = 1.0
"""Pixels of a side from which a box is one; a click without a drag leaves less."""


def inspect_boxes(data: DetectionData) -> list[Finding]:
    """Findings on images with objects, see `read_detection`; every image is decoded."""
    parts = (data.train, data.test)
    seen = [look_at(part.source) for part in parts]
    everything, names = seen[0] + seen[1], names_of(data.train) + names_of(data.test)
    told = [(height, width) for part in parts for width, height in part.sizes.tolist()]
    return [
        Finding(name="labels", level="ok", value=data.note),
        unreadable(everything),
        *sizes(everything, told, files=names),
        _unnamed(data, names),
        *_findings(_boxes_of(parts, everything, names)),
        _masks(parts, everything, names),
        _empty_images(parts),
        in_both_parts(data.class_names, *(_counts(part) for part in parts)),
        *copies(*seen),
    ]


def _unnamed(data: DetectionData, names: Sequence[str]) -> Finding:
    written = data.train.written + data.test.written
    found = [name for name, objects in zip(names, written, strict=True) for _ in range((objects.classes < 0).sum())]
    return fault(
        "classes",
        found,
        of=sum(map(len, written)),
        what="objects are of a class without a name, in the labels of",
        advice=f"name {len(data.class_names)} classes or more, or take these objects out: now there are "
        f"{', '.join(data.class_names[:8])}",
        level="stop",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Boxes:
    """The boxes of all images that can be read, as they are written.

    Attributes:
        edges: left, top, right and bottom.
        sides: width and height of the image that they were made for, in pixels.
        names: of the image of each.
        normalised: whether edges are shares of the sides.
    """

    edges: Float64[np.ndarray, "n 4"]
    sides: Int64[np.ndarray, "n 2"]
    names: list[str]
    normalised: bool

    def told(self, name: str, which: np.ndarray, what: str, advice: str, level: Level | None = None) -> Finding:
        """A finding on some of the boxes."""
        found = [self.names[row] for row in np.flatnonzero(which)]
        return fault(name, found, of=len(self.names), what=f"boxes {what}", advice=advice, level=level)


def _boxes_of(parts: Sequence[DetectionSplit], seen: Sequence[Seen | str], names: Sequence[str]) -> _Boxes:
    written = [objects.boxes for part in parts for objects in part.written]
    told = [size for part in parts for size in part.sizes.tolist()]
    edges, sides, of = [np.zeros((0, 4))], [], []
    for image, name, boxes, (width, height) in zip(seen, names, written, told, strict=True):
        if isinstance(image, Seen):
            edges.append(boxes.astype(np.float64))
            sides += [[width or image.width, height or image.height]] * len(boxes)
            of += [name] * len(boxes)
    normalised = parts[0].normalised
    return _Boxes(
        edges=np.concatenate(edges),
        sides=np.array(sides, dtype=np.int64).reshape(-1, 2),
        names=of,
        normalised=normalised,
    )


def _findings(boxes: _Boxes) -> list[Finding]:
    """Boxes that are no shares, no width and height, outside of their image or empty; each is told once."""
    if not boxes.names:
        return []
    normalised, sides = boxes.normalised, boxes.sides
    limits = np.ones_like(sides) if normalised else sides
    slack = _SLACK / sides if normalised else np.full(sides.shape, _SLACK)
    low, high = boxes.edges[:, :2], boxes.edges[:, 2:]
    size, middle = high - low, (low + high) / 2
    no_shares = ((size > 1 + slack) | (middle > 1 + slack)).any(axis=1) & normalised
    beyond = ((low < -slack) | (high > limits + slack)).any(axis=1) & ~no_shares
    first, second = (middle, size) if normalised else (low, size)  # the four numbers as the file has them
    corners = ((first < second) & (second <= limits + slack) & (first >= -slack)).all(axis=1)
    is_swapped = bool(beyond.mean() > _SWAPPED and corners[beyond].mean() > _FITTING)
    empty = (size * (sides if normalised else 1) <= _LEAST).any(axis=1)
    written_as = "middle, width and height" if normalised else "left, top, width and height"
    fits = "reach out of their image, and would fit if two corners were written"
    anew = "they are cut at its edges, and left out where nothing remains: export them anew"
    return [
        boxes.told("shares of the sides", no_shares, "are over 1", "divide by the image's width and height", "stop"),
        boxes.told("corners", beyond & is_swapped, fits, f"write {written_as} of each box, not two corners", "stop"),
        boxes.told("boxes outside", beyond & ~empty & (not is_swapped), "reach out of their image", anew),
        boxes.told(
            "empty boxes", empty & (not is_swapped), "are no larger than a pixel", "remove them: they are clicks"
        ),
    ]


def _masks(parts: Sequence[DetectionSplit], seen: Sequence[Seen | str], names: Sequence[str]) -> Finding:
    """Run lengths for another size than the image's."""
    found = []
    written = [objects for part in parts for objects in part.written]
    for image, name, objects in zip(seen, names, written, strict=True):
        masks = [outline for outline in objects.outlines or () if isinstance(outline, RunLengths)]
        found += [name for mask in masks if isinstance(image, Seen) and (mask.height, mask.width) != image.size]
    advice = "export the masks for these images anew"
    of = sum(map(len, written))
    return fault("mask sizes", found, of=of, what="masks are of another size than", advice=advice, level="stop")


def _empty_images(parts: Sequence[DetectionSplit]) -> Finding:
    written = [objects for part in parts for objects in part.written]
    for part, name in zip(parts, ("train", "test"), strict=True):
        if not part.has_objects:
            return Finding(
                name="images without labels",
                level="stop",
                value=f"no image of the {name} part has an object that counts",
                advice="see whether these are the right labels, and whether all are crowds or difficult",
            )
    return without_labels(sum(not len(objects) for objects in written), len(written), what="have no object")


def _counts(part: DetectionSplit) -> np.ndarray:
    classes = np.concatenate([objects.classes for objects in part.written])
    return np.bincount(classes[classes >= 0], minlength=len(part.class_names))
