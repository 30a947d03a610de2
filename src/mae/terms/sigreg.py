"""LeJEPA: views of an image alike, and all images together normally distributed by their characteristic function."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from jaxtyping import Float
from torch import Tensor

from mae.core.component import Share, Weight
from mae.core.contracts import Step
from mae.terms.views import ViewTerm, centre_distance, unit_directions

_KNOTS, _FURTHEST = 17, 3.0


@dataclass(frozen=True, kw_only=True)
class SIGReg(ViewTerm):
    """Views of an image alike and images normally distributed, by Epps and Pulley's test (LeJEPA).

    `(1 - lambda) * invariance + lambda * SIGReg` (Balestriero and LeCun 2025, "LeJEPA"), with z_nv the projection of
    view v of image n. Invariance is the mean of (z_nv - mean over views of z_n)^2 over images, views and dimensions, as
    in the paper's listing. SIGReg projects z on M random unit directions a_m, drawn anew in every step, and compares
    the characteristic function phi(t) = mean over n of exp(i t a_m . z_nv) with the normal one:
    N * integral of |phi(t) - exp(-t^2 / 2)|^2 exp(-t^2 / 2) over t from -3 to 3, by the trapezoidal rule with 17
    knots on [0, 3], averaged over directions and views. A normal sample of any size has about 1.05 on average, not 0.

    Its gradient vanishes where all images are projected to one point.
    """

    kind: ClassVar[str] = "sigreg"

    weight: Weight = 0.1
    """Weight of a term that makes views of an image alike and images normally distributed (LeJEPA). 0: without."""
    balance: Share = 0.05
    """Fraction of the distribution in it (lambda); the rest is the distance of views."""
    directions: Annotated[int, Gt(0), Le(16384)] = 256
    """Random directions (M) on which the distribution is looked at."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value over the images of all processes, float32, not multiplied by `weight`.

        Raises:
            UsageError: fewer than two images, or a batch without keys.
        """
        z = self.projections(step)
        return self.of(z, unit_directions(step.batch.keys, dim=self.dim, count=self.directions, kind=self.kind))

    def of(self, z: Float[Tensor, "N views P"], a: Float[Tensor, "P M"]) -> Float[Tensor, ""]:
        """The value of projections along given unit directions."""
        return (1 - self.balance) * centre_distance(z) + self.balance * epps_pulley(z @ a)


def epps_pulley(x: Float[Tensor, "N views M"]) -> Float[Tensor, ""]:
    """Epps and Pulley's statistic of N numbers against the normal distribution, its mean over views and directions."""
    t = torch.linspace(0, _FURTHEST, _KNOTS, device=x.device)
    normal = torch.exp(-t.square() / 2)
    step = _FURTHEST / (_KNOTS - 1)
    weight = torch.where((t == 0) | (t == t[-1]), step, 2 * step) * normal  # twice: the integrand is even
    angles = x.unsqueeze(-1) * t
    error = (angles.cos().mean(dim=0) - normal).square() + angles.sin().mean(dim=0).square()
    return len(x) * (error @ weight).mean()
