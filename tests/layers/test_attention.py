"""Attention against its formula, head by head."""

import pytest
import torch
from torch.testing import assert_close

from mae.errors import UsageError
from mae.layers import attention
from mae.layers.attention import Attention, attend


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


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9)])
def test_in_bfloat16_it_is_the_same_to_rounding(queries: int, keys: int) -> None:
    exact = [torch.randn(2, 3, length, 8, dtype=torch.float64, requires_grad=True) for length in (queries, keys, keys)]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    weight = torch.randn(2, 3, queries, 8)
    for parts in (exact, rounded):
        (attend(*parts) * weight).sum().backward()
    assert_close(attend(*rounded).double(), attend(*exact), rtol=0.03, atol=0.03)
    for ours, truth in zip(rounded, exact, strict=True):
        assert ours.grad is not None and ours.grad.dtype == torch.bfloat16 and truth.grad is not None
        assert_close(ours.grad.double(), truth.grad, rtol=0.05, atol=0.05)


def test_only_bfloat16_is_written_out_and_only_short(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def asked_pytorch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: None) -> torch.Tensor:
        asked.append(query.dtype)
        return query

    monkeypatch.setattr(attention, "scaled_dot_product_attention", asked_pytorch)
    for dtype in (torch.float32, torch.bfloat16):
        attend(*torch.ones(3, 1, 1, 16, 4, dtype=dtype))
    assert asked == [torch.float32]
    monkeypatch.setattr(attention, "_MOST_SCORES", 16 * 16 - 1)
    attend(*torch.ones(3, 1, 1, 16, 4, dtype=torch.bfloat16))
    assert asked == [torch.float32, torch.bfloat16]


def test_width_that_does_not_divide_into_heads_is_refused() -> None:
    with pytest.raises(UsageError, match="width 10 .* 3 heads"):
        Attention(dim=10, num_heads=3)
