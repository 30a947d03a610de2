"""A model's preprocessing as one function of an image, as data sets of torchvision and timm take it."""

from collections.abc import Callable

import torch
from jaxtyping import Float32
from torch import Tensor

from mae.modalities.images.crop import Augmentation, random_crop_boxes, resized_crop
from mae.models.given_images import OneImage, crop_image, given_images, scaled, statistics_of, whole
from mae.models.preprocess import preprocessing_of
from mae.models.pretrained import PretrainedEncoder


def transforms(model: PretrainedEncoder, *, training: bool = False) -> Callable[[OneImage], Float32[Tensor, "C H W"]]:
    """What turns one image into what a model is given: `transform=mae.transforms(model)` of a data set.

    Args:
        model: whose size, channels and statistics count.
        training: crop and mirror at random, as pre-training does; else resize and crop the centre, as evaluation does.

    Returns:
        A function of a file, an image of Pillow, an array `[H, W, C]` or a tensor `[C, H, W]`, which gives the
        normalised crop `[C, H, W]` on the CPU. Crops at random are drawn from PyTorch's global generator. Raises what
        `PretrainedEncoder.preprocess` does.

    Raises:
        UsageError: a model without channel statistics.
    """
    wanted = preprocessing_of(model.config)
    mean, std = statistics_of(wanted)

    def transform(image: OneImage) -> Float32[Tensor, "C H W"]:
        given = given_images([image], wanted)[0]
        if not training:
            return (crop_image(given, wanted) - mean) / std
        pixels = whole(given)
        height, width = (torch.tensor([side]) for side in pixels.shape[1:])
        boxes, flips = random_crop_boxes(torch.randint(-(2**63), 2**63 - 1, (1,)), height, width, Augmentation())
        crop = resized_crop(pixels, tuple(boxes[0].tolist()), bool(flips[0]), wanted.img_size)
        return (scaled(crop) - mean) / std

    return transform
