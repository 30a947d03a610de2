"""Stochastic depth: what is dropped, what is kept, and that without it nothing has changed."""

import pytest
import torch
from timm.layers import DropPath as TimmDropPath
from torch import nn
from torch.testing import assert_close

from mae.errors import UsageError
from mae.layers.drop_path import DropPath
from mae.layers.transformer import Block, make_blocks


def test_samples_are_dropped_whole_and_the_kept_scaled() -> None:
    torch.manual_seed(0)
    x = torch.rand(4000, 2, 3) + 1
    out = DropPath(rate=0.3)(x)
    kept = out[:, 0, 0] != 0
    assert float(kept.float().mean()) == pytest.approx(0.7, abs=0.03)
    assert_close(out[kept], x[kept] / 0.7)
    assert (out[~kept] == 0).all()
    assert_close(out.mean(), x.mean(), rtol=0.03, atol=0)


def test_values_are_those_of_timm() -> None:
    """timm draws otherwise, but a sample is either zero or scaled by the same factor."""
    torch.manual_seed(0)
    x = torch.rand(64, 2, 3) + 1
    ours, theirs = DropPath(rate=0.25)(x), TimmDropPath(0.25)(x)
    both = (ours[:, 0, 0] != 0) & (theirs[:, 0, 0] != 0)
    assert 20 < int(both.sum()) < 64
    assert_close(ours[both], theirs[both])


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_identity_outside_training(rate: float, training: bool) -> None:
    x, before = torch.randn(8, 2, 3), torch.get_rng_state()
    assert DropPath(rate=rate).train(training)(x) is x
    assert torch.equal(before, torch.get_rng_state())


def test_seed_and_dtype() -> None:
    block = Block(dim=12, num_heads=2, mlp_ratio=2.0, drop_path=DropPath(rate=0.5))
    x = torch.randn(16, 3, 12)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(block(x))
    assert torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[0], outputs[2])
    assert DropPath(rate=0.5)(x.bfloat16()).dtype == torch.bfloat16


def test_branches_are_drawn_separately() -> None:
    torch.manual_seed(0)
    block = Block(dim=4, num_heads=1, mlp_ratio=1.0, drop_path=DropPath(rate=0.5))
    for branch in (block.attn.proj, block.mlp.fc2):
        nn.init.zeros_(branch.weight)
    nn.init.ones_(block.attn.proj.bias)  # the branches are now the constants 1 and 10
    nn.init.constant_(block.mlp.fc2.bias, 10.0)
    moved = block(torch.zeros(400, 1, 4))[:, 0, 0]
    values, counts = moved.unique(return_counts=True)
    assert values.tolist() == [0, 2, 20, 22] and counts.min() > 60


def test_rate_rises_over_depth() -> None:
    plain, dropping = (make_blocks(dim=12, depth=5, num_heads=2, mlp_ratio=2.0, drop_path=rate) for rate in (0.0, 0.2))
    assert [block.drop_path.rate for block in dropping] == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert make_blocks(dim=12, depth=1, num_heads=2, mlp_ratio=2.0, drop_path=0.2)[0].drop_path.rate == 0
    assert plain.state_dict().keys() == dropping.state_dict().keys()
    assert not any("drop" in name for name in plain.state_dict())
    dropping.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 12)
    assert torch.equal(plain(x), dropping.eval()(x))


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_impossible_rates_are_refused(rate: float) -> None:
    with pytest.raises(UsageError, match="drop path rate is"):
        DropPath(rate=rate)
