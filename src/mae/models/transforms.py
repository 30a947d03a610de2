"""A model's preprocessing as one function of an image, as data sets of torchvision and timm take it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from mae.modalities.images.crop import Augmentation, random_crop_boxes, resized_crop
from mae.models.given_images import OneImage, crop_image, finite, given_images, scaled, statistics_of, whole
from mae.models.preprocess import Preprocessing, preprocessing_of
from mae.models.pretrained import PretrainedEncoder


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """A function of one image, which loader processes can be given; see `transforms`.

    Attributes:
        wanted: what the model is given.
        augmentation: how to crop and mirror at random; None: not at all.
    """

    wanted: Preprocessing
    augmentation: Augmentation | None

    @property
    def channels(self) -> tuple[str, ...] | None:
        """The names of the model's channels, by which `mae.datasets.open` chooses them; None: they have none."""
        return self.wanted.channels

    def __call__(self, image: OneImage) -> Float32[Tensor, "C H W"]:
        """The normalised crop, on the CPU."""
        mean, std = statistics_of(self.wanted)
        given = given_images([image], self.wanted, tell=lambda unusual: None)[0]  # else told of each image
        if self.augmentation is None:
            return (crop_image(given, self.wanted) - mean) / std
        pixels = whole(given)
        height, width = (torch.tensor([side]) for side in pixels.shape[1:])
        boxes, flips = random_crop_boxes(torch.randint(-(2**63), 2**63 - 1, (1,)), height, width, self.augmentation)
        crop = resized_crop(pixels, tuple(boxes[0].tolist()), bool(flips[0]), self.wanted.img_size)
        return (finite(scaled(crop), given, self.wanted) - mean) / std


def transforms(
    model: PretrainedEncoder, *, training: bool = False, crop_scale: tuple[float, float] = (0.5, 1.0)
) -> ImageTransform:
    """What turns one image into what a model is given: `transform=mae.transforms(model)` of a data set.

    Args:
        model: whose size, channels and statistics count.
        training: crop and mirror at random, as pre-training does; else resize and crop the centre, as evaluation does.
        crop_scale: area of a random crop as a share of the image's: from, to. Those of the default run; the paper's
            are (0.2, 1.0).

    Returns:
        A function of a file, an image of Pillow, an array `[H, W, C]` or a tensor `[C, H, W]`, which gives the
        normalised crop `[C, H, W]` on the CPU. Crops at random are drawn from PyTorch's global generator. Raises what
        `PretrainedEncoder.preprocess` does.

    Raises:
        UsageError: a model without channel statistics, or shares out of range.
    """
    augmentation = Augmentation(scale=crop_scale) if training else None
    return ImageTransform(wanted=preprocessing_of(model.config), augmentation=augmentation)
