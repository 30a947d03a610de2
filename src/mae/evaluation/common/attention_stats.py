"""How far and how widely each head of each block attends."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log

import torch
from jaxtyping import Float
from torch import Tensor

from mae.core.types import Grid
from mae.errors import UsageError


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStats:
    """What the heads of the blocks do, means over images and, unless it says otherwise, over the patches that ask.

    Attributes:
        entropy: in nats, from 0 (all on one token) to `uniform_entropy`.
        distance: in patches, of a patch to those it attends to, weighted by its attention (Dosovitskiy et al. 2021,
            appendix D.7; Raghu et al. 2021, section 3). What goes to class tokens has no place: the weights of patches
            are scaled to add up to 1.
        pixels: the same distance in pixels.
        cls_entropy: that of the class token, of several their mean; None for a model without one.
        cls_self: the share of its attention that the class tokens get themselves; None likewise.
        uniform_entropy: the logarithm of the number of tokens.
        uniform_distance: what attention that is the same everywhere would have, in patches.
    """

    entropy: Float[Tensor, "blocks heads"]
    distance: Float[Tensor, "blocks heads"]
    pixels: Float[Tensor, "blocks heads"]
    cls_entropy: Float[Tensor, "blocks heads"] | None
    cls_self: Float[Tensor, "blocks heads"] | None
    uniform_entropy: float
    uniform_distance: float


def attention_entropy(weights: Float[Tensor, "*n L"]) -> Float[Tensor, "*n"]:
    """Entropy of each row of weights in nats, where a weight of 0 adds nothing."""
    return torch.special.entr(weights).sum(dim=-1)


def patch_distances(grid: Grid, unit: tuple[int, int] = (1, 1)) -> Float[Tensor, "N N"]:
    """Euclidean distance of the centres of each two patches in raster order; a patch is `unit` high and wide."""
    rows, columns = (torch.arange(count) * side for count, side in zip(grid, unit, strict=True))
    centres = torch.cartesian_prod(rows, columns).float()
    return torch.cdist(centres, centres, compute_mode="donot_use_mm_for_euclid_dist")


def attention_distance(
    weights: Float[Tensor, "B heads N N"], distances: Float[Tensor, "N N"]
) -> Float[Tensor, "B heads"]:
    """How far patches attend: the mean over them of the distance, weighted by their attention.

    Args:
        weights: among patches alone; rows are scaled to add up to 1, and one of zeros counts as 0.
        distances: of each two patches, see `patch_distances`.
    """
    far = (weights * distances).sum(dim=-1)
    return (far / weights.sum(dim=-1).clamp(min=torch.finfo(weights.dtype).tiny)).mean(dim=-1)


def rollout(blocks: Iterable[Float[Tensor, "B heads L L"]]) -> Float[Tensor, "B L L"]:
    """How much each token that leaves the blocks draws on each that enters them (Abnar & Zuidema 2020, section 3).

    The mean over heads A becomes 0.5 A + 0.5 I for the residual connection, and the blocks' matrices are multiplied.
    Rows add up to 1. It takes no account of values or MLPs.

    Raises:
        UsageError: there is no block.
    """
    through: Tensor | None = None
    for weights in blocks:
        mixed = 0.5 * weights.mean(dim=1) + 0.5 * torch.eye(weights.shape[-1], device=weights.device)
        through = mixed if through is None else mixed @ through
    if through is None:
        raise UsageError("no attention to roll out; give that of at least one block")
    return through


@torch.no_grad()
def measure_attention(
    batches: Iterable[Iterable[Tensor]],
    *,
    grid: Grid,
    patch: tuple[int, int],
    num_prefix: int,
) -> AttentionStats:
    """The numbers of all heads over batches of images.

    Args:
        batches: of each batch, the attention `[B, heads, L, L]` block after block.
        grid: rows and columns of patches.
        patch: height and width of one in pixels.
        num_prefix: class tokens that lead the sequence.

    Raises:
        UsageError: there is no batch.
    """
    in_patches, in_pixels = patch_distances(grid), patch_distances(grid, patch)
    total, images = torch.zeros(0), 0
    for batch in batches:
        found = []
        for weights in batch:
            count = len(weights)
            found.append(_sums(weights, (in_patches, in_pixels), num_prefix))
        sums = torch.stack(found, dim=1)  # [numbers, blocks, heads]
        total, images = sums if images == 0 else total + sums, images + count
    if images == 0:
        raise UsageError("no images to measure attention on; give at least one batch")
    entropy, distance, pixels, *of_cls = (total / images).cpu()
    cls_entropy, cls_self = of_cls or (None, None)
    return AttentionStats(
        entropy=entropy,
        distance=distance,
        pixels=pixels,
        cls_entropy=cls_entropy,
        cls_self=cls_self,
        uniform_entropy=log(grid[0] * grid[1] + num_prefix),
        uniform_distance=float(in_patches.mean()),
    )


def _sums(
    weights: Float[Tensor, "B heads L L"], distances: tuple[Tensor, Tensor], num_prefix: int
) -> Float[Tensor, "numbers heads"]:
    """Each number summed over a batch: those of patches, and with class tokens theirs."""
    among_patches = weights[..., num_prefix:, num_prefix:]
    found = [
        attention_entropy(weights[..., num_prefix:, :]).mean(dim=-1),
        *(attention_distance(among_patches, each.to(weights.device)) for each in distances),
    ]
    if num_prefix:
        of_cls = weights[..., :num_prefix, :]
        found.append(attention_entropy(of_cls).mean(dim=-1))
        found.append(of_cls[..., :num_prefix].sum(dim=-1).mean(dim=-1))
    return torch.stack(found).sum(dim=1)
