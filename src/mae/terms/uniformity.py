"""Keeping the features of different images apart."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mae.core.component import Weight
from mae.core.contracts import Step, Term
from mae.layers.precision import without_autocast
from mae.layers.together import gather_features


@dataclass(frozen=True, kw_only=True)
class Uniformity(Term):
    """How close together the features of a batch lie on the unit sphere; lower is more evenly spread.

    `gaussian` is the logarithm of the mean of exp(-2 |z_i - z_j|^2) over pairs i != j (Wang and Isola 2020, section
    4.1.2): between -8 and 0, and 0 where all are equal. `squared_cosine` is the mean of (z_i . z_j)^2 over all i and j,
    the diagonal included (U-MAE: Zhang et al. 2022): at least 1 / B, and 1 where all are equal.
    """

    kind: ClassVar[str] = "uniformity"
    reads_batch: ClassVar[bool] = True

    weight: Weight = 0.01
    """Weight of a term that spreads the images' features. 0: without."""
    form: Literal["gaussian", "squared_cosine"] = "gaussian"
    """gaussian: after Wang and Isola. squared_cosine: U-MAE's."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value of the mean visible tokens, float32, not multiplied by `weight`."""
        return self.of(step.features)

    def of(self, features: Float[Tensor, "B D"]) -> Float[Tensor, ""]:
        """The value in float32, not multiplied by `weight`.

        In a run of several processes it is taken over the images of all of them (see `gather_features`), and is
        the same in each. A single image has no pair: the gaussian form is then 0 with zero gradient.

        Args:
            features: one row an image, any length, any floating type.
        """
        with without_autocast(features.device):
            unit = gather_features(functional.normalize(features.float(), dim=-1))
            cosines = unit @ unit.T
        if self.form == "squared_cosine":
            return cosines.square().mean()
        images = len(unit)
        if images == 1:
            return 0 * cosines.sum()
        itself = torch.eye(images, dtype=torch.bool, device=unit.device)
        exponents = (4 * cosines - 4).masked_fill(itself, -math.inf)  # |a - b|^2 = 2 - 2 cos for unit vectors
        return exponents.flatten().logsumexp(dim=0) - math.log(images * (images - 1))
