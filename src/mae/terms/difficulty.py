"""Learning which patches are hard to predict."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import softplus

from mae.core.component import Depth, Weight, Width
from mae.core.contracts import Step, Term
from mae.layers.mask_decoder import MAEDecoder


@dataclass(frozen=True, kw_only=True)
class Difficulty(Term):
    """Tell of two masked patches of an image which one's prediction is worse (HPM: Wang et al. 2023, section 3.3).

    A decoder of its own gives each patch a number d. Of every pair of masked patches i and j of an image whose squared
    errors differ, i having the larger one, the term has `log(1 + exp(d_j - d_i))`: log 2 where nothing is known, 0 at
    the right order. The errors are constants in it. The mean is over all pairs, those without data too, so that parts
    of a batch and processes add up to the whole.
    """

    kind: ClassVar[str] = "difficulty"
    predicts_loss: ClassVar[bool] = True

    weight: Weight = 1.0
    """Weight of a term that learns which patches are hard to predict, for --mask hard (HPM). 0: without."""
    embed_dim: Width = 128
    """Width of its decoder."""
    depth: Depth = 1
    """Blocks of its decoder."""
    num_heads: Width = 4
    """Attention heads of its decoder."""

    def head(self, encoder: Any) -> MAEDecoder:
        """The decoder, with fresh weights from PyTorch's global generator and without what the term leaves open."""
        decoder = MAEDecoder(
            encoder_dim=encoder.embed_dim,
            grid=encoder.grid,
            embed_dim=self.embed_dim,
            depth=self.depth,
            num_heads=self.num_heads,
            num_outputs=1,
        )
        for layer in (decoder.norm, decoder.pred):  # only differences count
            layer.register_parameter("bias", None)
        if encoder.mask_token is not None:  # it has put its own where patches are masked
            decoder.register_parameter("mask_token", None)
        return decoder

    def __call__(self, step: Step) -> Float[Tensor, ""]:
        """The value, float32, not multiplied by `weight`."""
        assert step.projected is not None
        counted = step.plan.hidden.gather(1, step.plan.predicted)  # visible ones may be predicted too
        error = (step.prediction.detach().float() - step.target).square().mean(dim=-1)  # NaN where there is no data
        error = error.masked_fill(~counted, torch.nan)
        guess = step.projected.float().squeeze(-1)
        worse = error.unsqueeze(2) > error.unsqueeze(1)  # [B, M, M], never of NaN
        wrong = softplus(guess.unsqueeze(1) - guess.unsqueeze(2))
        masked = counted.sum(dim=1)
        return (wrong * worse).sum() / (masked * (masked - 1) / 2).sum().clamp(min=1)
