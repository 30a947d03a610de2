"""Test images with their masks and what is predicted of them."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor

from mae.data.annotations.pixel_classes import IGNORED
from mae.data.dataset.images import ImageSet
from mae.evaluation.common.task import SegmentationTask
from mae.evaluation.extractors.batches import normalised_batches
from mae.models.preprocess import Preprocessing
from mae.models.sliding import Logits
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import choose_tones, colour_table, rgb_channels

NUM_COLOURS = 255
"""Of classes, before they come again: as many as a mask tells apart beside what does not count."""
_PALETTE = "tab20"
_GOLDEN_RATIO = 0.618034
_SHADES = ((0.9, 0.9), (0.5, 0.95), (0.9, 0.55), (0.4, 0.65))
"""Saturation and value of the colours behind the palette, one after the other: hues that are close differ in them."""
_IGNORED_COLOUR = (1.0, 1.0, 1.0)


def draw_segmentation(
    images: ImageSet,
    wanted: Preprocessing,
    rows: Int64[Tensor, " s"],
    truth: UInt8[Tensor, "s H W"] | None,
    predicted: Mapping[str, UInt8[Tensor, "s H W"]],
    *,
    class_names: tuple[str, ...],
    title: str,
    path: Path,
) -> None:
    """Write some images, their masks and the maps predicted by each model as one PNG.

    Args:
        images: the test images.
        wanted: how they are resized and normalised.
        rows: which of the readable ones are shown.
        truth: the masks of these; None: there are none.
        predicted: the maps of these, by model.
        class_names: the classes, in the order of their numbers.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    batches = normalised_batches(images, wanted, device=torch.device("cpu"), numbers=images.readable[rows])
    crops = torch.cat(list(batches))
    tones = choose_tones(crops, wanted.mean, wanted.std, rgb_channels(images.channel_names))
    colours = class_colours(len(class_names))
    names = [[name] for name in images.short_names(images.readable[rows].tolist())]
    columns = [
        Column(name="image", caption="resized whole", pictures=tones.paint(crops), notes=names),
        *([] if truth is None else [_mask_column(truth, colours)]),
        *(
            Column(name=who, caption="predicted", pictures=colours[maps.long()], notes=_rightness(maps, truth))
            for who, maps in predicted.items()
        ),
    ]
    kind = "images" if truth is None else "test images"
    caption = [" ".join([f"{len(rows)} of {len(images.readable):,} {kind}.", *tones.notes])]
    legend = dict(zip(class_names, colours, strict=False))
    write_sheet(columns, title=title, caption=caption, legend=legend, path=path)


def _mask_column(truth: UInt8[Tensor, "s H W"], colours: Float[Tensor, "256 3"]) -> Column:
    return Column(name="mask", caption="as labelled; white: does not count", pictures=colours[truth.long()])


def _rightness(maps: UInt8[Tensor, "s H W"], truth: UInt8[Tensor, "s H W"] | None) -> list[list[str]]:
    """How much of each map is right, as notes."""
    if truth is None:
        return [[] for _ in maps]
    right, counted = (found.flatten(1) for found in (maps == truth, truth != IGNORED))
    shares = [float((one & some).sum() / some.sum().clamp(min=1)) for one, some in zip(right, counted, strict=True)]
    return [[f"{share:.0%} of pixels right"] for share in shares]


def spread(total: int, count: int) -> Int64[Tensor, " s"]:
    """At most so many rows, evenly spread over all of them."""
    return torch.linspace(0, total - 1, min(count, total)).round().long()


class DrawnMaps:
    """Some test images, their masks and what models make of them, for a picture.

    Args:
        task: whose images.
        count: how many.
        title: of the picture.
    """

    def __init__(self, task: SegmentationTask, count: int, *, title: str) -> None:
        self._task, self._title = task, title
        self._rows = spread(len(task.images("test").readable), count)
        self._maps: dict[str, Tensor] = {}

    def add(self, who: str, task: SegmentationTask, logits: Logits) -> None:
        """Keep what a model makes of them. Every process must call this."""
        if len(self._rows):
            from mae.evaluation.common.segmentation_training import small_maps  # loads torchvision, which takes seconds

            self._maps[who] = small_maps(task, logits, self._rows, self._task.extractor.preprocessing.img_size)

    def pictures(self) -> Mapping[str, Callable[..., None]]:
        """What draws them, by what it shows."""
        if not len(self._rows):
            return {}
        from mae.evaluation.common.segmentation_training import small_masks

        task = self._task
        draw = partial(
            draw_segmentation,
            task.images("test"),
            task.extractor.preprocessing,
            self._rows,
            small_masks(task, self._rows, task.extractor.preprocessing.img_size),
            self._maps,
            class_names=task.class_names,
            title=self._title,
        )
        return {"pictures": draw}


def class_colours(num_classes: int) -> Float[Tensor, "256 3"]:
    """A colour for each class, and white for pixels that do not count.

    The first 20 are of a palette; from each further hue to the next is the golden ratio of the circle.
    """
    from matplotlib.colors import hsv_to_rgb  # here: matplotlib takes long to import

    first, more = torch.arange(20), torch.arange(236)
    shades = torch.tensor(_SHADES, dtype=torch.float64)[more % len(_SHADES)]
    further = hsv_to_rgb(torch.cat([(more * _GOLDEN_RATIO % 1).unsqueeze(1), shades], dim=1).numpy())
    table = torch.cat([colour_table(_PALETTE)[first * 2 % 20 + first // 10], torch.from_numpy(further).float()])
    colours = torch.tensor(_IGNORED_COLOUR).repeat(256, 1)
    colours[:num_classes] = table[:num_classes]
    return colours
