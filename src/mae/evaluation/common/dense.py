"""Classes of pixels from features of patches: votes of the nearest patches, and how right maps of classes are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64, UInt8
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from mae.data.annotations.pixel_classes import IGNORED
from mae.errors import UsageError
from mae.evaluation.common.logistic import moments, standardise

_VOTED = 512
"""Patches whose votes are counted at a time."""
_SEARCHED, _COMPARED, _BANK = 16384, 512, 32768
"""Patches whose neighbours are searched in one pass over the training patches, and compared at a time with so many."""

Metric = Literal["cosine", "l2"]
"""How near patches are: by the angle between them, or by their distance."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StandardPatches:
    """Patch tokens, each dimension with the mean and std that it has over the training patches taken off.

    They may be mapped from a file larger than memory: only what is asked for is read.

    Attributes:
        tokens: `[n, D]` as they are.
        mean: of each dimension over the training patches.
        std: likewise; a dimension that never changes becomes 0.
    """

    tokens: Float[Tensor, "n D"]
    mean: Float32[Tensor, " D"]
    std: Float32[Tensor, " D"]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor) -> Float32[Tensor, "r D"]:
        return standardise(self.tokens[rows], self.mean, self.std)


def standard_patches(
    train: Float[Tensor, "n N D"], test: Float[Tensor, "m N D"]
) -> tuple[StandardPatches, StandardPatches]:
    """The patches of both parts, image after image, standardised as those of the training part are."""
    mean, std = moments(train.flatten(0, 1))
    parts = (StandardPatches(tokens=part.flatten(0, 1), mean=mean, std=std) for part in (train, test))
    one, other = parts
    return one, other


