"""Odd images and near duplicates, by the neighbours of their features."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

_NEAREST = 10
"""Neighbours whose mean distance says how odd an image is: a few copies of an odd image do not hide it."""
_FENCE = 3.0
"""Interquartile ranges above the upper quartile from which a value is far out (Tukey 1977)."""
_FAR_NEARER = 0.1
"""Share of the usual distance of images up to which two are near duplicates; see `find_near_duplicates`.

With two small models, of 60 and of 330 steps, on 1,000 images of Tiny ImageNet and on 200 photographs: 79 of 80 images
saved anew (JPEG of quality 75, half the size) are at 0.08 or less of it, no two different ones are below 0.19.
"""


def distances(cosines: Float32[Tensor, "n k"]) -> Float32[Tensor, "n k"]:
    """How far apart features of length 1 are that have these cosines: 0 for copies, 1.41 for strangers, 2 at most."""
    return (2 * (1 - cosines)).clamp(min=0).sqrt()


@dataclass(frozen=True, kw_only=True, eq=False)
class OddImages:
    """How odd each image is.

    Attributes:
        scores: of each image, the mean distance to its ten nearest; see `distances`.
        order: the images, the oddest first.
        threshold: scores above it are far out.
    """

    scores: Float32[Tensor, " n"]
    order: Int64[Tensor, " n"]
    threshold: float

    @property
    def far_out(self) -> Int64[Tensor, " odd"]:
        """The images that are odd, the oddest first."""
        return self.order[self.scores[self.order] > self.threshold]


def find_odd(cosines: Float32[Tensor, "n k"]) -> OddImages:
    """How odd images are.

    Args:
        cosines: of the centred feature of each with its nearest, nearest first.
    """
    scores = distances(cosines[:, :_NEAREST]).mean(dim=1)
    lower, upper = torch.quantile(scores, torch.tensor([0.25, 0.75])).tolist()
    return OddImages(
        scores=scores,
        order=scores.argsort(descending=True, stable=True),
        threshold=upper + _FENCE * (upper - lower),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class NearDuplicates:
    """Pairs of images that are nearly the same to the model, the most alike first.

    Attributes:
        pairs: rows of two images, the lower one first.
        cosines: of their centred features.
        threshold: the lowest cosine at which two images count that are no copies.
    """

    pairs: Int64[Tensor, "p 2"]
    cosines: Float32[Tensor, " p"]
    threshold: float


def find_near_duplicates(
    cosines: Float32[Tensor, "n k"], neighbours: Int64[Tensor, "n k"], digests: Int64[Tensor, " n"]
) -> NearDuplicates:
    """Pairs that are a tenth as far apart as an image usually is from its tenth neighbour, or less; and copies.

    Copies count whatever their cosine: where all images are alike, centred features have no direction.

    What is near depends on the model and on the set, so it is measured on them. The median over the images moves little
    where some of them have copies.

    Args:
        cosines: of the centred feature of each with its nearest, nearest first.
        neighbours: the rows of those.
        digests: equal for images with the same pixels.
    """
    usual = float(distances(cosines[:, :_NEAREST]).amax(dim=1).median())
    threshold = 1 - (_FAR_NEARER * usual) ** 2 / 2
    near: Bool[Tensor, "n k"] = (cosines >= threshold) | (digests.unsqueeze(1) == digests[neighbours])
    rows, places = near.nonzero(as_tuple=True)
    pairs = torch.stack([rows, neighbours[rows, places]], dim=1).sort(dim=1).values
    pairs, where = pairs.unique(dim=0, return_inverse=True)  # of most pairs each is the other's neighbour
    of_pairs = torch.zeros(len(pairs)).index_copy(0, where, cosines[rows, places])
    order = of_pairs.argsort(descending=True, stable=True)
    return NearDuplicates(pairs=pairs[order], cosines=of_pairs[order], threshold=threshold)
