"""Small pictures of many images, in one large picture that a page carries."""

import io
from base64 import b64encode
from dataclasses import dataclass
from math import ceil, sqrt

import torch
from jaxtyping import Float, Int64, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate, pad

from mae.data.dataset.images import ImageSet
from mae.evaluation.extractors.batches import normalised_batches
from mae.models.preprocess import Preprocessing
from mae.report.figures.tones import HIDDEN_COLOUR, Tones, choose_tones, rgb_channels

MOST_IMAGES = 16_384
"""More would make an atlas of over 4,096 pixels a side, which some phones refuse, and a page of over 20 MB."""

_SIDES = ((5_000, 48), (MOST_IMAGES, 32))
"""Pixels of a thumbnail, by how many there are at most; multiples of 8, so that no block of the JPEG holds two."""

_QUALITY = 80


@dataclass(frozen=True, kw_only=True, eq=False)
class Thumbnails:
    """Small square pictures, row by row in one atlas.

    Attributes:
        pictures: in the order of the images.
    """

    pictures: UInt8[Tensor, "n side side 3"]

    @property
    def side(self) -> int:
        """Pixels of each."""
        return self.pictures.shape[1]

    @property
    def columns(self) -> int:
        """How many stand in a row of the atlas."""
        return ceil(sqrt(len(self.pictures)))

    def atlas(self) -> str:
        """The atlas as the `data:` address of a JPEG."""
        missing = -len(self.pictures) % self.columns
        cells = torch.cat([self.pictures, self.pictures.new_zeros(missing, self.side, self.side, 3)])
        cells = cells.unflatten(0, (-1, self.columns)).transpose(1, 2)  # [rows, side, columns, side, 3]
        content = io.BytesIO()
        picture = Image.fromarray(cells.flatten(2, 3).flatten(0, 1).numpy())
        picture.save(content, "JPEG", quality=_QUALITY, subsampling=0)  # else colours bleed over a thumbnail's edge
        return f"data:image/jpeg;base64,{b64encode(content.getvalue()).decode('ascii')}"


def make_thumbnails(images: ImageSet, wanted: Preprocessing) -> Thumbnails:
    """A thumbnail of each readable image, as the model sees it: the crop, whole, on a square.

    Raises:
        MAEError: an image cannot be read.
    """
    side = next(side for most, side in _SIDES if len(images.readable) <= most)
    tones: Tones | None = None
    made = []
    for batch in normalised_batches(images, wanted, device=torch.device("cpu")):
        tones = tones or choose_tones(batch, wanted.mean, wanted.std, rgb_channels(images.channel_names))
        made.append(_small(tones.paint(batch), side))
    return Thumbnails(pictures=torch.cat(made))


def crops_of(images: ImageSet, wanted: Preprocessing, numbers: Int64[Tensor, " n"]) -> Float[Tensor, "n C H W"]:
    """Some images as the model sees them, normalised."""
    return torch.cat(list(normalised_batches(images, wanted, device=torch.device("cpu"), numbers=numbers)))


def _small(pictures: Float[Tensor, "B H W 3"], side: int) -> UInt8[Tensor, "B side side 3"]:
    """Resized until the longer side fits, grey beside a narrow one; tiny pictures keep their hard pixels."""
    height, width = pictures.shape[1:3]
    scale = side / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    channels_first = pictures.permute(0, 3, 1, 2)
    if scale > 1:
        resized = interpolate(channels_first, size=size, mode="nearest-exact")
    else:
        resized = interpolate(channels_first, size=size, mode="bilinear", antialias=True)
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    beside = pad(resized, (left, side - size[1] - left, top, side - size[0] - top), value=sum(HIDDEN_COLOUR) / 3)
    return (beside.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1)
