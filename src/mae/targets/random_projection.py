"""A random linear map of each patch as the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn.functional import layer_norm

from mae.core.component import Width
from mae.core.contracts import Batch, Target, Taught
from mae.core.types import Layout
from mae.errors import UsageError
from mae.layers.precision import without_autocast
from mae.randomness import FIXED_EPOCH, Stream, sample_keys, uniform
from mae.targets.pixels import normalise_patches


@dataclass(frozen=True, kw_only=True)
class RandomProjectionTarget(Target):
    """A random linear map of each normalised patch, never trained (Latent MIM Lite: OlmoEarth, 2025).

    Each patch is normalised by its own mean and std, mapped, and layer-normalised. The numbers of the map are uniform
    with mean 0 and variance 1 / P for patches of P values. They are a pure function of P and the options, the same on
    every machine, so nothing of them is stored. A patch with missing values has no target.
    """

    kind: ClassVar[str] = "random_projection"

    dim: Width = 256
    """Values that a patch is mapped to."""
    seed: Annotated[int, Ge(0), Le(4294967295)] = 0
    """Decides the map."""

    def width(self, layout: Layout, gives: Mapping[str, int] | None = None) -> int:
        """Values of the map.

        Raises:
            UsageError: patches of one value, or a map to one value, of which normalisation leaves nothing.
        """
        if min(layout.token_values, self.dim) < 2:
            raise UsageError(
                f"target random_projection normalises the {layout.token_values} value(s) of a patch and the {self.dim} "
                "of its map; expected two or more of each: use larger patches, or a larger --target-dim"
            )
        return self.dim

    def projection(self, values: int, *, device: torch.device) -> Float[Tensor, "P dim"]:
        """The map of patches of so many values, float32."""
        keys = sample_keys(self.seed, FIXED_EPOCH, torch.arange(values, device=device))
        return (2 * uniform(keys, self.dim, Stream.FORWARD) - 1) * sqrt(3 / values)

    def __call__(
        self, batch: Batch, tokens: Int64[Tensor, "B M"] | None = None, taught: Taught | None = None
    ) -> Float[Tensor, "B M dim"]:
        """Target values of the given tokens (None: every token in raster order), float32."""
        patches = batch.cut(tokens).float()
        values, _ = normalise_patches(patches)
        with without_autocast(patches.device):
            mapped = values @ self.projection(patches.shape[-1], device=patches.device)
        return layer_norm(mapped, mapped.shape[-1:])
