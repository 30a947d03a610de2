"""The summary against formulas by hand, and without allocating anything."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from tiny import images_for, tiny_config, tiny_model
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mae.core.contracts import Decoder
from mae.core.method import MethodConfig
from mae.core.types import take_tokens
from mae.errors import UsageError
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.presets import create_model
from mae.models.summary import summarise


def linear(tokens: int, inputs: int, outputs: int) -> int:
    """A multiply-add counts as 2."""
    return 2 * tokens * inputs * outputs


def block(tokens: int, dim: int, hidden: int, *, out: int | None = None) -> int:
    """Operations in linear layers (12 d^2 a token for the usual ratio of 4) and in the two products of attention.

    Args:
        out: tokens that leave it, if not all; the others are keys and values.
    """
    out = tokens if out is None else out
    return linear(tokens, dim, 3 * dim) + linear(out, dim, dim + 2 * hidden) + 2 * linear(out, dim, tokens)


@pytest.mark.parametrize(
    "changes", [{}, {"cls_token": False, "patch_size": (4, 8)}, {"pos_embed": "learned"}, {"cls_tokens": 4}], ids=str
)
def test_operations_are_those_of_the_formula(changes: dict[str, Any]) -> None:
    c = tiny_config(**changes)
    dim, decoder_dim, values = c.encoder.embed_dim, c.decoder.embed_dim, c.layout.token_values
    tokens, prefix = c.layout.num_tokens, c.encoder.cls_token and changes.get("cls_tokens", 1)
    visible = tokens // 4
    embed = linear(visible, values, dim)
    mlp, decoder_mlp = int(dim * c.encoder.mlp_ratio), int(decoder_dim * c.decoder.mlp_ratio)
    encoder = embed + c.encoder.depth * block(visible + prefix, dim, mlp)
    between = linear(visible + prefix, dim, decoder_dim)
    head = linear(tokens - visible, decoder_dim, values)
    decoder_block = partial(block, tokens + prefix, decoder_dim, decoder_mlp)
    decoder = between + head + (c.decoder.depth - 1) * decoder_block() + decoder_block(out=tokens - visible)
    whole = linear(tokens, values, dim) + c.encoder.depth * block(tokens + prefix, dim, mlp)
    summary = summarise(c)
    assert summary.encoder_flops == encoder
    assert summary.decoder_flops == decoder
    assert summary.encode_flops == whole
    # Backward: two products for each of forward, but none for the gradient of the images.
    assert summary.step_flops == 3 * (encoder + decoder) - embed


@pytest.mark.parametrize("pos_embed", ["sincos2d", "learned"])
def test_parameters_are_those_of_the_model(pos_embed: str) -> None:
    model = tiny_model(pos_embed=pos_embed)
    summary = summarise(model)
    assert summary.encoder_params == sum(weight.numel() for weight in model.encoder.parameters())
    assert summary.decoder_params == sum(weight.numel() for weight in model.decoder.parameters())
    assert summary.params == summary.encoder_params + summary.decoder_params
    assert (summary.encoder_positions, summary.decoder_positions) == (24 * 24, 24 * 16)


def test_a_model_and_its_configuration_agree_and_the_model_is_left_alone() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    assert summarise(model) == summarise(tiny_config())
    assert torch.equal(before, torch.get_rng_state())
    assert all(weight.grad is None and weight.device.type == "cpu" for weight in model.parameters())
    assert model(images_for(model)).loss.isfinite()


CODES = {"target": "codes", "teacher": "codebook", "loss": "cross_entropy"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        CODES,
        {"target": "features", "teacher": "ema"},
        {"target": "random_projection"},
        {"target": "hog", "target_cell": 4},
        {"mask": "attention", "teacher": "ema"},
        {"mask": "hard", "teacher": "ema", "difficulty": 1.0},
        {"mask": "block"},
        {"uniformity": 0.01, "laplacian": 0.1, "focal_frequency": 0.1},
        *({term: 0.1} for term in ("sigreg", "visreg", "infonce", "vicreg")),
    ],
    ids=str,
)
def test_the_real_step_costs_what_the_summary_says(options: dict[str, Any]) -> None:
    """Counted on the CPU while it runs: teacher, target, terms and all."""
    model = tiny_model(**options)
    images, keys = images_for(model, batch=4), torch.arange(4)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        plan = model.plan(images, keys=keys)
        model(images, plan=plan, keys=keys, views=2).loss.backward()
    expected = counter.get_total_flops()
    if options.get("mask") == "block":  # where blocks lie does not matter, and is not known of a summary
        assert summarise(model).step_flops == pytest.approx(expected / 4)
    else:
        assert 4 * summarise(model).step_flops == expected


def test_the_step_of_a_model_without_its_teacher_is_counted_without_it() -> None:
    with_teacher = summarise(tiny_config(target="features", teacher="ema"))
    alone = summarise(tiny_config(target="features", teacher="frozen", teacher_source="elsewhere"))
    assert alone.step_flops == with_teacher.step_flops - with_teacher.encode_flops


def test_vit_huge_takes_seconds_at_most() -> None:
    huge = MethodConfig().override(dict(patch_size=(14, 14), embed_dim=1280, depth=32, num_heads=16))
    start = time.process_time()
    summary = summarise(huge)
    assert time.process_time() - start < 10  # seconds of a processor; about one
    assert summary.params == pytest.approx(656.6e6, rel=1e-3)
    assert summary.encode_flops == pytest.approx(335e9, rel=0.01)


def test_a_model_without_configuration_is_refused() -> None:
    model = create_model("mae_vit_lesson_patch4")
    by_hand = MaskedAutoencoder(
        tokenizer=model.tokenizer,
        encoder=model.encoder,
        decoder=model.decoder,
        masking=model.masking,
        target=model.target,
        loss=model.loss,
    )
    with pytest.raises(UsageError, match="MethodConfig"):
        summarise(by_hand)


@dataclass(frozen=True, kw_only=True)
class Plain(Decoder):
    """A network that says nothing of itself but what the contract asks."""

    kind: ClassVar[str] = "plain"
    needs_mask_tokens: ClassVar[bool] = True

    def build(
        self, *, encoder: Any, layout: Any, num_outputs: int, activation_checkpointing: bool = False
    ) -> nn.Module:
        """See `Decoder.build`."""

        class Network(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Linear(encoder.embed_dim, num_outputs)

            def forward(self, encoded: Any, plan: Any, layout: Any) -> torch.Tensor:
                return self.net(take_tokens(encoded.tokens[:, encoded.num_prefix :], plan.predicted))

        return Network()


def test_a_decoder_of_ones_own_is_counted_whatever_its_layers_are_called() -> None:
    model = tiny_model(decoder=Plain(), encoder_mask_tokens=True)
    c, summary = model.config, summarise(model)
    tokens = c.layout.num_tokens - c.layout.num_tokens // 4
    assert summary.decoder_flops == linear(tokens, c.encoder.embed_dim, c.layout.token_values)
    assert (summary.head_flops, summary.decoder_positions) == (0, 0)
