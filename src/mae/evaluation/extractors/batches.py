"""Batches of images as an extractor wants them, dealt out among the processes that evaluate together."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.data.loading.loader import evaluation_batches, normalise
from mae.models.preprocess import Preprocessing
from mae.training.distributed import World

BATCH_SIZE = 128
"""Images that an extractor is given at a time."""


def computed_batches(
    images: ImageSet,
    preprocessing: Preprocessing,
    compute: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
    *,
    device: torch.device,
    world: World,
    numbers: Tensor | None = None,
    only_main: bool = False,
) -> Iterator[Mapping[str, Tensor]]:
    """What is computed from batches of central crops, in their order, in every process; see `World.in_turns`.

    Args:
        images: where they come from.
        preprocessing: how they are cropped and normalised.
        compute: is given the normalised images of a batch and their numbers.
        device: where the images go.
        world: the processes that compute.
        numbers: which images; None: every readable one.
        only_main: see `World.in_turns`.
    """

    def of(part: Tensor) -> Mapping[str, Tensor]:
        batch = next(normalised_batches(images, preprocessing, device=device, numbers=part))
        return compute(batch, part)

    parts = (images.readable if numbers is None else numbers).split(BATCH_SIZE)
    return world.in_turns(parts, of, only_main=only_main)


def normalised_batches(
    images: ImageSet, preprocessing: Preprocessing, *, device: torch.device, numbers: Tensor | None = None
) -> Iterator[Tensor]:
    """Central crops as an extractor wants them, in order, on the device; the last batch may be smaller.

    Args:
        images: where they come from.
        preprocessing: how they are cropped and normalised.
        device: where they go.
        numbers: which images; None: every readable one.
    """
    mean, std = (torch.tensor(values, device=device) for values in (preprocessing.mean, preprocessing.std))
    crops = evaluation_batches(
        images,
        img_size=preprocessing.img_size,
        batch_size=BATCH_SIZE,
        crop_share=preprocessing.crop_share,
        interpolation=preprocessing.interpolation,
        numbers=numbers,
    )
    for batch in crops:
        yield normalise(batch.to(device), mean, std)
