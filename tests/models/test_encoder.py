"""The encoder on whole images: against timm with copied weights, other sizes, order, determinism."""

from functools import partial
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from tiny import images_for, tiny_config, tiny_model
from torch import nn
from torch.testing import assert_close

from mae.core.types import MaskPlan
from mae.encoders.vit import MAEEncoder
from mae.errors import UsageError
from mae.models.build import build_model


def timm_twin(encoder: MAEEncoder, img_size: tuple[int, int]) -> VisionTransformer:
    """timm's Vision Transformer with a copy of the encoder's weights and positions."""
    p = encoder.patch_embed.patch_size
    block = encoder.blocks[0]
    twin = VisionTransformer(
        img_size=img_size,
        patch_size=p,
        in_chans=encoder.patch_embed.in_chans,
        num_classes=0,
        embed_dim=encoder.embed_dim,
        depth=len(encoder.blocks),
        num_heads=block.attn.num_heads,
        mlp_ratio=block.mlp.fc1.out_features / encoder.embed_dim,
        class_token=encoder.cls_token is not None,
        global_pool="token" if encoder.cls_token is not None else "avg",
        fc_norm=False,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )
    state = {name: weight for name, weight in encoder.state_dict().items() if not name.startswith("pos_embed")}
    state["patch_embed.proj.weight"] = state["patch_embed.proj.weight"].reshape(-1, encoder.patch_embed.in_chans, *p)
    table = encoder.pos_embed((img_size[0] // p[0], img_size[1] // p[1])).detach()
    state["pos_embed"] = nn.functional.pad(table, (0, 0, encoder.num_prefix, 0)).unsqueeze(0)
    twin.load_state_dict(state)
    return twin


CASES: list[dict[str, Any]] = [
    {"img_size": 16},
    {"img_size": (8, 32)},
    {"img_size": (20, 12), "in_chans": 5},
    {"patch_size": (2, 6), "img_size": (6, 24)},
    {"pos_embed": "learned"},
]


@pytest.mark.parametrize("cls_token", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_encode_matches_timm_in_features_and_gradients(case: dict[str, Any], cls_token: bool) -> None:
    model = tiny_model(cls_token=cls_token, **case)
    assert model.config is not None
    twin = timm_twin(model.encoder, model.config.layout.size)
    images = images_for(model)
    features, tokens = model.encode(images), twin.forward_features(images)
    prefix = int(cls_token)
    assert_close(features.patches, tokens[:, prefix:], rtol=1e-5, atol=1e-5)
    assert_close(features.mean, tokens[:, prefix:].mean(dim=1), rtol=1e-5, atol=1e-5)
    if features.cls is None:
        assert not cls_token
    else:
        assert_close(features.cls, tokens[:, 0], rtol=1e-5, atol=1e-5)
    model.encoder(images).tokens.square().mean().backward()
    tokens.square().mean().backward()
    others = dict(twin.named_parameters())
    for name, weight in model.encoder.named_parameters():
        expected = others["pos_embed" if name == "pos_embed.table" else name].grad
        assert expected is not None and weight.grad is not None
        if name == "pos_embed.table":
            expected = expected[0, prefix:]
        expected = expected.reshape(weight.shape)
        assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("size", [(16, 16), (32, 8), (40, 24)])
def test_other_sizes_equal_a_model_built_for_them(size: tuple[int, int]) -> None:
    model, fresh = tiny_model(img_size=(16, 24)), build_model(tiny_config(img_size=size))
    fresh.load_state_dict(model.state_dict())  # positions are not in it: the fresh ones are its own
    images = torch.randn(2, 3, *size)
    got, expected = model.encode(images), fresh.encode(images)
    assert got.grid == expected.grid == (size[0] // 4, size[1] // 4)
    assert torch.equal(got.patches, expected.patches)
    plan = model.plan(images)
    assert torch.equal(model(images, plan=plan).loss, fresh(images, plan=plan).loss)


def test_learned_positions_refuse_other_sizes_on_both_entrances() -> None:
    model = tiny_model(pos_embed="learned", img_size=(16, 24))
    images = torch.randn(2, 3, 24, 16)
    for entrance in (model, model.encode):
        with pytest.raises(UsageError, match="grid of 4x6 patches, these images have 6x4"):
            entrance(images)


def test_encode_is_deterministic_and_draws_no_random_numbers() -> None:
    model = tiny_model().train()
    images = images_for(model)
    before = torch.get_rng_state()
    first, second = model.encode(images), model.encode(images)
    assert torch.equal(first.patches, second.patches) and torch.equal(first.mean, second.mean)
    assert torch.equal(before, torch.get_rng_state())


def test_patches_come_in_raster_order() -> None:
    """With no blocks to mix them, a feature must move exactly with its patch."""
    model = tiny_model(img_size=(12, 20))
    model.encoder.blocks = nn.Sequential()
    images = torch.zeros(1, 3, 12, 20)
    rest = model.encode(images).patches
    for row, column in [(0, 0), (0, 4), (1, 0), (2, 3)]:
        changed = images.clone()
        changed[:, :, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = 1
        moved = (model.encode(changed).patches - rest).abs().sum(dim=-1)[0].nonzero().flatten()
        assert moved.tolist() == [row * 5 + column]


def test_visible_order_does_not_change_a_token() -> None:
    """Attention has no order: a token's feature follows its number, wherever it stands in the list."""
    model = tiny_model()
    images = images_for(model, batch=1)
    order = torch.randperm(24).unsqueeze(0)
    plan = MaskPlan(visible=order, predicted=order[:, :0], hidden=torch.zeros(1, 24, dtype=torch.bool))
    shuffled = model.encoder(images, plan).tokens[:, 1:]
    assert_close(shuffled, model.encode(images).patches[:, order[0]], rtol=1e-5, atol=1e-5)


def test_official_start_of_tokens_patches_and_norms() -> None:
    torch.manual_seed(0)
    model = build_model(tiny_config(img_size=(32, 32), patch_size=(8, 8), embed_dim=192, decoder_embed_dim=128))
    encoder, decoder = model.encoder, model.decoder
    projection, values = encoder.patch_embed.proj, 8 * 8 * 3
    bound = (6 / (values + 192)) ** 0.5
    assert 0.99 * bound < projection.weight.abs().max() <= bound
    default = values**-0.5  # the default of a convolution's bias: uniform within 1 / sqrt(fan in)
    assert 0.9 * default < projection.bias.abs().max() <= default
    assert encoder.cls_token is not None
    for token in (encoder.cls_token.detach(), decoder.mask_token.detach()):
        assert token.std() == pytest.approx(0.02, rel=0.2) and abs(float(token.mean())) < 0.006
    for layer, fans in ((decoder.embed, 192 + 128), (decoder.pred, 128 + values)):
        assert 0.99 * (6 / fans) ** 0.5 < layer.weight.abs().max() <= (6 / fans) ** 0.5
        assert layer.bias.abs().max() == 0
    fused = encoder.blocks[1].attn.qkv.weight
    assert 0.99 * (6 / (4 * 192)) ** 0.5 < fused.abs().max() <= (6 / (4 * 192)) ** 0.5
    for norm in (encoder.norm, decoder.norm):
        assert norm.eps == 1e-6 and (norm.weight == 1).all() and (norm.bias == 0).all()


def test_mask_tokens_start_away_from_zero_and_masked_predictions_differ() -> None:
    """Positions that do nothing would give every hidden patch the same prediction."""
    torch.manual_seed(0)
    model = build_model(tiny_config())
    prediction = model(images_for(model), plan=model.plan(images_for(model))).prediction
    assert (prediction - prediction[:, :1]).abs().amax(dim=-1)[:, 1:].min() > 1e-3


@pytest.mark.parametrize("cls_token", [True, False])
def test_attention_of_every_block_is_timm_s(cls_token: bool) -> None:
    model = tiny_model(cls_token=cls_token).eval()
    assert model.config is not None
    twin = timm_twin(model.encoder, model.config.layout.size).eval()
    expected: list[torch.Tensor] = []
    for block in twin.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, inputs, out: expected.append(inputs[0]))
    images = images_for(model)
    with torch.no_grad():
        twin.forward_features(images)
        found = list(model.encoder.attention(images))
    assert len(found) == len(expected) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert_close(ours.sum(dim=-1), torch.ones_like(ours[..., 0]))
