"""Heads on frozen patch tokens that take minutes on a CPU: neighbours' votes and logistic regression (CAPI)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from mae.data.annotations.pixel_classes import IGNORED
from mae.errors import UsageError
from mae.evaluation.common.dense import (
    Metric,
    StandardPatches,
    class_counts,
    dense_scores,
    from_blocks,
    patch_labels,
    standard_patches,
    to_blocks,
    voted,
)
from mae.evaluation.common.logistic import fit_logistic
from mae.randomness import permutation

PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4)
"""Of the logistic regression, strong to weak."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DenseSplit:
    """Patch tokens of training and test images, and the classes of the training images' pixels.

    Attributes:
        train: tokens of the training images.
        test: tokens of the test images.
        labels: the classes of the training images' pixels, `IGNORED` where there is none.
        grid: rows and columns of patches.
        num_classes: number of classes.
        seed: decides which training images choose.
        device: where to compute.
    """

    train: Float[Tensor, "n N D"]
    test: Float[Tensor, "m N D"]
    labels: UInt8[Tensor, "n H W"]
    grid: tuple[int, int]
    num_classes: int
    seed: int
    device: torch.device

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the maps."""
        return self.labels.shape[1], self.labels.shape[2]

    @cached_property
    def standard(self) -> tuple[StandardPatches, StandardPatches]:
        """The patches of the training and of the test images, standardised."""
        return standard_patches(self.train, self.test)

    @cached_property
    def blocks(self) -> UInt8[Tensor, "b p"]:
        """The classes of the pixels of each training patch."""
        return to_blocks(self.labels, self.grid)

    @cached_property
    def classes(self) -> tuple[Int64[Tensor, " b"], Bool[Tensor, " b"]]:
        """The commonest class of each training patch, and whether any of its pixels has one."""
        return patch_labels(self.blocks, self.num_classes)

    @cached_property
    def choosing(self) -> "DenseSplit":
        """Nine tenths of the training images, and the rest of them as those to tell the classes of.

        Raises:
            UsageError: there are fewer than two, or no pixel of either part counts.
        """
        if len(self.labels) < 2:
            raise UsageError(f"{len(self.labels)} training image with a mask; expected 2 or more, to choose options on")
        fitted, held = self.chosen_on
        for rows, use in ((fitted, "are fitted while options are chosen"), (held, "choose the options")):
            if (self.labels[rows] == IGNORED).all():
                raise UsageError(
                    f"no pixel counts in the masks of the {len(rows):,} of {len(self.labels):,} training images that "
                    f"{use}; give more training images, or ignore less"
                )
        return replace(self, train=self.train[fitted], test=self.train[held], labels=self.labels[fitted])

    @cached_property
    def chosen_on(self) -> tuple[Int64[Tensor, " fitted"], Int64[Tensor, " held"]]:
        """The training images that are fitted while options are chosen, and the tenth that chooses."""
        order = permutation(self.seed, 0, len(self.labels))
        held = max(1, len(order) // 10)
        return order[held:].sort().values, order[:held].sort().values

    def score(self, held: UInt8[Tensor, "h H W"]) -> float:
        """Mean intersection over union of maps of the images that choose."""
        counts = class_counts(held, self.labels[self.chosen_on[1]], num_classes=self.num_classes)
        return dense_scores(counts.sum(dim=0)).mean_iou


def by_neighbours(
    split: DenseSplit, *, ks: Sequence[int], metrics: Sequence[Metric]
) -> tuple[UInt8[Tensor, "m H W"], Mapping[str, Any]]:
    """The maps of the test images by the votes of the nearest training patches, and the metric and k of the best.

    Raises:
        UsageError: fewer training patches than the largest k.
    """

    def maps(of: DenseSplit, some: Sequence[int], metric: Metric) -> dict[int, Tensor]:
        bank, queries = of.standard
        if max(some) > len(bank):
            raise UsageError(f"ks is {list(some)}, but there are {len(bank):,} training patches; give smaller ones")
        found = voted(bank, of.blocks, queries, ks=some, metric=metric, num_classes=of.num_classes, device=of.device)
        return {k: from_blocks(votes, split.grid, split.size) for k, votes in found.items()}

    tried = {
        (metric, k): split.score(held) for metric in metrics for k, held in maps(split.choosing, ks, metric).items()
    }
    metric, k = max(tried, key=lambda pair: tried[pair])
    return maps(split, [k], metric)[k], {"metric": metric, "k": k}


def by_logistic(split: DenseSplit) -> tuple[UInt8[Tensor, "m H W"], Mapping[str, Any]]:
    """The maps of the test images by logistic regression, one class a patch, and the best penalty.

    A training patch has the commonest class of its pixels; one without any is left out.
    """

    def maps(of: DenseSplit, penalty: float) -> Tensor:
        labels, counted = of.classes
        fit = fit_logistic(
            of.train.flatten(0, 1)[counted],
            labels[counted],
            num_classes=of.num_classes,
            penalty=penalty,
            device=of.device,
        )
        classes = torch.cat([fit.logits(image.float()).argmax(dim=1).cpu() for image in of.test])
        pixels = split.size[0] * split.size[1] // len(of.test[0])
        return from_blocks(classes.to(torch.uint8).unsqueeze(1).expand(-1, pixels), split.grid, split.size)

    tried = {penalty: split.score(maps(split.choosing, penalty)) for penalty in PENALTIES}
    best = max(tried, key=lambda penalty: tried[penalty])
    return maps(split, best), {"penalty": best}
