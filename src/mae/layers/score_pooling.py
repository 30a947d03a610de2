"""One vector of many tokens: their mean, weighted by a learned score (attention-based pooling, AbMILP)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class ScorePooling(nn.Module):
    """A mean of tokens, weighted by a softmax over them of one linear score.

    The simplest attention-based pooling of Ilse et al. 2018, as Przewięźlikowski et al. 2024 ("Beyond [cls]",
    arXiv 2412.03215) use it on the patch tokens of frozen masked autoencoders: no positions, no attention among the
    tokens. Its score has no bias, since that adds the same to each score and a softmax is blind to it.

    It starts as the plain mean: with a score of zeros every token weighs 1 / N. What it learns is then a departure from
    the usual summary, and it is the same for each seed.

    Args:
        dim: width of a token.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.zeros(dim))

    def weights(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B N"]:
        """How much each token counts; a row adds up to 1."""
        return (tokens @ self.score).softmax(dim=1)

    def forward(self, tokens: Float[Tensor, "B N D"]) -> Float[Tensor, "B D"]:
        """The weighted mean of each image's tokens."""
        return torch.einsum("bn,bnd->bd", self.weights(tokens), tokens)
