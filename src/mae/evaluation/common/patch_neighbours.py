"""The patches of other images that are most like some query patches, and what can be counted of them."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor
from torch.nn.functional import normalize

from mae.evaluation.common.logistic import moments, standardise
from mae.randomness import FIXED_EPOCH, Stream, permutation, sample_keys, uniform

_VALUES = 1 << 23
"""Numbers compared at a time: 64 MB in 64 bits."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StandardImages:
    """The patch tokens of images, each dimension with a mean and std taken off.

    They may be mapped from a file larger than memory: only what is asked for is read.

    Attributes:
        tokens: `[n, N, D]` as they are.
        mean: of each dimension at each place of an image.
        std: likewise; a dimension that never changes becomes 0.
    """

    tokens: Float[Tensor, "n N D"]
    mean: Float32[Tensor, " N*D"]
    std: Float32[Tensor, " N*D"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, images: slice | Tensor) -> Float32[Tensor, "i N D"]:
        return standardise(self.tokens[images].flatten(1), self.mean, self.std).unflatten(1, self.tokens.shape[1:])


def standard_images(tokens: Float[Tensor, "n N D"], *, by_place: bool) -> StandardImages:
    """The images standardised by the mean and std over all patches, or over those at the same place of all images.

    What all images have at a place, such as the position embedding, is gone in the second. It takes tens of images.

    Raises:
        MAEError: tokens that are not finite.
    """
    if by_place:
        mean, std = moments(tokens.flatten(1))
    else:
        mean, std = (of.repeat(tokens.shape[1]) for of in moments(tokens.flatten(0, 1)))
    return StandardImages(tokens=tokens, mean=mean, std=std)


def drawn_images(seed: int, num_images: int, count: int) -> Int64[Tensor, " q"]:
    """The images that queries are on: `count` different ones, or all if there are fewer."""
    return permutation(seed, FIXED_EPOCH, num_images)[:count]


def drawn_places(pixels: Float[Tensor, "q N C p"], numbers: Int64[Tensor, " q"], seed: int) -> Int64[Tensor, " q"]:
    """One patch of each image, drawn from the half of its patches with the most contrast.

    A patch of empty sky has neighbours everywhere and shows nothing. The choice rests on pixels, the seed and the
    image's number alone: it favours none of the models that are compared.

    Args:
        pixels: of each patch of each image.
        numbers: of the images in their source.
        seed: of the draw.
    """
    contrast = pixels.float().std(dim=3, correction=0).mean(dim=2)  # [q, N]
    varied = contrast.argsort(dim=1, descending=True, stable=True)
    half = (varied.shape[1] + 1) // 2
    drawn = uniform(sample_keys(seed, FIXED_EPOCH, numbers), 1, Stream.CROP)
    return varied.gather(1, (drawn * half).long())[:, 0]


@torch.no_grad()
def nearest_in_other_images(
    bank: StandardImages, images: Int64[Tensor, " q"], places: Int64[Tensor, " q"], *, k: int, device: torch.device
) -> tuple[Float32[Tensor, "q k"], Int64[Tensor, "q k"]]:
    """The nearest patches by cosine, nearest first: none of the query's own image, of each other image at most one.

    Equally near ones come by their numbers. Exact, and the same however the work is cut: products are summed in
    float64 and rounded to float32, so copies of a patch are equally near wherever they stand.

    Args:
        bank: the patches of all images.
        images: those that the queries are on.
        places: of the queries in their images.
        k: how many, at most the number of the other images.
        device: where patches are compared; MPS, which has no float64, leaves it to the CPU.

    Returns:
        Cosines, and numbers of patches, counted over the images one after the other.
    """
    device = torch.device("cpu") if device.type == "mps" else device
    _, per_image, width = bank.tokens.shape
    of_images = zip(images.split(1), places.tolist(), strict=True)
    queries = torch.stack([bank[image][0, place] for image, place in of_images]).to(device, torch.float64)
    queries = normalize(queries, dim=1)
    own = images.to(device).unsqueeze(1)
    cosines, numbers = queries.new_empty(len(queries), 0).float(), own.new_empty(len(queries), 0)
    step = max(1, _VALUES // (per_image * max(width, len(queries))))
    for start in range(0, len(bank), step):
        some = normalize(bank[start : start + step].to(device, torch.float64), dim=2)
        best, where = (queries @ some.flatten(0, 1).T).float().unflatten(1, (-1, per_image)).max(dim=2)  # the first
        these = start + torch.arange(len(some), device=device)
        cosines = torch.cat([cosines, best.masked_fill(these == own, -torch.inf)], dim=1)
        numbers = torch.cat([numbers, these * per_image + where], dim=1)
        cosines, order = cosines.sort(dim=1, descending=True, stable=True)
        cosines, numbers = cosines[:, :k], numbers.gather(1, order[:, :k])
    return cosines.cpu(), numbers.cpu()


def share_in_common(one: Int64[Tensor, "q k"], other: Int64[Tensor, "q k"]) -> float:
    """Share of the neighbours of the same queries that both found, in [0, 1]."""
    return float((one.unsqueeze(2) == other.unsqueeze(1)).any(dim=2).double().mean())


def same_place(one: Int64[Tensor, "q #k"], other: Int64[Tensor, "#q k"], grid: tuple[int, int]) -> Bool[Tensor, "q k"]:
    """Whether patches, by their numbers in their images, lie at the same place or at places that touch."""
    down = one // grid[1] - other // grid[1]
    across = one % grid[1] - other % grid[1]
    return (down.abs() <= 1) & (across.abs() <= 1)
