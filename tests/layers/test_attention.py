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


def test_weights_kept_in_bfloat16_cost_no_precision_against_float32() -> None:
    """The softmax is computed in float32 either way: gradients are as near to the truth as with float32 weights."""
    exact = [
        (2 * torch.randn(8, 4, 100, 32, dtype=torch.float64)).bfloat16().double().requires_grad_() for _ in range(3)
    ]
    ours, wide = ([tensor.detach().bfloat16().requires_grad_() for tensor in exact] for _ in range(2))
    weight = torch.randn(8, 4, 100, 32)
    (attend(*exact) * weight).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = attend(*ours)
    query, key, value = wide
    weights = ((query * 32**-0.5) @ key.mT).softmax(dim=-1, dtype=torch.float32)
    for found in (mixed, weights.bfloat16() @ value):
        (found * weight).sum().backward()
    for true, kept, widened in zip(exact, ours, wide, strict=True):
        assert true.grad is not None and kept.grad is not None and widened.grad is not None
        errors = [float((grad.double() - true.grad).norm() / true.grad.norm()) for grad in (kept.grad, widened.grad)]
        assert errors[0] < 1.03 * errors[1] < 0.02


def test_the_softmax_of_bfloat16_is_widened_by_no_autocast() -> None:
    parts = [torch.randn(1, 2, 16, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    kept: list[torch.dtype] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: kept.append(tensor.dtype) or tensor, lambda tensor: tensor
        ),
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        attend(*parts)
    assert set(kept) == {torch.bfloat16}


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
