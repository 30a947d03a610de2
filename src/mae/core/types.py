"""The words used everywhere, and the shape legend.

Shapes: `B` batch, `C` channels, `H W` pixels, `T` frames, `N` tokens of the grid, `V` visible tokens,
`M` predicted tokens, `P` values per patch, `D` encoder width, `K` decoder width, `L` tokens in a sequence.
Tokens are numbered in raster order (row by row) over the grid.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional

from mae.core.sizes import check_multiple

Grid = tuple[int, ...]
"""Lengths of the token grid's axes, `(h, w)`; always carried, never recovered from a square root."""


ROLES = ("visible", "predicted", "left out")
"""What a token is to a mask: seen by the encoder, predicted by the decoder, or neither."""


def take_tokens(values: Float[Tensor, "B N P"], tokens: Int64[Tensor, "B M"]) -> Float[Tensor, "B M P"]:
    """The values of the given tokens, by their numbers."""
    return values.gather(1, tokens.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def take_rows(table: Float[Tensor, "N D"], tokens: Int64[Tensor, "B M"]) -> Float[Tensor, "B M D"]:
    """The rows of a table that all samples share, by the numbers of tokens; an index would copy value by value."""
    return table.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)


def cross_entropy(logits: Float[Tensor, "B M K"], classes: Float[Tensor, "B M 1"]) -> Float[Tensor, "B M 1"]:
    """Of each token, float32; 0 where its class is NaN, for there is none."""
    none = -100  # what PyTorch's cross-entropy leaves out
    numbers = classes.nan_to_num(nan=none).long().flatten()
    return functional.cross_entropy(logits.float().flatten(0, 1), numbers, reduction="none").view(classes.shape)


