"""VISReg: views of an image alike, and all images together normally distributed in mean, std and shape."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor

from mae.core.component import Share, Weight
from mae.core.contracts import Step
from mae.terms.views import ViewTerm, centre_distance, unit_directions

_EPS = 1e-4


@dataclass(frozen=True, kw_only=True)
class VISReg(ViewTerm):
    """Views of an image alike and images normally distributed, by a sliced Wasserstein distance (VISReg).

    `(1 - lambda) * prediction + lambda * (scale + shape + centre)` (Wu et al. 2026, "VISReg", algorithm 1), with z_nv
    the projection of view v of image n, and mean and std (of the sample, divided by N) over n for each view and
    dimension d:

    - prediction: the mean of (z_nv - mean over views of z_n)^2 over images, views and dimensions;
    - scale: the mean of (1 - std_d)^2;
    - shape: the standardised (z - mean) / (std + 1e-4), std taken as a constant, is projected on M random unit
      directions, drawn anew in every step, and sorted; the mean squared distance of the i-th of N from the normal
      quantile of i / (N + 1);
    - centre: the mean of mean_d^2.

    The gradient of the scale does not vanish where all images are projected to nearly one point.
    """

    kind: ClassVar[str] = "visreg"

    weight: Weight = 0.1
    """Weight of a term that makes views of an image alike and images normally distributed (VISReg). 0: without."""
    balance: Share = 0.6
    """Fraction of the distribution in it (lambda); the rest is the distance of views."""
    directions: Annotated[int, Gt(0), Le(16384)] = 1024
    """Random directions (M) on which the shape of the distribution is looked at."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value over the images of all processes, float32, not multiplied by `weight`.

        Raises:
            UsageError: fewer than two images, or a batch without keys.
        """
        z = self.projections(step)
        return self.of(z, unit_directions(step.batch.keys, dim=self.dim, count=self.directions, kind=self.kind))

    def of(self, z: Float[Tensor, "N views P"], a: Float[Tensor, "P M"]) -> Float[Tensor, ""]:
        """The value of projections, their shape along given unit directions."""
        std, mean = torch.std_mean(z, dim=0, correction=0)
        regulariser = (1 - std).square().mean() + shape((z - mean) / (std.detach() + _EPS) @ a) + mean.square().mean()
        return (1 - self.balance) * centre_distance(z) + self.balance * regulariser


def shape(x: Float[Tensor, "N views M"]) -> Float[Tensor, ""]:
    """The mean squared distance of N numbers, sorted, from normal quantiles, over views and directions."""
    ranks = torch.arange(1, len(x) + 1, device=x.device) / (len(x) + 1)
    quantiles = torch.special.ndtri(ranks)
    return (x.sort(dim=0).values - quantiles[:, None, None]).square().mean()
