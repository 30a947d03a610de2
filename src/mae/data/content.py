"""Finding the same image in two sets, whatever its file is called or packed in."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.data.base import pixel_digest
from mae.data.images import ImageSet
from mae.data.limits import UnreadableImage

_PART = 4096
"""Images handed to the threads at a time: each that waits takes memory."""


def content_digests(
    images: ImageSet, numbers: Int64[Tensor, " n"]
) -> tuple[Int64[Tensor, " readable"], Int64[Tensor, " readable"]]:
    """64 bits (blake2b) of each image's shape, type and decoded pixels; among a million images none agree by chance.

    Two sets are comparable where they have the same number of channels and type. Images that turn out to be
    unreadable are reported to the set and left out.

    Args:
        images: where images are read from.
        numbers: which of them.

    Returns:
        The digests, and the numbers of the images they are of.

    Raises:
        MAEError: more unreadable images than the set allows.
    """

    def digest(number: int) -> int | str:
        try:
            pixels = images.get(number).permute(1, 2, 0).numpy()  # as they lie in memory
        except UnreadableImage as error:
            return str(error)
        return int.from_bytes(pixel_digest([pixels]), "little", signed=True)

    found: dict[int, int] = {}
    with ThreadPoolExecutor() as pool:
        for part in numbers.split(_PART):
            results = dict(zip(part.tolist(), pool.map(digest, part.tolist()), strict=True))
            images.report_unreadable(result for result in results.values() if isinstance(result, str))
            found |= {number: result for number, result in results.items() if isinstance(result, int)}
    return torch.tensor(list(found.values()), dtype=torch.int64), torch.tensor(list(found), dtype=torch.int64)


def same_content(first: Int64[Tensor, " n"], second: Int64[Tensor, " m"]) -> list[tuple[int, int]]:
    """Positions in `first` and `second` of all pairs of equal digests, in the order of `second`."""
    places = defaultdict(list)
    for place, digest in enumerate(first.tolist()):
        places[digest].append(place)
    return [(there, here) for here, digest in enumerate(second.tolist()) for there in places.get(digest, ())]
