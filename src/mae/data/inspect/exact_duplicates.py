"""Finding the same image in two sets, or nearly the same, whatever its file is called or packed in."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import UnreadableImage
from mae.data.inspect.near_duplicates import WAVES, outline
from mae.data.items import pixel_digest


class Contents(NamedTuple):
    """The content of some images, a row for each readable one.

    Attributes:
        digests: 64 bits (blake2b) of the image's shape, type and decoded pixels; among a million images none agree by
            chance.
        numbers: of the images.
        outlines: what near copies have in common; see `outline`.
        unreadable: what is wrong with the others.
    """

    digests: Int64[Tensor, " readable"]
    numbers: Int64[Tensor, " readable"]
    outlines: Float32[Tensor, "readable waves"]
    unreadable: list[str]


def contents_of(images: ImageSet, numbers: Int64[Tensor, " n"]) -> Contents:
    """Digest and outline of each image; each is decoded once.

    Two sets are comparable where they have the same number of channels and type.

    Args:
        images: where images are read from.
        numbers: which of them; some thousands at a time, since each that waits takes memory.
    """

    def look(number: int) -> tuple[int, np.ndarray] | str:
        try:
            image = images.get(number)
        except UnreadableImage as error:
            return str(error)
        pixels = image.permute(1, 2, 0).numpy()  # as they lie in memory
        return int.from_bytes(pixel_digest([pixels]), "little", signed=True), outline(image)

    with ThreadPoolExecutor() as pool:
        results = list(zip(numbers.tolist(), pool.map(look, numbers.tolist()), strict=True))
    found = {number: result for number, result in results if not isinstance(result, str)}
    outlines = np.array([of for _, of in found.values()], dtype=np.float32).reshape(len(found), WAVES)
    return Contents(
        digests=torch.tensor([digest for digest, _ in found.values()], dtype=torch.int64),
        numbers=torch.tensor(list(found), dtype=torch.int64),
        outlines=torch.from_numpy(outlines),
        unreadable=[result for _, result in results if isinstance(result, str)],
    )


def same_content(first: Int64[Tensor, " n"], second: Int64[Tensor, " m"]) -> list[tuple[int, int]]:
    """Positions in `first` and `second` of equal digests: each of `second` once, behind the first that equals it."""
    places: dict[int, int] = {}
    for place, digest in enumerate(first.tolist()):
        places.setdefault(digest, place)
    return [(places[digest], here) for here, digest in enumerate(second.tolist()) if digest in places]
