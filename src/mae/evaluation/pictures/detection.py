"""Test images with their objects and what models find in them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from mae.data.annotations.objects import Objects
from mae.data.dataset.images import ImageSet
from mae.data.sources.folder import count_of
from mae.evaluation.common.average_precision import FoundObjects, drawn_runs
from mae.evaluation.pictures.segmentation import NUM_COLOURS, class_colours
from mae.models.given_images import scaled
from mae.report.figures.boxes import draw_boxes, fit, on_one_size, tint
from mae.report.figures.sheet import SIDES, Column, write_sheet
from mae.report.figures.tones import choose_tones, rgb_channels

THRESHOLD = 0.5
"""Score of what is drawn."""


def draw_detections(
    images: ImageSet,
    numbers: Sequence[int],
    truth: Sequence[Objects],
    found: Mapping[str, Sequence[FoundObjects]],
    *,
    class_names: tuple[str, ...],
    title: str,
    path: Path,
) -> None:
    """Write some test images with their objects, and with what each model finds, as one PNG.

    Args:
        images: the test images.
        numbers: of those that are drawn.
        truth: their objects.
        found: in each of them, by model.
        class_names: the classes, in the order of their numbers.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    pictures = [colours_of(images, number) for number in numbers]
    labelled = [
        with_objects(
            picture,
            of.boxes,
            of.classes,
            [class_names[label] for label in of.classes.tolist()],
            masks=None if of.outlines is None else of.masks(*picture.shape[:2]),
        )
        for picture, of in zip(pictures, truth, strict=True)
    ]
    counts = [[f"{name}: {len(of)}"] for name, of in zip(images.short_names(numbers), truth, strict=True)]
    columns = [Column(name="labels", caption="", pictures=on_one_size(labelled), notes=counts)]
    for who, each in found.items():
        drawn = [with_found(picture, of, class_names) for picture, of in zip(pictures, each, strict=True)]
        notes = [[f"{int((of.scores >= THRESHOLD).sum())} found"] for of in each]
        caption = f"found with a score of {THRESHOLD:g} or more"
        columns.append(Column(name=who, caption=caption, pictures=on_one_size(drawn), notes=notes))
    legend = _legend(truth, found, class_names)
    write_sheet(columns, title=title, caption=[f"{count_of(len(numbers), 'test image')}."], legend=legend, path=path)


def _legend(
    truth: Sequence[Objects], found: Mapping[str, Sequence[FoundObjects]], class_names: Sequence[str]
) -> dict[str, Float[Tensor, "3"]]:
    """The colours of the classes that are drawn."""
    drawn = [of.classes for of in truth]
    drawn += [of.labels[of.scores >= THRESHOLD] for each in found.values() for of in each]
    colours = class_colours(NUM_COLOURS)
    return {class_names[label]: colours[label % NUM_COLOURS] for label in np.unique(np.concatenate(drawn)).tolist()}


def with_found(
    picture: Float[Tensor, "H W 3"], found: FoundObjects, class_names: Sequence[str]
) -> Float[Tensor, "h w 3"]:
    """A picture with what was found in it: boxes with classes and scores, masks as a tint."""
    rows = np.flatnonzero(found.scores >= THRESHOLD)
    height, width = picture.shape[:2]
    return with_objects(
        picture,
        found.boxes[rows],
        found.labels[rows],
        [f"{class_names[found.labels[row]]} {found.scores[row]:.0%}" for row in rows],
        masks=None if found.masks is None else drawn_runs([found.masks[row] for row in rows], (height, width)),
    )


def with_objects(
    picture: Float[Tensor, "H W 3"],
    boxes: Float32[np.ndarray, "n 4"],
    classes: Int64[np.ndarray, " n"],
    names: Sequence[str],
    *,
    masks: Bool[np.ndarray, "n H W"] | None,
) -> Float[Tensor, "h w 3"]:
    """A picture with objects on it, made small enough for a sheet."""
    fills = class_colours(NUM_COLOURS)[torch.from_numpy(classes % NUM_COLOURS)]
    if masks is not None:
        picture = tint(picture, masks, fills)
    fitted, by = fit(picture, SIDES[1])
    return draw_boxes(fitted, boxes * np.float32(by), names, fills)


def colours_of(images: ImageSet, number: int) -> Float[Tensor, "H W 3"]:
    """The colours of a whole image, in [0, 1]."""
    image = scaled(images.get(number))[None]
    channels = image.shape[1]
    return choose_tones(image, (0.0,) * channels, (1.0,) * channels, rgb_channels(images.channel_names)).paint(image)[0]
