"""Pixels as the target, plain or per-patch normalised."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.core.component import Alias
from mae.core.contracts import Batch, Target, Taught, Tokenizer
from mae.core.types import Layout
from mae.errors import UsageError

PATCH_VARIANCE_EPS = 1e-6


def patch_statistics(
    patches: Float[Tensor, "B M P"],
) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M 1"]]:
    """Mean and std of each patch over all its values: unbiased variance, 1e-6 added under the root."""
    mean = patches.mean(dim=-1, keepdim=True)
    # On a CPU var_mean takes several times as long as two passes.
    variance = (patches - mean).square().sum(dim=-1, keepdim=True) / (patches.shape[-1] - 1)
    return mean, (variance + PATCH_VARIANCE_EPS).sqrt()


def normalise_patches(
    patches: Float[Tensor, "B M P"],
) -> tuple[Float[Tensor, "B M P"], Float[Tensor, "B M 1"]]:
    """Patches on the mean 0 and the std 1 of their values, and the std that each had; see `patch_statistics`.

    It is a layer norm, which reads and writes the patches once, with a constant factor for the unbiased variance.
    """
    size = patches.shape[-1]
    unbiased = (size - 1) / size
    factor = patches.new_full((size,), unbiased**0.5)
    values, _, inverse = torch.native_layer_norm(patches, (size,), factor, None, PATCH_VARIANCE_EPS * unbiased)
    return values, 1 / (inverse * unbiased**0.5)


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
class PixelTarget(Target):
    """The pixels themselves, each patch normalised or not (He et al. 2021, section 3, "Reconstruction target")."""

    kind: ClassVar[str] = "pixels"

    norm: Annotated[bool, Alias("norm_pix_loss")] = True
    """Normalise each target patch by its own mean and std: better features. Off: pictures need no estimate of them."""

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """Values of a patch.

        Raises:
            UsageError: per-patch normalisation of patches of one value.
        """
        if self.norm and layout.token_values < 2:
            raise UsageError(
                "norm_pix_loss normalises the values of a patch, and these patches hold one value; "
                "use norm_pix_loss=False or larger patches"
            )
        return layout.token_values

    def picture(self, x: Float[Tensor, "B C *size"]) -> Float[Tensor, "B C *size"]:
        """What the target's patches are cut from: the samples themselves."""
        return x

    def statistics(
        self, patches: Float[Tensor, "B M P"], tokenizer: Tokenizer
    ) -> tuple[Float[Tensor, "B M 1"], Float[Tensor, "B M 1"]]:
        """Mean and std by which each patch is normalised; values that are NaN for want of data are no part of them."""
        return patch_statistics(patches) if tokenizer.nodata is None else known_patch_statistics(patches)

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M P"]:
        """Target values of the given tokens (None: every token in raster order), float32."""
        return self.with_std(batch, tokens)[0]

    def with_std(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None
    ) -> tuple[Float[Tensor, "B M P"], Float[Tensor, "B M 1"] | None]:
        """The same values, and what one unit of them is in the samples' own; None where it is that unit itself.

        `(prediction - target) * std` is the error in the samples' unit: prediction and target stand on the same mean
        of the patch, which cancels.
        """
        patches = batch.tokenizer.cut(self.picture(batch.x), tokens).float()
        if not self.norm:
            return patches, None
        if batch.tokenizer.nodata is None:
            return normalise_patches(patches)
        mean, std = known_patch_statistics(patches)
        return (patches - mean) / std, std

    def to_pixels(
        self, values: Float[Tensor, "B M P"], batch: Batch, tokens: Int64[Tensor, "B M"] | None = None
    ) -> Float[Tensor, "B M P"]:
        """Raw values from target values, with the true mean and std of each patch where those were normalised."""
        if not self.norm:
            return values
        mean, std = self.statistics(batch.tokenizer.cut(self.picture(batch.x), tokens).float(), batch.tokenizer)
        return values * std + mean
