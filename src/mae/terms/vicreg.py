"""VICReg: views of an image alike, and dimensions that vary over images, each by itself."""

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from mae.core.component import NotNegative, Weight
from mae.core.contracts import Step
from mae.terms.views import ViewTerm

_EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class VICReg(ViewTerm):
    """Views of an image alike, and dimensions that vary over images, each by itself (VICReg).

    `lambda * invariance + mu * variance + nu * covariance` (Bardes et al. 2022, "VICReg", section 4), with Z the N x P
    projections of a view:

    - invariance s: the mean squared difference of two views' projections, over dimensions too as in the official
      code; of more than two views the mean over pairs;
    - variance v: the mean over dimensions of max(0, 1 - sqrt(Var(Z_d) + 1e-4)), averaged over views;
    - covariance c: the sum of squared covariances of different dimensions over P, summed over two views (of more,
      twice their mean).

    Variance and covariance are of the sample, divided by N - 1.
    """

    kind: ClassVar[str] = "vicreg"

    weight: Weight = 0.01
    """Weight of a term that makes views of an image alike and dimensions vary by themselves (VICReg). 0: without."""
    invariance: NotNegative = 25.0
    """Weight in it of the distance of views (lambda)."""
    variance: NotNegative = 25.0
    """Weight in it of dimensions that vary too little (mu)."""
    covariance: NotNegative = 1.0
    """Weight in it of dimensions that vary together (nu)."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value over the images of all processes, float32, not multiplied by `weight`.

        Raises:
            UsageError: fewer than two images.
        """
        return self.of(self.projections(step))

    def of(self, z: Float[Tensor, "N views P"]) -> Float[Tensor, ""]:
        """The value of projections."""
        pairs = torch.stack([(one - other).square().mean() for one, other in combinations(z.unbind(1), 2)])
        std = (z.var(dim=0) + _EPS).sqrt()
        centred = (z - z.mean(dim=0)).transpose(0, 1)  # [views, N, P]
        covariance = centred.mT @ centred / (len(z) - 1)
        apart = ~torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
        together = (covariance * apart).square().sum(dim=(1, 2)).mean() / z.shape[-1]
        return self.invariance * pairs.mean() + self.variance * (1 - std).relu().mean() + self.covariance * 2 * together
