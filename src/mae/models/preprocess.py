"""What must be done to an image before a model sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.records import PixelDtype

Reading = tuple[int, tuple[str, ...] | None, str | None, PixelDtype | None]
"""What must be the same for decoded images to serve two extractors: channels, their names, no data, unit."""


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What is done to an image before an extractor sees it.

    Attributes:
        img_size: height and width it is cropped to.
        in_chans: channels it must have.
        channels: which ones by name, in order; None, or images whose channels have no names: those it has, as they lie.
        nodata: the value in the files that stands for no measurement, a number or `nan`, and is NaN in the images;
            None: every value is one.
        pixel_dtype: type of the pixels in the files the model was trained on, to whose unit others are brought; see
            `MethodConfig.pixel_dtype`.
        mean: subtracted from each channel, in that unit; with `std` 0 and 1 it says nothing of the images.
        std: what each channel is then divided by.
        crop_share: side of the central crop over the side of the resized image; None: the whole image is resized,
            whatever its shape. An image that already has the size is not touched.
        interpolation: `bicubic` or `bilinear`.
    """

    img_size: tuple[int, int]
    in_chans: int = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    crop_share: float | None = 0.875
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    channels: tuple[str, ...] | None = None
    nodata: str | None = None
    pixel_dtype: PixelDtype | None = None

    @property
    def reading(self) -> Reading:
        """Channels, their names, what stands for no data, and the unit."""
        return self.in_chans, self.channels, self.nodata, self.pixel_dtype


def preprocessing_of(config: MethodConfig | None) -> Preprocessing:
    """What the images of a model are made like in evaluation.

    Raises:
        UsageError: the model does not say how its images are normalised.
    """
    if config is None or config.tokenizer.mean is None or config.tokenizer.std is None:
        raise UsageError(
            "the model holds no channel statistics; use one that a run has trained, or set its mean and std"
        )
    return Preprocessing(
        img_size=config.tokenizer.img_size,
        in_chans=config.layout.channels,
        mean=config.tokenizer.mean,
        std=config.tokenizer.std,
        crop_share=official_crop_share(config.layout.size),
        channels=config.tokenizer.channels,
        nodata=config.tokenizer.nodata,
        pixel_dtype=config.tokenizer.pixel_dtype,
    )


def official_crop_share(size: Sequence[int]) -> float:
    """The share of the resized image's side that is evaluated, by the official code's rule for sizes in pixels."""
    return 0.875 if max(size) <= 224 else 1.0
