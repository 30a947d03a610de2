"""A learned pooling of frozen tokens under a linear head, as it is trained."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from mae.layers.score_pooling import ScorePooling


class PooledHead(nn.Module):
    """Batch normalisation, `ScorePooling` and a linear head.

    The norm brings the tokens of any encoder to one scale, so that one learning rate suits them. Once it is trained it
    is linear, as score and head are: `folded` leaves nothing of it.

    Args:
        dim: width of a token.
        num_classes: number of classes.
        learned: whether the pooling trains too; False: it stays the mean.
    """

    def __init__(self, *, dim: int, num_classes: int, learned: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, affine=False, eps=1e-6)
        self.pooling = ScorePooling(dim).requires_grad_(learned)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B K"]:
        """The logits of each image."""
        return self.head(self.pooling(self.norm(tokens.flatten(0, 1)).view_as(tokens)))

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """Score, weight and bias that make the same of tokens as they are, by their names in `PooledProbe`."""
        mean, variance = self.norm.running_mean, self.norm.running_var
        assert mean is not None and variance is not None
        scale = (variance.double() + self.norm.eps).sqrt()
        weight = self.head.weight.double() / scale
        bias = self.head.bias.double() - weight @ mean.double()
        found = {"pooling.score": self.pooling.score / scale, "head.weight": weight, "head.bias": bias}
        return {name: values.float() for name, values in found.items()}