def grid_of(count: int, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of so many square patches on an image.

    Raises:
        UsageError: no grid of so many square patches covers the image.
    """
    height, width = size
    rows = round((count * height / width) ** 0.5)
    if rows < 1 or count % rows or height % rows or width % (count // rows):
        raise UsageError(
            f"the model gives {count} patch tokens for images of {height} x {width}; expected a grid of patches that "
            "covers the image"
        )
    return rows, count // rows


def to_blocks(maps: UInt8[Tensor, "n H W"], grid: tuple[int, int]) -> UInt8[Tensor, "b p"]:
    """The pixels of each patch, image after image, patches row by row."""
    rows, columns = grid
    return maps.unflatten(1, (rows, -1)).unflatten(3, (columns, -1)).permute(0, 1, 3, 2, 4).flatten(3).flatten(0, 2)


def from_blocks(blocks: UInt8[Tensor, "b p"], grid: tuple[int, int], size: tuple[int, int]) -> UInt8[Tensor, "n H W"]:
    """The maps that `to_blocks` made these of."""
    rows, columns = grid
    inner = size[0] // rows, size[1] // columns
    return blocks.unflatten(0, (-1, rows, columns)).unflatten(3, inner).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def resized_map(labels: UInt8[np.ndarray, "H W"], size: tuple[int, int]) -> UInt8[Tensor, "h w"]:
    """A map of classes in another size: each pixel has the class nearest to its centre."""
    pixels = torch.from_numpy(labels)[None, None]
    return interpolate(pixels, size, mode="nearest-exact")[0, 0]


@torch.no_grad()
def nearest_patches(
    bank: StandardPatches, queries: Float32[Tensor, "m D"], *, k: int, metric: Metric, device: torch.device
) -> Int64[Tensor, "m k"]:
    """The rows of the k nearest training patches, nearest first.

    In float32, which of millions of comparisons takes a third of the time of `neighbours.nearest`; which of equally
    near patches comes first is left open.
    """
    queries = queries.to(device)
    parts = (normalize(queries, dim=1) if metric == "cosine" else queries).split(_COMPARED)
    none = torch.empty(0, device=device)
    best = [(none.expand(len(part), 0), none.long().expand(len(part), 0)) for part in parts]
    for start in range(0, len(bank), _BANK):
        some = bank[start : start + _BANK].to(device)
        some = normalize(some, dim=1) if metric == "cosine" else some
        # The nearest have the largest product, by distance after half of their squared length is taken off.
        offset = torch.zeros(len(some), device=device) if metric == "cosine" else -some.square().sum(dim=1) / 2
        for number, part in enumerate(parts):
            similarity, rows = torch.addmm(offset, part, some.T).topk(min(k, len(some)), dim=1)
            known, known_rows = best[number]
            similarity, rows = torch.cat([known, similarity], dim=1), torch.cat([known_rows, rows + start], dim=1)
            similarity, places = similarity.topk(min(k, similarity.shape[1]), dim=1)
            best[number] = similarity, rows.gather(1, places)
    return torch.cat([rows for _, rows in best]).cpu()


@torch.no_grad()
def voted(
    bank: StandardPatches,
    blocks: UInt8[Tensor, "n p"],
    queries: StandardPatches,
    *,
    ks: Sequence[int],
    metric: Metric,
    num_classes: int,
    device: torch.device,
) -> dict[int, UInt8[Tensor, "m p"]]:
    """The class of each pixel of a patch by the k nearest training patches: the commonest at its place in them.

    Of equally common classes the lowest number wins; ignored pixels have no vote (Darcet et al. 2025, CAPI).

    Args:
        bank: the training patches.
        blocks: the classes of their pixels.
        queries: the patches to tell the classes of.
        ks: how many vote, each at most the number of training patches.
        metric: of the search.
        num_classes: number of classes.
        device: where patches are compared.

    Returns:
        For each k the pixels of each patch.
    """
    parts: dict[int, list[Tensor]] = {k: [] for k in ks}
    for start in range(0, len(queries), _SEARCHED):
        rows = nearest_patches(bank, queries[start : start + _SEARCHED], k=max(ks), metric=metric, device=device)
        for some in rows.split(_VOTED):
            for k in ks:
                parts[k].append(_commonest(blocks[some[:, :k]], num_classes))
    return {k: torch.cat(part) for k, part in parts.items()}


def _commonest(votes: UInt8[Tensor, "m k p"], num_classes: int) -> UInt8[Tensor, "m p"]:
    if votes.shape[1] == 1 and not (votes == IGNORED).any():
        return votes[:, 0]
    places = torch.where(votes == IGNORED, num_classes, votes).long().mT
    counts = torch.zeros(*places.shape[:2], num_classes + 1, dtype=torch.int16)
    counts.scatter_add_(2, places, torch.ones_like(places, dtype=torch.int16))
    return counts[:, :, :num_classes].argmax(dim=2).to(torch.uint8)


def patch_labels(blocks: UInt8[Tensor, "n p"], num_classes: int) -> tuple[Int64[Tensor, " n"], Bool[Tensor, " n"]]:
    """The commonest class of each patch, and whether any of its pixels has one."""
    labels = torch.cat([_commonest(part.unsqueeze(2), num_classes)[:, 0] for part in blocks.split(_VOTED)])
    return labels.long(), (blocks != IGNORED).any(dim=1)


def class_counts(
    predicted: UInt8[Tensor, "m H W"], labels: UInt8[Tensor, "m H W"], *, num_classes: int
) -> Int64[Tensor, "m 3 K"]:
    """Of each image how many pixels of each class are right, how many there are, and how many were given it.

    Ignored pixels are left out. Confusions of all pairs of classes would tell no score more, and of 200 classes and
    thousands of images take gigabytes.
    """
    of_each = []
    for guess, truth in zip(predicted, labels, strict=True):
        given, there = (classes[truth != IGNORED].long() for classes in (guess, truth))
        parts = (there[given == there], there, given)
        of_each.append(torch.stack([torch.bincount(part, minlength=num_classes) for part in parts]))
    return torch.stack(of_each)


@dataclass(frozen=True, kw_only=True)
class DenseScores:
    """How right maps of classes are, over all pixels of all images together.

    Attributes:
        mean_iou: mean over the classes of intersection over union, both summed over all images, in [0, 1]; classes that
            are neither there nor predicted are left out.
        accuracy: share of the pixels that are right.
        mean_accuracy: mean over the classes that are there of the share of their pixels that is right.
        iou: of each class; None where it is neither there nor predicted.
    """

    mean_iou: float
    accuracy: float
    mean_accuracy: float
    iou: tuple[float | None, ...]


def dense_scores(counts: Int64[Tensor, "3 K"]) -> DenseScores:
    """The scores of `class_counts`, summed over images.

    Raises:
        UsageError: no pixel counts.
    """
    if not counts.sum():
        raise UsageError("no pixel of the test masks has a class that counts; give other masks or ignore less")
    right, there, _ = counts.double()
    iou = _ious(counts.double())
    return DenseScores(
        mean_iou=float(iou.nanmean()),
        accuracy=float(right.sum() / there.sum()),
        mean_accuracy=float((right / there).nanmean()),
        iou=tuple(None if value != value else value for value in iou.tolist()),
    )


def mean_ious(counts: Float[Tensor, "R 3 K"]) -> Float[Tensor, " R"]:
    """Mean intersection over union of many sums of `class_counts`; see `DenseScores`."""
    return _ious(counts).nanmean(dim=1)


def _ious(counts: Float[Tensor, "*R 3 K"]) -> Float[Tensor, "*R K"]:
    """Of each class; not a number where it is neither there nor predicted."""
    right, there, given = counts.unbind(dim=-2)
    return right / (there + given - right)
