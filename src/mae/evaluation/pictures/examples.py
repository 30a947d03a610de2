"""Rows of example images on one page, white where a row has no further one."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.modalities.images.crop import central_crop
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import choose_tones, rgb_channels

_SIDE = 144  # pixels


def write_examples(
    images: ImageSet,
    rows: Sequence[Sequence[int | None]],
    *,
    notes: Sequence[Sequence[Sequence[str]]],
    names: Sequence[str],
    title: str,
    caption: str,
    path: Path,
) -> None:
    """Write central crops of images as one PNG.

    Args:
        images: they are of.
        rows: numbers of the images of each row, equally many; None: the place is left white.
        notes: lines of text under each place, equally many, as `rows` has them.
        names: printed above the places of a row.
        title: printed above all.
        caption: printed below.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    pictures = torch.stack([torch.stack([_picture(images, number) for number in row]) for row in rows])
    tones = choose_tones(
        pictures.flatten(0, 1), (0.0,) * images.channels, (1.0,) * images.channels, rgb_channels(images.channel_names)
    )
    columns = [
        Column(name=name, caption="", pictures=tones.paint(pictures[:, place]), notes=[row[place] for row in notes])
        for place, name in enumerate(names)
    ]
    write_sheet(columns, title=title, caption=[caption, *tones.notes], path=path, sides=(_SIDE, _SIDE))


def _picture(images: ImageSet, number: int | None) -> Tensor:
    if number is None:
        return torch.ones(images.channels, _SIDE, _SIDE)
    crop = central_crop(images.get(number), (_SIDE, _SIDE))
    return crop.float() / 255 if crop.dtype == torch.uint8 else crop.float()