def weighted_mean(values: Float[Tensor, "B M P"], weight: Float[Tensor, "B M"] | None) -> Float[Tensor, ""]:
    """Mean over a patch's values, then over the patches of the whole batch.

    Args:
        values: how wrong each predicted value is, float32.
        weight: how much each patch counts, relative to the others; None counts each alike.
    """
    per_patch = values.mean(dim=-1)
    if weight is None:
        return per_patch.mean()
    return (per_patch * weight).sum() / weight.sum()


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of a sample and of its tokens, over any number of axes.

    Attributes:
        size: lengths of the sample's axes, `(H, W)` for images.
        patch: lengths of a token along each of them.
        channels: values at each place.

    Raises:
        UsageError: a size that is not a positive multiple of the patch; the nearest ones are named.
    """

    size: tuple[int, ...]
    patch: tuple[int, ...]
    channels: int

    def __post_init__(self) -> None:
        check_multiple(self.size, self.patch)

    @property
    def grid(self) -> Grid:
        """Tokens along each axis."""
        return tuple(side // patch for side, patch in zip(self.size, self.patch, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens of a sample, N."""
        return prod(self.grid)

    @property
    def token_values(self) -> int:
        """Values of a token, P."""
        return prod(self.patch) * self.channels


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskPlan:
    """Which tokens the encoder sees, which the decoder predicts, and how much each prediction counts.

    Attributes:
        visible: tokens the encoder sees, numbers in `[0, N)`.
        predicted: tokens the decoder predicts, numbers in `[0, N)`.
        weight: how much each prediction counts in the loss; None counts each alike.
        hidden: True where a token is masked and the loss applies.
        grid: of the tokens, to draw the plan; None of a plan whose strategy did not say.
        predicts_rest: whether `predicted` holds each token that is not visible, and no other, as its strategy says: a
            decoder then computes nothing twice or in vain.
    """

    visible: Int64[Tensor, "B V"]
    predicted: Int64[Tensor, "B M"]
    weight: Float[Tensor, "B M"] | None = None
    hidden: Bool[Tensor, "B N"]
    grid: Grid | None = None
    predicts_rest: bool = False

    def on_grid(self, values: Float[Tensor, "B M P"]) -> Float[Tensor, "B N P"]:
        """Values of the predicted tokens on the whole grid in raster order; zeros where nothing was predicted."""
        batch, num_tokens = self.hidden.shape
        first = torch.arange(batch, device=values.device).unsqueeze(-1) * num_tokens  # of each image's rows
        whole = values.new_zeros(batch * num_tokens, values.shape[-1])
        # Rows copied whole: a scatter would look up each number's place.
        whole.index_copy_(0, (first + self.predicted).flatten(), values.flatten(0, 1))
        return whole.reshape(batch, num_tokens, -1)

    def to(self, device: torch.device) -> "MaskPlan":
        """The same plan on another device."""
        return self._each(lambda values: values.to(device))  # a copy to the host must have arrived when it is read

    def take(self, rows: Any) -> "MaskPlan":
        """The plan of some samples: a slice, numbers, or booleans."""
        return self._each(lambda values: values[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> "MaskPlan":
        return replace(
            self,
            visible=change(self.visible),
            predicted=change(self.predicted),
            weight=None if self.weight is None else change(self.weight),
            hidden=change(self.hidden),
        )

    def roles(self) -> list[list[str]]:
        """What each token of each sample is: one of `ROLES`."""
        batch, num_tokens = self.hidden.shape
        seen, asked = (
            torch.zeros(batch, num_tokens, dtype=torch.bool, device=self.hidden.device).scatter_(1, tokens, True)
            for tokens in (self.visible, self.predicted)
        )
        role = torch.where(seen, 0, torch.where(asked, 1, 2))
        return [[ROLES[number] for number in row] for row in role.tolist()]

    def _repr_html_(self) -> str:
        from mae.core.mask_picture import mask_html  # here: drawn in notebooks alone

        return mask_html(self)

    def predict_all(self) -> "MaskPlan":
        """The same mask with every token predicted; only the hidden ones still count in the loss."""
        batch, num_tokens = self.hidden.shape
        everything = torch.arange(num_tokens, device=self.hidden.device).expand(batch, -1)
        return replace(self, predicted=everything, weight=self.hidden.float(), predicts_rest=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class MaskRequest:
    """What a mask strategy is asked for.

    Attributes:
        layout: of the samples.
        keys: one a sample, `[B]`; the plan is a pure function of it.
        ratio: fraction to be masked, as a schedule wants it; None: the strategy's own.
        x: the samples, for a strategy that reads them; None where there are none yet.
        scores: what the teacher says of each token, for a strategy that reads it.
        progress: of the run, from 0 to 1; None: outside of one, as at its end.
    """

    layout: Layout
    keys: Int64[Tensor, " B"]
    ratio: float | None = None
    x: Float[Tensor, "B ..."] | None = None
    scores: Float[Tensor, "B N"] | None = None
    progress: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class SourceNetwork:
    """A network trained elsewhere, opened for a teacher that names it; it stays on its device, in evaluation mode.

    Attributes:
        name: what the user calls it.
        maps: from samples `[B, C, *size]`, normalised by `mean` and `std`, and numbers of blocks, ascending from 0, to
            what leaves these blocks, `[B, D, *grid]` each; without gradients, the last block's after the final norm.
        depth: blocks.
        size: lengths of the axes of the samples it is made for.
        channels: of its samples.
        channel_names: in order; None where they have none.
        mean: of each channel.
        std: of each channel.
        pixel_dtype: type of the values in files that gives the unit of `mean` and `std`; None where it is not known.
        fingerprint: text that changes with its weights and with how its samples are made.
    """

    name: str
    maps: Callable[[Float[Tensor, "B C ..."], Sequence[int]], Sequence[Float[Tensor, "B D ..."]]]
    depth: int
    size: tuple[int, ...]
    channels: int
    channel_names: tuple[str, ...] | None
    mean: Sequence[float]
    std: Sequence[float]
    pixel_dtype: Any
    fingerprint: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """What an encoder hands to a decoder.

    Attributes:
        levels: the tokens that enter the first block and those that leave each, where the decoder reads them; else the
            last ones alone. The last ones have passed the final norm.
        num_prefix: tokens that lead each level and have no place in the grid, as class tokens.
        places: numbers of the tokens that follow, `[B, V]`; None: every token of the grid in raster order, mask tokens
            standing for the masked ones.
    """

    levels: Sequence[Float[Tensor, "B L D"]]
    num_prefix: int
    places: Int64[Tensor, "B V"] | None

    @property
    def tokens(self) -> Float[Tensor, "B L D"]:
        """The last level."""
        return self.levels[-1]

    @property
    def cls(self) -> Float[Tensor, "B D"] | None:
        """The mean of the tokens that lead the last level; None where there are none."""
        return self.tokens[:, : self.num_prefix].mean(dim=1) if self.num_prefix else None

    def mean_visible(self, plan: MaskPlan) -> Float[Tensor, "B D"]:
        """The mean visible token of each row, float32."""
        tokens = self.tokens[:, self.num_prefix :]
        if self.places is None:  # mask tokens stand among them
            tokens = take_tokens(tokens, plan.visible)
        return tokens.float().mean(dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class MAEOutput:
    """What a pre-training forward returns; unpacks as the field's triple `loss, pred, mask`.

    Attributes:
        loss: the sum of the terms, each times its weight, float32.
        terms: each named part of the loss, unweighted; `reconstruction` counts once.
        prediction: what the decoder predicts for the tokens in `plan.predicted`, in target units.
        plan: the mask that was used.
        latent: the encoder's output for the visible tokens, class tokens first if there are any.
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
