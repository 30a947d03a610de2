"""Low-rank adaptation against peft's with copied weights, and what it may and may not change."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.testing import assert_close

from mae.errors import UsageError
from mae.layers.lora import LoRALinear, add_lora, merge_lora
from mae.layers.transformer import make_blocks

DIM, DEPTH = 24, 2


def random_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = make_blocks(dim=DIM, depth=DEPTH, num_heads=3, mlp_ratio=2.0)
    for weight in blocks.parameters():
        nn.init.normal_(weight, std=0.2)
    return blocks


def adapted(*, rank: int = 4, alpha: float | None = None, random: bool = True) -> nn.Sequential:
    blocks = random_blocks()
    add_lora(blocks, rank=rank, alpha=alpha)
    for name, weight in blocks.named_parameters():
        if random and name.endswith(".up"):
            nn.init.normal_(weight, std=0.2)
    return blocks


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 7, DIM, generator=torch.Generator().manual_seed(1))


def test_at_first_nothing_changes(x: Tensor) -> None:
    assert torch.equal(adapted(random=False)(x), random_blocks()(x))
    assert not torch.equal(adapted()(x), random_blocks()(x))


@pytest.mark.parametrize(("rank", "alpha"), [(4, None), (1, 3.0), (8, 2.0)])
def test_peft_computes_the_same(x: Tensor, rank: int, alpha: float | None) -> None:
    ours = adapted(rank=rank, alpha=alpha)
    config: Any = LoraConfig(
        r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=["qkv", "proj"], lora_dropout=0.0
    )
    theirs = inject_adapter_in_model(config, copy.deepcopy(random_blocks()))
    others = dict(theirs.named_parameters())
    trained = [(name, weight) for name, weight in ours.named_parameters() if weight.requires_grad]
    for name, weight in trained:
        layer, matrix = name.rsplit(".", 1)
        other = others[f"{layer}.lora_{'A' if matrix == 'down' else 'B'}.default.weight"]
        assert other.shape == weight.shape
        other.data.copy_(weight.data)
    assert len(trained) == sum("lora_" in name for name in others) == DEPTH * 4
    outputs = ours(x), theirs(x)
    assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().mean().backward()
    for name, weight in trained:
        layer, matrix = name.rsplit(".", 1)
        assert_close(weight.grad, others[f"{layer}.lora_{'A' if matrix == 'down' else 'B'}.default.weight"].grad)


@pytest.mark.parametrize("alpha", [None, 3.0])
def test_merging_keeps_the_output_and_leaves_plain_layers(x: Tensor, alpha: float | None) -> None:
    blocks = adapted(alpha=alpha)
    before = blocks(x)
    merge_lora(blocks)
    assert_close(blocks(x), before, rtol=1e-6, atol=1e-6)
    assert type(blocks[0].attn.qkv) is nn.Linear and type(blocks[1].attn.proj) is nn.Linear
    assert blocks.state_dict().keys() == random_blocks().state_dict().keys()
    random_blocks().load_state_dict(blocks.state_dict())


def test_only_the_products_train_and_their_number_is_the_papers() -> None:
    rank = 3
    blocks = adapted(rank=rank)
    trained = sum(weight.numel() for weight in blocks.parameters() if weight.requires_grad)
    assert trained == DEPTH * rank * ((DIM + 3 * DIM) + (DIM + DIM))


def test_training_leaves_every_frozen_weight_as_it_was(x: Tensor) -> None:
    blocks = adapted(random=False)
    before = {name: weight.clone() for name, weight in blocks.state_dict().items()}
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        blocks(x).square().mean().backward()
        optimizer.step()
    original = random_blocks().state_dict()
    for name, weight in blocks.state_dict().items():
        if name.endswith((".down", ".up")):
            assert not torch.equal(weight, before[name]), name
        else:
            assert torch.equal(weight, original[name]), name


def test_down_starts_uniform_within_the_papers_bound_and_up_at_zero() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(100, 50), rank=40, alpha=1.0)
    bound = 100**-0.5  # sqrt(6 / (1 + 5) / fan in)
    assert 0.99 * bound < layer.down.abs().max() <= bound
    assert (layer.up == 0).all()


def test_wrong_requests_are_refused() -> None:
    with pytest.raises(UsageError, match="LoRA rank is 0"):
        add_lora(random_blocks(), rank=0)
    with pytest.raises(UsageError, match="needs a module with attention"):
        add_lora(nn.Linear(2, 2), rank=1)
    with pytest.raises(UsageError, match="has no LoRA yet"):
        add_lora(adapted(), rank=1)
