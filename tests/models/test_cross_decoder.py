"""Hidden patches that look at visible ones alone, and predictions of a part of them."""

from collections.abc import Sequence

import pytest
import torch
from pieces import asked, batch_of
from tiny import images_for, tiny_config, tiny_model
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm
from torch.testing import assert_close

from mae.core.types import MaskPlan
from mae.decoders.cross_attention import CrossDecoder
from mae.errors import UsageError
from mae.layers.attention import CrossAttention
from mae.layers.transformer import CrossBlock
from mae.masks.random import RandomMasking
from mae.models.fingerprint import output_fingerprint
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.summary import summarise


def cross(**changes: object) -> MaskedAutoencoder:
    return tiny_model(decoder="cross", **changes)


def part_of(plan: MaskPlan, count: int) -> MaskPlan:
    return MaskPlan(visible=plan.visible, predicted=plan.predicted[:, :count], hidden=plan.hidden)


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_to_a_memory_is_pytorchs(heads: int) -> None:
    ours = CrossAttention(dim=12, num_heads=heads, memory_dim=20)
    theirs = nn.MultiheadAttention(12, heads, kdim=20, vdim=20, batch_first=True)
    key, value = ours.kv.weight.chunk(2)
    copied = {
        "q_proj_weight": ours.query.weight, "k_proj_weight": key, "v_proj_weight": value,
        "in_proj_bias": torch.cat([ours.query.bias, ours.kv.bias]), "out_proj.weight": ours.proj.weight,
        "out_proj.bias": ours.proj.bias,
    }  # fmt: skip
    theirs.load_state_dict(copied)
    x, memory = torch.randn(2, 5, 12), torch.randn(2, 7, 20)
    assert_close(ours(x, memory), theirs(x, memory, memory)[0], rtol=1e-5, atol=1e-6)


def test_a_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="width 10 does not divide into 4 heads"):
        CrossAttention(dim=10, num_heads=4, memory_dim=8)


