"""The masked autoencoder (He et al. 2021): hide most patches, encode the rest, predict what was hidden."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from mae.errors import UsageError
from mae.layers.patch_embed import unpatchify
from mae.masking.given import plan_from_mask
from mae.models.config import ModelConfig
from mae.models.decoder import CrossDecoder, MAEDecoder
from mae.models.encoder import MAEEncoder
from mae.models.pretrained import PretrainedEncoder
from mae.types import Grid, MAEOutput, MaskPlan


@runtime_checkable
class MaskStrategy(Protocol):
    """Draws a plan for a batch, one key a sample."""

    def plan(self, grid: Grid, keys: Int64[Tensor, " B"], ratio: float | None = None) -> MaskPlan:
        """The plan of each sample, a pure function of its key; `ratio` None: the strategy's own."""


@runtime_checkable
class Target(Protocol):
    """What the decoder must predict for the given tokens."""

    def __call__(self, images: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Target values `[B, M, P]` of the given tokens (None: all)."""


@runtime_checkable
class PictureTarget(Target, Protocol):
    """A target from which the predicted picture can be told."""

    def with_deviation(self, images: Tensor, tokens: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Target values, and what one unit of them is in the images' own, `[B, M, 1]`; None where that is the same."""


@runtime_checkable
class ReconstructionLoss(Protocol):
    """The distance between prediction and target."""

    def __call__(self, pred: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
        """A scalar from `[B, M, P]` values and `[B, M]` weights."""


@runtime_checkable
class PictureTerm(Protocol):
    """A further term of the loss, on the predicted picture."""

    @property
    def weight(self) -> float:
        """How much of the term is added to the loss."""

    @property
    def raw(self) -> bool:
        """Whether it wants a prediction for visible patches too."""

    def __call__(self, error: Tensor, hidden: Tensor) -> Tensor:
        """A scalar, unweighted, from the picture's error `[B, C, H, W]` and where it is hidden `[B, 1, H, W]`.

        Unless it is `raw`, true pixels stand on visible patches: the error there is 0.
        """


@runtime_checkable
class FeatureTerm(Protocol):
    """A further term of the loss, on the encoder's features."""

    @property
    def weight(self) -> float:
        """How much of the term is added to the loss."""

    def __call__(self, features: Tensor) -> Tensor:
        """A scalar, unweighted, from the mean visible token of each image `[B, D]`."""


_NO_TERMS: Mapping[str, Any] = MappingProxyType({})


class MaskedAutoencoder(PretrainedEncoder):
    """An encoder and a decoder with a mask strategy, a target and a loss; two entrances, `forward` and `encode`.

    Args:
        encoder: sees the visible patches.
        decoder: predicts the hidden ones.
        masking: chooses what is hidden.
        target: what must be predicted.
        loss: how the prediction is judged.
        picture_terms: what is added to the loss for the picture, by name.
        feature_terms: what is added to the loss for the features, by name.
        config: what the parts were built from, written into the model's file; None for parts put together by hand.

    Raises:
        UsageError: terms for the picture of a target that makes none.
    """

    def __init__(
        self,
        *,
        encoder: MAEEncoder,
        decoder: MAEDecoder | CrossDecoder,
        masking: MaskStrategy,
        target: Target,
        loss: ReconstructionLoss,
        picture_terms: Mapping[str, PictureTerm] = _NO_TERMS,
        feature_terms: Mapping[str, FeatureTerm] = _NO_TERMS,
        config: ModelConfig | None = None,
    ) -> None:
        super().__init__(encoder=encoder, config=config)
        self.decoder = decoder
        self.masking = masking
        self.target = target
        self.loss = loss
        self.picture_terms = dict(picture_terms)
        self.feature_terms = dict(feature_terms)
        if picture_terms and not isinstance(target, PictureTarget):
            names = ", ".join(picture_terms)
            raise UsageError(f"{names} judge the predicted picture, and {type(target).__name__} makes none of it")

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
        elif any(term.raw for term in self.picture_terms.values()):
            plan = plan.predict_all()
        maps = self.maps(images, plan)
        latent, prediction = maps[-1], self.decoder(maps, plan, grid)
        with torch.autocast(images.device.type, enabled=False):
            terms = self._judge_prediction(images, prediction, plan, grid) | self._judge_features(latent)
        weights = {name: term.weight for name, term in self.picture_terms.items()}
        weights |= {name: term.weight for name, term in self.feature_terms.items()}
        loss = torch.stack([weights.get(name, 1.0) * value for name, value in terms.items()]).sum()
        return MAEOutput(loss=loss, terms=terms, prediction=prediction, plan=plan, latent=latent)

    def maps(self, images: Float[Tensor, "B C H W"], plan: MaskPlan) -> list[Float[Tensor, "B L D"]]:
        """What the decoder is given: the encoder's last tokens, before them what left each block where it needs that.

        Raises:
            UsageError: images of a wrong shape, or of a size the positions cannot be made for.
        """
        if self.decoder.needs_maps:
            return self.encoder.maps(images, plan.visible)
        return [self.encoder(images, plan.visible)]

    def _judge_prediction(
        self, images: Float[Tensor, "B C H W"], prediction: Float[Tensor, "B M P"], plan: MaskPlan, grid: Grid
    ) -> dict[str, Float[Tensor, ""]]:
        """The reconstruction loss and the terms on the predicted picture."""
        if not self.picture_terms:
            return {"reconstruction": self.loss(prediction, self.target(images, plan.predicted), plan.weight)}
        assert isinstance(self.target, PictureTarget)
        target, deviation = self.target.with_deviation(images, plan.predicted)
        error = prediction.float() - target
        if deviation is not None:  # the mean is in both and cancels
            error = error * deviation
        terms = {"reconstruction": self.loss(prediction, target, plan.weight)}
        return terms | self._judge_picture(error, plan, grid)

    def _judge_picture(self, error: Float[Tensor, "B M P"], plan: MaskPlan, grid: Grid) -> dict[str, Float[Tensor, ""]]:
        """The terms on the predicted picture, whose error is in the unit of the (normalised) images.

        A norm-pix prediction is brought back to pixels with the true mean and deviation of its patch, so an error
        counts by the contrast of the patch it is made in, and flat patches count next to nothing.
        """
        patch_size = self.encoder.patch_embed.patch_size
        where = plan.hidden.unsqueeze(-1)
        pixels = where.expand(-1, -1, patch_size[0] * patch_size[1])
        hidden: Bool[Tensor, "B 1 H W"] = unpatchify(pixels, grid, patch_size)
        whole = plan.on_grid(error)
        raw = assembled = unpatchify(whole, grid, patch_size)
        if plan.visible.shape[1] + plan.predicted.shape[1] > plan.hidden.shape[1]:  # visible ones are predicted too
            assembled = unpatchify(whole * where, grid, patch_size)
        return {name: term(raw if term.raw else assembled, hidden) for name, term in self.picture_terms.items()}

    def _judge_features(self, latent: Float[Tensor, "B L D"]) -> dict[str, Float[Tensor, ""]]:
        """The terms on the mean visible token of each image."""
        if not self.feature_terms:
            return {}
        features = latent[:, self.encoder.num_prefix :].float().mean(dim=1)
        return {name: term(features) for name, term in self.feature_terms.items()}

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
