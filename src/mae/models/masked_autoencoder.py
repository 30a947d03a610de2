"""The masked autoencoder (He et al. 2021): hide most patches, encode the rest, predict what was hidden."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from mae.errors import UsageError
from mae.masking.given import plan_from_mask
from mae.models.config import ModelConfig
from mae.models.decoder import MAEDecoder
from mae.models.encoder import Features, MAEEncoder
from mae.types import Grid, MAEOutput, MaskPlan


@runtime_checkable
class MaskStrategy(Protocol):
    """Draws a plan for a batch, one key a sample."""

    def plan(self, grid: Grid, keys: Int64[Tensor, " B"]) -> MaskPlan:
        """The plan of each sample, a pure function of its key."""


@runtime_checkable
class Target(Protocol):
    """What the decoder must predict for the given tokens."""

    def __call__(self, images: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Target values `[B, M, P]` of the given tokens (None: all)."""


@runtime_checkable
class ReconstructionLoss(Protocol):
    """The distance between prediction and target."""

    def __call__(self, pred: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """A scalar from `[B, M, P]` values and `[B, M]` weights."""


class MaskedAutoencoder(nn.Module):
    """An encoder and a decoder with a mask strategy, a target and a loss; two entrances, `forward` and `encode`.

    Args:
        encoder: sees the visible patches.
        decoder: predicts the hidden ones.
        masking: chooses what is hidden.
        target: what must be predicted.
        loss: how the prediction is judged.
        config: what the parts were built from, written into the model's file; None for parts put together by hand.
    """

    def __init__(
        self,
        *,
        encoder: MAEEncoder,
        decoder: MAEDecoder,
        masking: MaskStrategy,
        target: Target,
        loss: ReconstructionLoss,
        config: ModelConfig | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.masking = masking
        self.target = target
        self.loss = loss
        self.config = config

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        generator: torch.Generator | None = None,
        plan: MaskPlan | None = None,
    ) -> MAEOutput:
        """Mask, encode, decode and judge; the output unpacks as `loss, pred [B, N, P], mask [B, N]`.

        Give at most one of the last three; without any, the mask is drawn from PyTorch's global generator.

        Args:
            images: normalised images.
            mask: what to hide, true = hidden: `[B, N]`, the grid's shape, or pixels.
            generator: where to draw the mask from.
            plan: the mask in full. Training passes it: only the tokens in `plan.predicted` are then predicted,
                while otherwise the output holds a prediction for visible patches too (which nothing trains).

        Raises:
            UsageError: images or mask of a wrong shape, a mask that hides nothing or all.
        """
        grid = self.encoder.patch_embed.grid(images)
        if plan is not None and not (mask is None and generator is None):
            raise UsageError("give at most one of mask, generator and plan")
        if plan is None:
            plan = self.plan(images, mask=mask, generator=generator).predict_all()
        latent = self.encoder(images, plan.visible)
        prediction = self.decoder(latent, plan, grid)
        target = self.target(images, plan.predicted)
        with torch.autocast(images.device.type, enabled=False):
            terms = {"reconstruction": self.loss(prediction, target, plan.weight)}
        loss = torch.stack(list(terms.values())).sum()
        return MAEOutput(loss=loss, terms=terms, prediction=prediction, plan=plan, latent=latent)

    def plan(
        self,
        images: Shaped[Tensor, "B C H W"],
        *,
        mask: Shaped[Tensor, "..."] | None = None,
        generator: torch.Generator | None = None,
    ) -> MaskPlan:
        """The mask for these images: the one given, or one drawn; only hidden tokens are to be predicted.

        Raises:
            UsageError: see `forward`.
        """
        grid = self.encoder.patch_embed.grid(images)
        if mask is not None:
            if generator is not None:
                raise UsageError("give a mask or a generator to draw one from, not both")
            patch_size = self.encoder.patch_embed.patch_size
            return plan_from_mask(mask.to(images.device), batch=len(images), grid=grid, patch_size=patch_size)
        device = images.device if generator is None else generator.device
        keys = torch.randint(-(2**63), 2**63 - 1, (len(images),), generator=generator, device=device)
        return self.masking.plan(grid, keys.to(images.device))

    def encode(self, images: Float[Tensor, "B C H W"]) -> Features:
        """Features of whole images, never masked: `cls`, `mean` and `patches` in raster order.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        return self.encoder.encode(images)
