"""Boxes with names and outlines on a picture."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn.functional import interpolate

from mae.text import visible

_LINE, _LETTERS = 2, 11  # pixels
_TINT = 0.4
_BRIGHT = 0.5
"""Mean of a colour from which letters on it are black."""
_FAR = 1e4
"""Pixels: whatever lies beyond is drawn there."""


def fit(picture: Float[Tensor, "H W 3"], side: int) -> tuple[Float[Tensor, "h w 3"], float]:
    """A picture whose longer side is at most `side`, and by how much it was resized.

    Small ones are enlarged by a whole factor, so that their pixels stay crisp.
    """
    height, width = picture.shape[:2]
    longest = max(height, width)
    by = side / longest if longest > side else float(side // longest)
    size = [max(1, round(height * by)), max(1, round(width * by))]
    mode = "area" if longest > side else "nearest"
    return interpolate(picture.permute(2, 0, 1)[None], size=size, mode=mode)[0].permute(1, 2, 0), by


def on_one_size(pictures: Sequence[Float[Tensor, "_ _ 3"]]) -> Float[Tensor, "B H W 3"]:
    """Pictures of several sizes on pages of the largest height and width, white below and beside them."""
    height, width = (max(picture.shape[side] for picture in pictures) for side in (0, 1))
    pages = torch.ones(len(pictures), height, width, 3)
    for page, picture in zip(pages, pictures, strict=True):
        page[: picture.shape[0], : picture.shape[1]] = picture
    return pages


def tint(
    picture: Float[Tensor, "H W 3"], masks: Bool[np.ndarray, "n H W"], colours: Float[Tensor, "n 3"]
) -> Float[Tensor, "H W 3"]:
    """The picture with the inside of each object in its colour, the largest below."""
    tinted = picture.clone()
    for row in np.argsort(-masks.sum(axis=(1, 2)), kind="stable").tolist():
        inside = torch.from_numpy(masks[row])
        tinted[inside] = (1 - _TINT) * picture[inside] + _TINT * colours[row]
    return tinted


@cache
def _font() -> ImageFont.FreeTypeFont:
    """The font of all other text in pictures; Pillow's own lacks letters of many languages, such as Vietnamese."""
    from matplotlib import get_data_path  # here: matplotlib takes long to import

    return ImageFont.truetype(Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), _LETTERS)


def draw_boxes(
    picture: Float[Tensor, "H W 3"],
    boxes: Float32[np.ndarray, "n 4"],
    names: Sequence[str],
    colours: Float[Tensor, "n 3"],
) -> Float[Tensor, "H W 3"]:
    """The picture with boxes on it, the largest below.

    Args:
        picture: colours in [0, 1].
        boxes: left, top, right and bottom edge of each object in pixels of the picture.
        names: printed in each box that has room for it.
        colours: of each.
    """
    image = Image.fromarray((picture * 255).round().clamp(0, 255).to(torch.uint8).numpy())
    draw, font = ImageDraw.Draw(image), _font()
    order = np.argsort(-np.prod(boxes[:, 2:] - boxes[:, :2], axis=1), kind="stable").tolist()
    fills = [tuple(colour) for colour in (colours * 255).round().int().tolist()]
    edges = boxes.clip(-_FAR, _FAR).tolist()
    lines = [" ".join(visible(name).split()) for name in names]
    for row in order:
        left, top, right, bottom = edges[row]
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=fills[row], width=_LINE)
    for row in order:
        left, top, right, bottom = edges[row]
        width, height = draw.textlength(lines[row], font=font) + 2 * _LINE, _LETTERS + 2 * _LINE
        if width <= right - left and height <= bottom - top:
            draw.rectangle((left, top, left + width, top + height), fill=fills[row])
            ink = "black" if float(colours[row].mean()) > _BRIGHT else "white"
            draw.text((left + _LINE, top + height / 2), lines[row], fill=ink, font=font, anchor="lm")
    return torch.from_numpy(np.array(image)).float() / 255
