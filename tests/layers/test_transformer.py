"""Blocks against timm's with copied weights, and the initialisation MAE asks for."""

from functools import partial

import pytest
import torch
from timm.models.vision_transformer import Block as TimmBlock
from torch import nn
from torch.testing import assert_close

from mae.layers.drop_path import DropPath
from mae.layers.transformer import Block, CrossBlock, Mlp, init_linears, make_blocks


@pytest.mark.parametrize(("dim", "heads", "ratio"), [(24, 3, 4.0), (32, 8, 2.0), (16, 1, 1.5)])
def test_block_matches_timm_in_output_and_gradients(dim: int, heads: int, ratio: float) -> None:
    torch.manual_seed(0)
    ours = Block(dim=dim, num_heads=heads, mlp_ratio=ratio)
    for weight in ours.parameters():
        nn.init.normal_(weight, std=0.3)  # biases and norms too, so that none can hide behind a zero or a one
    theirs = TimmBlock(dim, heads, mlp_ratio=ratio, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 11, dim)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [ours(inputs[0]), theirs(inputs[1])]
    assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for output in outputs:
        output.square().mean().backward()
    assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    others = dict(theirs.named_parameters())
    for name, weight in ours.named_parameters():
        assert_close(weight.grad, others[name].grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_first_tokens_leave_alone_as_beside_the_others() -> None:
    torch.manual_seed(0)
    blocks = make_blocks(dim=24, depth=2, num_heads=3, mlp_ratio=2.0)
    for weight in blocks.parameters():
        nn.init.normal_(weight, std=0.3)
    results = []
    for alone in (False, True):
        x = torch.randn(3, 11, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
        output = blocks(x, 4) if alone else blocks(x)[:, :4]
        results.append([output, *torch.autograd.grad(output.square().mean(), [x, *blocks.parameters()])])
    assert results[0][0].shape == (3, 4, 24)
    assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_depth_and_widths_are_as_asked() -> None:
    blocks = make_blocks(dim=12, depth=3, num_heads=2, mlp_ratio=2.5)
    assert len(blocks) == 3
    for block in blocks:
        assert block.mlp.fc1.out_features == 30 and block.norm1.eps == block.norm2.eps == 1e-6


def test_mlp_uses_the_exact_gelu() -> None:
    mlp = Mlp(dim=4, hidden_dim=8)
    x = torch.randn(2, 3, 4)
    hidden = mlp.fc1(x)
    exact = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    assert_close(mlp(x), mlp.fc2(exact), rtol=1e-6, atol=1e-6)


def test_linears_start_xavier_uniform_the_fused_one_as_one_matrix() -> None:
    torch.manual_seed(0)
    block = Block(dim=96, num_heads=3, mlp_ratio=4.0)
    init_linears(block)
    fans = {"attn.qkv": 96 + 288, "attn.proj": 192, "mlp.fc1": 96 + 384, "mlp.fc2": 96 + 384}
    for name, fan in fans.items():
        layer = block.get_submodule(name)
        bound = (6 / fan) ** 0.5
        assert 0.99 * bound < layer.weight.abs().max() <= bound, name
        assert float(layer.weight.detach().std()) == pytest.approx(bound / 3**0.5, rel=0.02)  # uniform, not normal
        assert layer.bias.abs().max() == 0
    for norm in (block.norm1, block.norm2):
        assert (norm.weight == 1).all() and (norm.bias == 0).all()


@pytest.mark.parametrize("grad", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(grad: bool) -> None:
    calls: list[int] = []
    x, found = torch.randn(2, 5, 12), []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        blocks = make_blocks(dim=12, depth=3, num_heads=2, mlp_ratio=2.0, activation_checkpointing=checkpointing)
        blocks[1].mlp.register_forward_pre_hook(lambda *given: calls.append(1))
        with torch.set_grad_enabled(grad):
            output = blocks(x)
        if grad:
            output.square().sum().backward()
        found.append([output.detach(), *(weight.grad for weight in blocks.parameters() if weight.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)) and len(found[0]) > 30 * grad
    assert len(calls) == 2 + grad  # one more only where gradients need it


def test_eps_and_the_share_of_a_batch_reach_every_layer() -> None:
    blocks = make_blocks(dim=12, depth=2, num_heads=2, mlp_ratio=2.0, drop_path=0.5, rank=1, world=3, eps=1e-3)
    cross = CrossBlock(dim=12, num_heads=2, mlp_ratio=2.0, memory_dim=8, eps=1e-3)
    norms = [layer for part in (blocks, cross) for layer in part.modules() if isinstance(layer, nn.LayerNorm)]
    assert len(norms) == 7 and {norm.eps for norm in norms} == {1e-3}
    drops = [layer for layer in blocks.modules() if isinstance(layer, DropPath)]
    assert [(drop.rate, drop.rank, drop.world) for drop in drops] == [(0.0, 1, 3), (0.5, 1, 3)]
    assert not blocks[:1].activation_checkpointing and len(blocks[1:]) == 1
