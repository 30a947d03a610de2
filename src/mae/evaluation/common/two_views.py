"""Features of two random crops of the same images, cropped as in pre-training."""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from mae.data.loading.loader import normalise
from mae.data.loading.worker import CropDataset
from mae.errors import MAEError
from mae.evaluation.common.task import UnlabelledTask
from mae.evaluation.extractors.extractor import Extractor
from mae.modalities.images.crop import Augmentation
from mae.randomness import permutation, sample_keys

_BATCH_SIZE = 128
_SHOWN = "number shown"  # no feature may have that name

Features = dict[str, Float[Tensor, "n _"]]


def two_views(task: UnlabelledTask, extractor: Extractor, *, count: int) -> tuple[Features, Features]:
    """Named features of either crop, row by row of the same images.

    Args:
        task: the images; its seed chooses them and their crops.
        extractor: what encodes the crops.
        count: how many images, at most.

    Raises:
        MAEError: too many images in a row that cannot be read.
    """
    images, wanted = task.images(), extractor.preprocessing
    chosen = permutation(task.seed, 0, len(images.readable))[:count].sort().values
    numbers = images.readable[chosen]
    crops = CropDataset(images=images, numbers=numbers, img_size=wanted.img_size, augmentation=Augmentation())
    mean, std = torch.tensor(wanted.mean), torch.tensor(wanted.std)

    def encode(part: Tensor, view: int) -> Mapping[str, Tensor]:
        piece = crops[part.tolist(), sample_keys(task.seed, view, part).tolist()]
        if piece.images is None:
            raise MAEError(f"{images.name}: too many images in a row cannot be read; remove broken files")
        named = extractor.named(normalise(piece.images.to(task.device), mean, std))
        pooled = {name: values.float().cpu() for name, values in named.items() if values.ndim == 2}
        return {**pooled, _SHOWN: piece.shown}

    first, second = (
        _joined(task.world.in_turns(numbers.split(_BATCH_SIZE), partial(encode, view=view))) for view in (0, 1)
    )
    # An image that cannot be read is replaced by one that its key names, which is another in each view.
    same = first.pop(_SHOWN) == second.pop(_SHOWN)
    return {name: rows[same] for name, rows in first.items()}, {name: rows[same] for name, rows in second.items()}


def _joined(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    batches = list(parts)
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
