"""The objects that people drew on an image: boxes, classes and outlines."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import numpy as np
from jaxtyping import Bool, Float32, Int64
from skimage.draw import polygon

from mae.data.decode.limits import MAX_PIXELS
from mae.errors import MAEError

_MOST_MASKS = 4 << 30
"""Bytes of an image's masks."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLengths:
    """A mask as COCO keeps it: the lengths of runs of pixels outside and inside, column after column.

    Attributes:
        height: of the mask, in pixels.
        width: likewise.
        counts: of the runs, the first one outside; together they cover the mask.

    Raises:
        MAEError: they do not, or the mask is implausibly large.
    """

    height: int
    width: int
    counts: Int64[np.ndarray, " r"]

    def __post_init__(self) -> None:
        pixels = self.height * self.width
        if not 0 < pixels <= MAX_PIXELS or min(self.height, self.width) < 1:
            raise MAEError(f"a mask of {self.height} x {self.width} pixels; expected 1 to {MAX_PIXELS:,}")
        if (self.counts < 0).any() or (self.counts > pixels).any() or self.counts.sum() != pixels:
            raise MAEError(
                f"a mask of {self.height} x {self.width} pixels has runs of {self.counts.sum():,} pixels; expected "
                f"{pixels:,}, none below 0"
            )

    def drawn(self) -> Bool[np.ndarray, "H W"]:
        """Which pixels are inside."""
        inside = np.repeat(np.arange(len(self.counts)) % 2 == 1, self.counts)
        return inside.reshape(self.width, self.height).T


Polygons: TypeAlias = tuple[Float32[np.ndarray, "p 2"], ...]
"""The parts of an object, each as the x and y of its corners in turn."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Objects:
    """The objects of one image.

    Attributes:
        boxes: left, top, right and bottom edge in pixels, from 0 to the image's width and height: a box around the
            first pixel alone is 0, 0, 1, 1. The image is as it is decoded, turned as its EXIF data say.
        classes: from 0; positions in the set's class names.
        crowd: whether it stands for many that are not told apart (COCO), or is too hard to count (Pascal VOC's
            difficult): such objects are neither learnt nor missed.
        outlines: of each object, in the same pixels; None where the set has boxes alone.
    """

    boxes: Float32[np.ndarray, "n 4"]
    classes: Int64[np.ndarray, " n"]
    crowd: Bool[np.ndarray, " n"]
    outlines: tuple[Polygons | RunLengths, ...] | None = None

    def __len__(self) -> int:
        return len(self.classes)

    def take(self, rows: Int64[np.ndarray, " m"]) -> Self:
        """Those at `rows` only."""
        outlines = None if self.outlines is None else tuple(self.outlines[row] for row in rows)
        return replace(
            self, boxes=self.boxes[rows], classes=self.classes[rows], crowd=self.crowd[rows], outlines=outlines
        )

    def scaled(self, width: float, height: float) -> Self:
        """Boxes and polygons by so much larger, as from shares of an image's sides to pixels."""
        by = np.array([width, height], dtype=np.float32)
        outlines = self.outlines and tuple(
            outline if isinstance(outline, RunLengths) else tuple(part * by for part in outline)
            for outline in self.outlines
        )
        return replace(self, boxes=self.boxes * np.tile(by, 2), outlines=outlines)

    def within(self, height: int, width: int) -> Self:
        """Boxes cut at the edges of an image; what is left empty is left out."""
        boxes = self.boxes.clip(0, np.array([width, height, width, height], dtype=np.float32))
        filled = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(axis=1))
        return replace(self, boxes=boxes).take(filled)

    def masks(self, height: int, width: int) -> Bool[np.ndarray, "n H W"]:
        """Which pixels of the image are inside of each object.

        A pixel is inside where its middle is; parts that overlap are one. pycocotools differs in some pixels
        at edges.

        Raises:
            MAEError: there are boxes alone, a mask of another size, or too many pixels to draw.
        """
        if self.outlines is None:
            raise MAEError("the objects have boxes alone; expected outlines, as polygons or masks")
        if len(self) * height * width > _MOST_MASKS:
            raise MAEError(
                f"the masks of {len(self):,} objects on {height} x {width} pixels take over {_MOST_MASKS >> 30} GiB; "
                "cut or shrink the image"
            )
        masks = np.zeros((len(self), height, width), dtype=bool)
        for mask, outline in zip(masks, self.outlines, strict=True):
            if isinstance(outline, RunLengths):
                if (outline.height, outline.width) != mask.shape:
                    raise MAEError(
                        f"a mask has {outline.height} x {outline.width} pixels, its image {height} x {width}; expected "
                        "the same"
                    )
                mask[:] = outline.drawn()
                continue
            for part in outline:
                mask[polygon(part[:, 1] - 0.5, part[:, 0] - 0.5, mask.shape)] = True
        return masks


def objects_of(
    boxes: Sequence[Sequence[float]],
    classes: Sequence[int],
    crowd: Sequence[bool],
    outlines: Sequence[Polygons | RunLengths] | None = None,
) -> Objects:
    """Objects from lists, which may be empty."""
    return Objects(
        boxes=np.array(boxes, dtype=np.float32).reshape(-1, 4),
        classes=np.array(classes, dtype=np.int64),
        crowd=np.array(crowd, dtype=bool),
        outlines=None if outlines is None else tuple(outlines),
    )
