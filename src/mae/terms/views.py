"""What terms share that compare views of an image: a projector, the views of all processes, and random directions."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from mae.core.component import Weight, Width
from mae.core.contracts import Step, Term
from mae.core.types import Encoded, Layout, MaskPlan
from mae.errors import UsageError
from mae.layers.together import gather_features, shared_key
from mae.randomness import Stream, normal


class Projector(nn.Module):
    """One vector a row, through an MLP of one hidden layer with batch norm, as in the papers.

    Batch norm is needed: features of fresh encoders are nearly alike, and without it (layer norm was tried) projections
    collapsed in the first steps, which no term undid. To compute what one process does, each of several projects the
    rows of all, which costs little beside the encoder; batch norm keeps no running statistics, for nothing is projected
    outside of a batch. Layers have no bias where batch norm or a term subtracts means, and nothing would train it.

    Args:
        width: of the encoder's tokens.
        hidden: of the hidden layer.
        dim: values of a projection.
        pool: `mean` reads the mean visible token, `cls` the class token, of several their mean.
    """

    def __init__(self, *, width: int, hidden: int, dim: int, pool: str) -> None:
        super().__init__()
        self.pool = pool
        self.fc1 = nn.Linear(width, hidden, bias=False)
        self.norm = nn.BatchNorm1d(hidden, track_running_stats=False)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, encoded: Encoded, plan: MaskPlan, layout: Layout) -> Float[Tensor, "B P"]:
        """The projection of each row of all processes, in order of rank."""
        if self.pool == "mean":
            x = encoded.mean_visible(plan)
        else:
            assert encoded.cls is not None  # a method without class tokens is refused by `reads_cls`
            x = encoded.cls.float()
        return self.fc2(self.act(self.norm(self.fc1(gather_features(x).to(self.fc1.weight.dtype)))))


@dataclass(frozen=True, kw_only=True)
class ViewTerm(Term):
    """A term over projections of two or more masked views of each image."""

    reads_batch: ClassVar[bool] = True
    reads_views: ClassVar[bool] = True

    weight: Weight = 0.1
    """Weight of the term. 0: without."""
    dim: Width = 64
    """Values that an image is projected to."""
    hidden: Width = 512
    """Width of the projector's hidden layer."""
    pool: Literal["mean", "cls"] = "mean"
    """What is projected: the mean visible patch token, or the class token."""

    @property
    def reads_cls(self) -> bool:
        """Whether the class token is read."""
        return self.pool == "cls"

    def head(self, encoder: Any) -> Projector:
        """The projector, with fresh weights from PyTorch's global generator."""
        return Projector(width=encoder.embed_dim, hidden=self.hidden, dim=self.dim, pool=self.pool)

    def projections(self, step: Step) -> Float[Tensor, "N views P"]:
        """Of each view of the images of all processes, in float32.

        Raises:
            UsageError: fewer than two images, which have no distribution.
        """
        assert step.projected is not None
        z = step.projected.float().unflatten(0, (-1, step.batch.views))
        if len(z) < 2:
            raise UsageError(
                f"{self.kind} compares the images of a batch, and this one holds {len(z)}; expected 2 at least"
            )
        return z


def centre_distance(z: Float[Tensor, "N views P"]) -> Float[Tensor, ""]:
    """The mean of (z_nv - mean over views of z_n)^2 over images, views and dimensions."""
    return (z - z.mean(dim=1, keepdim=True)).square().mean()


def unit_directions(keys: Int64[Tensor, " b"] | None, *, dim: int, count: int, kind: str) -> Float[Tensor, "P M"]:
    """Unit vectors in columns, evenly spread, drawn from the first key of the batch: the same in every process.

    Args:
        keys: of this process's rows, which differ from step to step.
        dim: values of each.
        count: how many.
        kind: of the term that asks.

    Raises:
        UsageError: the keys are not known.
    """
    if keys is None:
        raise UsageError(f"{kind} draws its directions from the keys of the batch; give forward one a row as keys")
    drawn = normal(shared_key(keys), dim * count, Stream.DIRECTIONS).reshape(dim, count)
    return torch.nn.functional.normalize(drawn, dim=0)
