"""Some labelled images, as they are learnt from."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mae.data.annotations.detection import DetectionSplit
from mae.data.annotations.segmentation import SegmentationSplit
from mae.data.decode.image import decode
from mae.data.sources.folder import FileSource, count_of
from mae.errors import MAEError
from mae.evaluation.pictures.segmentation import NUM_COLOURS, class_colours
from mae.report.figures.boxes import draw_boxes, fit, on_one_size, tint
from mae.report.figures.sheet import SIDES, Column, write_sheet
from mae.report.figures.tones import choose_tones, rgb_channels

_COUNT, _COLUMNS = 8, 4
_SIDE = SIDES[1]
_UNNAMED = "?"


def draw_labels(split: DetectionSplit | SegmentationSplit, *, title: str, path: Path) -> None:
    """Write eight images of a part with their labels as one PNG: boxes with names and outlines, or masks beside them.

    Boxes are drawn as they are written, so that those beyond their image or of no class are seen.

    Args:
        split: the images, spread over which eight are taken.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image or mask cannot be read, or the file not be written.
    """
    if isinstance(split, DetectionSplit):
        labelled = [number for number, objects in enumerate(split.written) if len(objects)]
        numbers = _spread(labelled or range(len(split.written)))
        cells, legend = _boxes(split, numbers)
        header = [("images with their objects", "as labelled")]
    else:
        numbers = _spread(range(len(split.masks)))
        cells, legend = _masks(split, numbers)
        header = [("image", ""), ("mask", "white: does not count")] * (_COLUMNS // 2)
    columns = min(_COLUMNS, len(cells))
    cells += [_Cell(picture=torch.ones(1, 1, 3), note="")] * (-len(cells) % columns)
    pictures = on_one_size([cell.picture for cell in cells])
    drawn = [
        Column(
            name=name,
            caption=told,
            pictures=pictures[column::columns],
            notes=[[cell.note] for cell in cells[column::columns]],
        )
        for column, (name, told) in enumerate([*header, *[("", "")] * columns][:columns])
    ]
    caption = [f"{len(numbers)} of {count_of(len(split.source), 'image')}."]
    write_sheet(drawn, title=title, caption=caption, legend=legend, path=path)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cell:
    """A picture of the sheet and the line under it."""

    picture: Float[Tensor, "H W 3"]
    note: str


def _spread(numbers: Sequence[int]) -> list[int]:
    places = np.linspace(0, len(numbers) - 1, min(_COUNT, len(numbers))).round().astype(int)
    return [numbers[place] for place in places]


def _boxes(split: DetectionSplit, numbers: Sequence[int]) -> tuple[list[_Cell], dict[str, Float[Tensor, "3"]]]:
    names, colours = [*split.class_names, _UNNAMED], class_colours(NUM_COLOURS)
    cells, shown = [], set()
    for number in numbers:
        picture = _picture(split.source, number)
        height, width = picture.shape[:2]
        objects = split.written[number]
        objects = objects.scaled(width, height) if split.normalised else objects
        classes = objects.classes.tolist()
        fills = colours[torch.from_numpy(objects.classes % NUM_COLOURS)]
        if objects.outlines is not None:
            with suppress(MAEError):  # masks of another size: their boxes are drawn
                picture = tint(picture, objects.masks(height, width), fills)
        fitted, by = fit(picture, _SIDE)
        fitted = draw_boxes(fitted, objects.boxes * np.float32(by), [names[label] for label in classes], fills)
        cells.append(_Cell(picture=fitted, note=f"{split.source.names[number]}: {count_of(len(classes), 'object')}"))
        shown.update(classes)
    return cells, {names[label]: colours[label % NUM_COLOURS] for label in sorted(shown)}


def _masks(split: SegmentationSplit, numbers: Sequence[int]) -> tuple[list[_Cell], dict[str, Float[Tensor, "3"]]]:
    names = split.classes.names
    colours = class_colours(len(names))
    cells = []
    for number in numbers:
        mask = colours[torch.from_numpy(split.labels(number)).long()]
        cells.append(_Cell(picture=fit(_picture(split.source, number), _SIDE)[0], note=split.source.names[number]))
        cells.append(_Cell(picture=fit(mask, _SIDE)[0], note=""))
    return cells, dict(zip(names, colours, strict=False))


def _picture(source: FileSource, number: int) -> Float[Tensor, "H W 3"]:
    """Colours of an image, scaled where its values are beyond [0, 1]."""
    pixels = decode(source.read(number), name=source.item_name(number))
    scale = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1.0
    image = torch.from_numpy(pixels.astype(np.float32) / np.float32(scale)).permute(2, 0, 1)[None]
    channels = image.shape[1]
    return choose_tones(image, (0.0,) * channels, (1.0,) * channels, rgb_channels(source.channels)).paint(image)[0]
