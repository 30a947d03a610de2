"""Pixels as the target, plain or standardised patch by patch."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.layers.patch_embed import patchify

PATCH_VARIANCE_EPS = 1e-6


def patch_statistics(
    patches: Float[Tensor, "B M P"],
) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M 1"]]:
    """Mean and deviation of each patch over all its values: unbiased variance, 1e-6 added under the root."""
    mean = patches.mean(dim=-1, keepdim=True)
    # On a CPU var_mean takes several times as long as two passes.
    variance = (patches - mean).square().sum(dim=-1, keepdim=True) / (patches.shape[-1] - 1)
    return mean, (variance + PATCH_VARIANCE_EPS).sqrt()


def known_patch_statistics(
    patches: Float[Tensor, "B M P"],
) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M 1"]]:
    """The same over the values that are not NaN; of fewer than two the variance is 0, of none the mean too."""
    known = ~patches.isnan()
    count = known.sum(dim=-1, keepdim=True)
    mean = torch.where(known, patches, 0).sum(dim=-1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(known, patches - mean, 0).square().sum(dim=-1, keepdim=True)
    return mean, (squares / (count - 1).clamp(min=1) + PATCH_VARIANCE_EPS).sqrt()


@dataclass(frozen=True, kw_only=True)
class PixelTarget:
    """The hidden pixels themselves (He et al. 2021, section 3, "Reconstruction target").

    Attributes:
        patch_size: height and width of a patch in pixels.
        norm_pix: standardise each patch by its own mean and deviation. Better features; pictures then
            need each patch's statistics to be drawn.
        may_miss: whether pixels may be NaN for want of data: they are no part of a patch's statistics, and NaN in the
            target, which `mae.losses.KnownValues` passes over.
    """

    patch_size: tuple[int, int]
    norm_pix: bool = True
    may_miss: bool = False

    def picture(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B C H W"]:
        """What the predicted patches are cut from: the images themselves."""
        return images

    def statistics(self, patches: Float[Tensor, "B M P"]) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M 1"]]:
        """Mean and deviation by which each patch is standardised."""
        return known_patch_statistics(patches) if self.may_miss else patch_statistics(patches)

    def __call__(
        self, images: Float[Tensor, "B C H W"], tokens: Int64[Tensor, "B M"] | None = None
    ) -> Float[Tensor, "B M P"]:
        """Target values of the given tokens (None: every token in raster order), float32."""
        return self.with_deviation(images, tokens)[0]

    def with_deviation(
        self, images: Float[Tensor, "B C H W"], tokens: Int64[Tensor, "B M"] | None = None
    ) -> tuple[Float[Tensor, "B M P"], Float[Tensor, "B M 1"] | None]:
        """The same values, and what one unit of them is in the images' own unit; None where it is that unit itself.

        `(prediction - target) * deviation` is the error in the images' unit: prediction and target stand on the
        same mean of the patch, which cancels.
        """
        patches = patchify(self.picture(images), self.patch_size, tokens).float()
        if not self.norm_pix:
            return patches, None
        mean, deviation = self.statistics(patches)
        return (patches - mean) / deviation, deviation
