"""What a model weighs and what it costs: parameters, and floating-point operations counted without running it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mae.core.method import MethodConfig
from mae.core.types import Layout
from mae.errors import UsageError
from mae.models.build import build_model
from mae.models.masked_autoencoder import MaskedAutoencoder

_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """Sizes and costs of a model; a multiply-add counts as 2 operations.

    Only matrix products are counted (linear layers, attention), as is usual; norms, activations and the
    optimizer's step are not.

    Attributes:
        encoder_params: trained values of the encoder.
        decoder_params: trained values of the decoder.
        term_params: trained values of networks that terms have of their own.
        encoder_positions: values of the encoder's position table; among `encoder_params` only if learned.
        decoder_positions: likewise for the decoder; 0 for one that has no `pos_embed` or no linear layer `pred`.
        encoder_flops: operations per image of the encoder on visible tokens, forward only.
        decoder_flops: operations per image of the decoder, forward only.
        head_flops: of them those of its last layer `pred`, which predicts the patches; 0 without such a layer.
        step_flops: operations per image of a training step, forward and backward, with the teacher's; without these,
            and those of the target, where no model's file holds the teacher.
        encode_flops: operations per image of `encode`, which sees every patch.
    """

    encoder_params: int
    decoder_params: int
    term_params: int
    encoder_positions: int
    decoder_positions: int
    encoder_flops: int
    decoder_flops: int
    head_flops: int
    step_flops: int
    encode_flops: int

    @property
    def params(self) -> int:
        """Trained values of the whole model."""
        return self.encoder_params + self.decoder_params + self.term_params


def summarise(model: MaskedAutoencoder | MethodConfig) -> ModelSummary:
    """Parameters and operations of a model, or of the model a configuration describes.

    Everything is counted on PyTorch's meta device: no weight is allocated, none is computed, and the model
    itself is left as it is.

    Raises:
        UsageError: a model put together by hand, without a configuration; values that do not fit each other.
    """
    config = model if isinstance(model, MethodConfig) else model.config
    if config is None:
        raise UsageError("this model carries no configuration, so its image size is not known; give a MethodConfig")
    with torch.device("meta"):
        twin = build_model(config)
        layout = config.layout
        images = torch.empty(1, layout.channels, *layout.size)
        plan = twin.plan(images)
    encoder, decoder = twin.encoder, twin.decoder
    head = getattr(decoder, "pred", None)  # decoders of others may end in anything
    linear = head if isinstance(head, nn.Linear) else None
    decoder_width = linear.in_features if linear is not None and hasattr(decoder, "pos_embed") else 0
    encoded = twin.encoded(images, plan)
    return ModelSummary(
        encoder_params=_num_trained(encoder),
        decoder_params=_num_trained(decoder),
        term_params=_num_trained(twin.term_heads),
        encoder_positions=layout.num_tokens * encoder.embed_dim,
        decoder_positions=layout.num_tokens * decoder_width,
        encoder_flops=_flops(lambda: encoder(images, plan)),
        decoder_flops=_flops(lambda: decoder(encoded, plan, layout)),
        head_flops=0 if linear is None else 2 * plan.predicted.numel() * linear.weight.numel(),
        step_flops=_flops(partial(_step, twin, layout)) // _ROWS,
        encode_flops=_flops(lambda: encoder(images)),
    )


def _step(model: MaskedAutoencoder, layout: Layout) -> None:
    """A training step on the meta device, of two views of two images, which terms may compare."""
    images = torch.empty(_ROWS, layout.channels, *layout.size, device="meta")
    keys = torch.zeros(_ROWS, dtype=torch.int64, device="meta")
    plan = model.plan(images, keys=keys)
    if model.has_loss:
        model(images, plan=plan, keys=keys, views=2).loss.backward()
        return
    encoded = model.encoded(images, plan)
    found = [each(encoded, plan, layout) for each in (model.decoder, *model.term_heads.values())]
    torch.stack([values.sum() for values in found]).sum().backward()


def _num_trained(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters() if weight.requires_grad)


def _flops(run: Callable[[], object]) -> int:
    counter = FlopCounterMode(display=False)
    # Fused attention is one opaque operation to the counter on some devices; the plain one is two products.
    with counter, sdpa_kernel(SDPBackend.MATH):
        run()
    return counter.get_total_flops()
