"""Attention against its formula, head by head."""

import pytest
import torch
from torch.testing import assert_close

from mae.errors import UsageError
from mae.layers.attention import Attention


def attention_by_loops(layer: Attention, x: torch.Tensor) -> torch.Tensor:
    """`softmax(q k^T / sqrt(d)) v` for one sequence at a time and one head at a time, float64."""
    layer, x = layer.double(), x.double()
    dim = x.shape[-1]
    size = dim // layer.num_heads
    outputs = []
    for sequence in x:
        query, key, value = layer.qkv(sequence).split(dim, dim=-1)
        heads = []
        for h in range(layer.num_heads):
            part = slice(h * size, (h + 1) * size)
            scores = query[:, part] @ key[:, part].T / size**0.5
            heads.append(scores.softmax(dim=-1) @ value[:, part])
        outputs.append(layer.proj(torch.cat(heads, dim=-1)))
    return torch.stack(outputs)


@pytest.mark.parametrize(("dim", "heads", "length"), [(12, 3, 7), (16, 1, 1), (24, 4, 33)])
def test_attention_is_its_formula(dim: int, heads: int, length: int) -> None:
    layer = Attention(dim=dim, num_heads=heads)
    x = torch.randn(2, length, dim)
    ours = layer(x).detach()
    assert_close(ours, attention_by_loops(layer, x).detach().float(), rtol=1e-5, atol=1e-6)


def test_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="width 10 .* 3 heads"):
        Attention(dim=10, num_heads=3)