def slow_decoder(decoder: CrossDecoder, levels: Sequence[Tensor], token: int, image: int) -> Tensor:
    """One token of one image, step by step."""
    x = decoder.mask_token[0, 0] + decoder.pos_embed(GRID)[token]
    for number, block in enumerate(decoder.blocks):
        assert isinstance(block, CrossBlock)
        memory = sum(share * each[image] for share, each in zip(decoder.mixture[number], levels, strict=True))
        memory = layer_norm(memory, memory.shape[-1:], block.norm_memory.weight, block.norm_memory.bias, 1e-6)
        normed = layer_norm(x, x.shape, block.norm1.weight, block.norm1.bias, 1e-6)
        query = block.attn.query(normed).split(len(x) // block.attn.num_heads)
        keys, values = (
            part.split(len(x) // block.attn.num_heads, dim=1) for part in block.attn.kv(memory).chunk(2, dim=1)
        )
        heads = [
            (key @ one / len(one) ** 0.5).softmax(dim=0) @ value
            for one, key, value in zip(query, keys, values, strict=True)
        ]
        x = x + block.attn.proj(torch.cat(heads))
        normed = layer_norm(x, x.shape, block.norm2.weight, block.norm2.bias, 1e-6)
        x = x + block.mlp.fc2(gelu(block.mlp.fc1(normed)))
    return decoder.pred(layer_norm(x, x.shape, decoder.norm.weight, decoder.norm.bias, 1e-6))


GRID = (4, 6)


@torch.no_grad()
def test_the_decoder_is_its_definition_token_by_token() -> None:
    model = cross().double()
    images = images_for(model).double()
    plan = model.plan(images)
    encoded = model.encoded(images, plan)
    assert len(encoded.levels) == 3 and torch.equal(encoded.tokens, model.encoder(images, plan).tokens)
    found = model.decoder(encoded, plan, model.tokenizer.layout)
    for image in range(len(images)):
        for place, token in enumerate(plan.predicted[image].tolist()):
            expected = slow_decoder(model.decoder, encoded.levels, token, image)  # type: ignore[arg-type]
            assert_close(found[image, place], expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_part_is_predicted_as_it_is_beside_all_others() -> None:
    model = cross()
    images = images_for(model)
    plan = model.plan(images)
    whole = model(images, plan=plan).prediction
    for count in (1, 5):
        assert_close(model(images, plan=part_of(plan, count)).prediction, whole[:, :count], rtol=1e-5, atol=1e-6)
    everything = model(images, mask=plan.hidden).pred
    assert_close(everything.gather(1, plan.predicted[..., None].expand_as(whole)), whole, rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_the_loss_is_the_mean_over_what_is_predicted() -> None:
    model = cross(loss="mse")
    images = images_for(model)
    plan = part_of(model.plan(images), 5)
    output = model(images, plan=plan)
    target = model.target(batch_of(images), plan.predicted)
    assert_close(output.loss, (output.prediction - target).square().mean())


@torch.no_grad()
def test_hidden_pixels_change_no_prediction() -> None:
    model = cross()
    images = images_for(model)
    plan = model.plan(images)
    other = images.clone()
    hidden = plan.hidden.reshape(len(images), *GRID).repeat_interleave(4, 1).repeat_interleave(4, 2)
    other[hidden[:, None].expand_as(other)] = 7.0
    assert torch.equal(model(images, plan=plan).prediction, model(other, plan=plan).prediction)


@pytest.mark.parametrize("share", [1.0, 1 / 3])
def test_every_parameter_gets_a_gradient(share: float) -> None:
    """What none reaches would also stop training in several processes."""
    model = cross(mask_predicted=share)
    images = images_for(model)
    model(images, plan=model.plan(images)).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and bool(weight.grad.abs().sum() > 0), name


def test_blocks_computed_again_give_the_same_gradients() -> None:
    plain, again = cross(), cross()
    images = images_for(plain)
    plan = plain.plan(images)
    again.encoder.blocks.activation_checkpointing = again.decoder.blocks.activation_checkpointing = True
    for model in (plain, again):
        model(images, plan=plan).loss.backward()
    for mine, theirs in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_share_of_the_hidden_ones_is_drawn_from_them() -> None:
    keys = torch.arange(64)
    whole = RandomMasking(ratio=0.75).plan(asked((8, 8), keys))
    third = RandomMasking(ratio=0.75, predicted=1 / 3).plan(asked((8, 8), keys))
    assert third.predicted.shape == (64, 16) and torch.equal(third.hidden, whole.hidden)
    assert bool(third.hidden.gather(1, third.predicted).all()) and torch.equal(third.visible, whole.visible)
    counts = torch.zeros(64).index_add_(0, third.predicted.flatten(), torch.ones(64 * 16))
    assert counts.min() > 4 and counts.max() < 32  # every place in its turn: 16 times on average
    assert RandomMasking(ratio=0.5, predicted=0.01).plan(asked((4, 4), keys)).predicted.shape == (64, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "crossed"}, "unknown decoder 'crossed'; did you mean cross"),
        ({"mask_predicted": 0.0}, "mask_predicted is 0.0; expected greater than 0"),
        ({"mask_predicted": 1.5}, "mask_predicted is 1.5; expected less than or equal to 1"),
        (
            {"mask_predicted": 0.5, "laplacian": 0.1},
            "laplacian reads whole samples, and the mask leaves masked patches out",
        ),
        (
            {"decoder": "cross", "cls_token": False, "mask_ratio": 0.95},
            r"mask_ratio 0\.95 leaves 1 of 24 patches; expected 2 or more: use a lower ratio or smaller patches",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny_config(**changes)


def test_a_share_costs_a_share() -> None:
    sizes = {"img_size": (64, 64), "decoder_embed_dim": 48, "embed_dim": 48}
    own, whole, third = (
        summarise(tiny_config(**sizes, **changes))
        for changes in ({}, {"decoder": "cross"}, {"decoder": "cross", "mask_predicted": 1 / 3})
    )
    assert whole.encoder_flops == own.encoder_flops and whole.decoder_flops < own.decoder_flops
    assert third.decoder_flops < 0.5 * whole.decoder_flops


def test_the_probe_of_a_file_looks_through_every_map() -> None:
    model = cross()
    before = output_fingerprint(model)
    with torch.no_grad():
        model.decoder.mixture[0, 1] += 0.1  # type: ignore[index, union-attr]
    after = output_fingerprint(model)
    assert before is not None and after is not None
    assert before.features == after.features and before.difference(after) > 1e-4
