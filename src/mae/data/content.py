"""Finding the same image in two sets, whatever its file is called or packed in."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.data.base import pixel_digest
from mae.data.images import ImageSet
from mae.data.limits import UnreadableImage


def content_digests(
    images: ImageSet, numbers: Int64[Tensor, " n"]
) -> tuple[Int64[Tensor, " readable"], Int64[Tensor, " readable"], list[str]]:
    """64 bits (blake2b) of each image's shape, type and decoded pixels; among a million images none agree by chance.

    Two sets are comparable where they have the same number of channels and type.

    Args:
        images: where images are read from.
        numbers: which of them; some thousands at a time, since each that waits takes memory.

    Returns:
        The digests, the numbers of the images they are of, and what was wrong with the others.
    """

    def digest(number: int) -> int | str:
        try:
            pixels = images.get(number).permute(1, 2, 0).numpy()  # as they lie in memory
        except UnreadableImage as error:
            return str(error)
        return int.from_bytes(pixel_digest([pixels]), "little", signed=True)

    with ThreadPoolExecutor() as pool:
        results = list(zip(numbers.tolist(), pool.map(digest, numbers.tolist()), strict=True))
    found = {number: result for number, result in results if isinstance(result, int)}
    unreadable = [result for _, result in results if isinstance(result, str)]
    return (
        torch.tensor(list(found.values()), dtype=torch.int64),
        torch.tensor(list(found), dtype=torch.int64),
        unreadable,
    )


def same_content(first: Int64[Tensor, " n"], second: Int64[Tensor, " m"]) -> list[tuple[int, int]]:
    """Positions in `first` and `second` of all pairs of equal digests, in the order of `second`."""
    places = defaultdict(list)
    for place, digest in enumerate(first.tolist()):
        places[digest].append(place)
    return [(there, here) for here, digest in enumerate(second.tolist()) for there in places.get(digest, ())]
