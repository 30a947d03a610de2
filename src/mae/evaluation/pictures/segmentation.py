"""Test images with their masks and what is predicted of them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from mae.data.annotations.pixel_classes import IGNORED
from mae.data.dataset.images import ImageSet
from mae.evaluation.extractors.batches import normalised_batches
from mae.models.preprocess import Preprocessing
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import choose_tones, colour_table, rgb_channels

_PALETTE = "tab20"
_IGNORED_COLOUR = (1.0, 1.0, 1.0)


def draw_segmentation(
    images: ImageSet,
    wanted: Preprocessing,
    truth: UInt8[Tensor, "m H W"],
    predicted: Mapping[str, UInt8[Tensor, "m H W"]],
    *,
    class_names: tuple[str, ...],
    count: int,
    title: str,
    path: Path,
) -> None:
    """Write some test images, their masks and the maps predicted by each model as one PNG.

    Args:
        images: the test images.
        wanted: how they are resized and normalised.
        truth: the masks of all test images.
        predicted: the maps of all test images, by model.
        class_names: the classes, in the order of their numbers.
        count: images to show, spread over all of them.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    rows = torch.linspace(0, len(truth) - 1, min(count, len(truth))).round().long()
    batches = normalised_batches(images, wanted, device=torch.device("cpu"), numbers=images.readable[rows])
    crops = torch.cat(list(batches))
    tones = choose_tones(crops, wanted.mean, wanted.std, rgb_channels(images.channel_names))
    colours = class_colours(len(class_names))
    shares = {who: (maps == truth)[rows].flatten(1) for who, maps in predicted.items()}
    counted = (truth[rows] != IGNORED).flatten(1)
    notes = {
        who: [
            [f"{float((right & some).sum() / some.sum().clamp(min=1)):.0%} of pixels right"]
            for right, some in zip(of, counted, strict=True)
        ]
        for who, of in shares.items()
    }
    names = [[images.item_name(number)] for number in images.readable[rows].tolist()]
    columns = [
        Column(name="image", caption="resized whole", pictures=tones.paint(crops), notes=names),
        Column(name="mask", caption="as labelled; white: does not count", pictures=colours[truth[rows].long()]),
        *(
            Column(name=who, caption="predicted", pictures=colours[maps[rows].long()], notes=notes[who])
            for who, maps in predicted.items()
        ),
    ]
    caption = [" ".join([f"{len(rows)} of {len(truth):,} test images.", *tones.notes])]
    legend = dict(zip(class_names, colours, strict=False))
    write_sheet(columns, title=title, caption=caption, legend=legend, path=path)


def class_colours(num_classes: int) -> Float[Tensor, "256 3"]:
    """A colour for each class, and white for pixels that do not count; from 20 classes on colours come again."""
    table = colour_table(_PALETTE)
    colours = torch.tensor(_IGNORED_COLOUR).repeat(256, 1)
    colours[:num_classes] = table[torch.arange(num_classes) * 2 % 20 + torch.arange(num_classes) // 10 % 2]
    return colours
