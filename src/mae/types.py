"""The words used everywhere, and the shape legend.

Shapes: `B` batch, `C` channels, `H W` pixels, `T` frames, `N` tokens of the grid, `V` visible tokens,
`M` predicted tokens, `P` values per patch, `D` encoder width, `K` decoder width, `L` tokens in a sequence.
Tokens are numbered in raster order (row by row) over the grid.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

Grid = tuple[int, ...]
"""Lengths of the token grid's axes, `(h, w)`; always carried, never recovered from a square root."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskPlan:
    """Which tokens the encoder sees, which the decoder predicts, and how much each prediction counts.

    Attributes:
        visible: tokens the encoder sees, numbers in `[0, N)`.
        predicted: tokens the decoder predicts, numbers in `[0, N)`.
        weight: how much each prediction counts in the loss; None counts each alike.
        hidden: True where a token is masked and the loss applies.
    """

    visible: Int64[Tensor, "B V"]
    predicted: Int64[Tensor, "B M"]
    weight: Float[Tensor, "B M"] | None = None
    hidden: Bool[Tensor, "B N"]

    def on_grid(self, values: Float[Tensor, "B M P"]) -> Float[Tensor, "B N P"]:
        """Values of the predicted tokens on the whole grid in raster order; zeros where nothing was predicted."""
        batch, num_tokens = self.hidden.shape
        first = torch.arange(batch, device=values.device).unsqueeze(-1) * num_tokens  # of each image's rows
        whole = values.new_zeros(batch * num_tokens, values.shape[-1])
        # Rows copied whole: a scatter would look up each number's place.
        whole.index_copy_(0, (first + self.predicted).flatten(), values.flatten(0, 1))
        return whole.reshape(batch, num_tokens, -1)

    def predict_all(self) -> "MaskPlan":
        """The same mask with every token predicted; only the hidden ones still count in the loss."""
        batch, num_tokens = self.hidden.shape
        everything = torch.arange(num_tokens, device=self.hidden.device).expand(batch, -1)
        return replace(self, predicted=everything, weight=self.hidden.float())


@dataclass(frozen=True, kw_only=True, eq=False)
class MAEOutput:
    """What a pre-training forward returns; unpacks as the field's triple `loss, pred, mask`.

    Attributes:
        loss: the sum of the terms, each times its weight, float32.
        terms: each named part of the loss, unweighted; `reconstruction` counts once.
        prediction: what the decoder predicts for the tokens in `plan.predicted`, in target units.
        plan: the mask that was used.
        latent: the encoder's output for the visible tokens, class token first if there is one.
    """

    loss: Float[Tensor, ""]
    terms: Mapping[str, Float[Tensor, ""]]
    prediction: Float[Tensor, "B M P"]
    plan: MaskPlan
    latent: Float[Tensor, "B L D"]

    @property
    def pred(self) -> Float[Tensor, "B N P"]:
        """The prediction on the whole grid in raster order; zeros where nothing was predicted."""
        return self.plan.on_grid(self.prediction)

    @property
    def mask(self) -> Float[Tensor, "B N"]:
        """1 where a patch was hidden, 0 where it was visible."""
        return self.plan.hidden.float()

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.loss, self.pred, self.mask))
