"""SimCLR's contrast: another view of the same image must be found among the views of all images."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from mae.core.component import Positive, Weight
from mae.core.contracts import Step
from mae.terms.views import ViewTerm


@dataclass(frozen=True, kw_only=True)
class InfoNCE(ViewTerm):
    """Another view of the same image must be found among the views of all images (CAN, SimCLR).

    NT-Xent (Chen et al. 2020, "SimCLR", equation 1), which CAN (Mishra et al. 2022) adds to a masked autoencoder. With
    z_i the projections of all N V views, scaled to length 1, and tau the temperature: the mean over all ordered pairs
    (i, j) of different views of one image of -log of exp(z_i . z_j / tau) over the sum of exp(z_i . z_k / tau) over
    k != i. Of more than two views each other one is to be found in turn. It is log(N V - 1) where
    all projections are alike.
    """

    kind: ClassVar[str] = "infonce"

    weight: Weight = 0.1
    """Weight of a term that finds views of an image among those of others (CAN, SimCLR). 0: without."""
    temperature: Positive = 0.1
    """Cosines are divided by it (tau)."""

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value over the images of all processes, float32, not multiplied by `weight`.

        Raises:
            UsageError: fewer than two images.
        """
        return self.of(self.projections(step))

    def of(self, z: Float[Tensor, "N views P"]) -> Float[Tensor, ""]:
        """The value of projections."""
        images, views, _ = z.shape
        unit = functional.normalize(z.flatten(0, 1), dim=-1)
        number = torch.arange(images * views, device=z.device)
        itself = number[:, None] == number
        logits = (unit @ unit.T / self.temperature).masked_fill(itself, -math.inf)
        same = (number[:, None] // views == number // views) & ~itself
        return -logits.log_softmax(dim=1).masked_fill(~same, 0).sum() / (images * views * (views - 1))
