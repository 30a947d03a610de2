"""A layer norm that keeps its input in bfloat16 beside PyTorch's, which keeps it in float32."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from mae.layers.layer_norm import LayerNorm

DIM = 96
ROUNDING = 2**-8
"""Between neighbouring values of bfloat16, relative."""


def norms() -> tuple[LayerNorm, nn.LayerNorm]:
    torch.manual_seed(0)
    ours, theirs = LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
    nn.init.uniform_(ours.weight, 0.5, 1.5)
    nn.init.normal_(ours.bias)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def tokens(mean: float = 0.0) -> Tensor:
    return torch.randn(4, 17, DIM, generator=torch.Generator().manual_seed(1)) * 3 + mean


def stepped(norm: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The output of a step in this precision and the gradient of its input; None: float32."""
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        y = norm(x)
    (y * tokens().flip(0)).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("mean", [0.0, 3.0])
def test_a_bfloat16_step_has_the_same_output_and_gradients_within_its_rounding(mean: float) -> None:
    ours, theirs = norms()
    output, slope = stepped(ours, tokens(mean), torch.bfloat16)
    expected, expected_slope = stepped(theirs, tokens(mean), torch.bfloat16)
    assert torch.equal(output, expected)
    # Only a part of it depends on the input.
    assert 0 < (slope - expected_slope).norm() < ROUNDING / 4 * expected_slope.norm()
    assert ours.weight.grad is not None and theirs.weight.grad is not None
    assert (ours.weight.grad - theirs.weight.grad).norm() < ROUNDING * theirs.weight.grad.norm()
    torch.testing.assert_close(ours.bias.grad, theirs.bias.grad, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_in_other_precisions_it_is_pytorch_s(dtype: torch.dtype | None) -> None:
    ours, theirs = norms()
    for mine, expected in zip(stepped(ours, tokens(), dtype), stepped(theirs, tokens(), dtype), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_input_in_another_precision_is_kept_as_it_is(dtype: torch.dtype) -> None:
    mine, expected = (
        stepped(norm.double() if dtype == torch.float64 else norm, tokens().to(dtype), torch.bfloat16)
        for norm in norms()
    )
    assert mine[0].dtype == expected[0].dtype == dtype
    assert torch.equal(mine[1], expected[1])


def test_it_alone_lets_the_input_go() -> None:
    kept = []
    for norm in norms():
        x = tokens().requires_grad_() * 1
        reference = weakref.ref(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(x)
        del x
        kept.append(reference() is not None)
        y.sum().backward()
    assert kept == [False, True]


def test_activation_checkpointing_keeps_nothing_rounded() -> None:
    ours, theirs = norms()
    mine, expected = (
        stepped(lambda x, norm=norm: checkpoint(norm, x, use_reentrant=False), tokens(), torch.bfloat16)
        for norm in (ours, theirs)
    )
    assert torch.equal(mine[1], expected[1])


def test_gradients_of_each_sample_can_be_taken_by_transformations_of_functions() -> None:
    norm, _ = norms()

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return functional_call(norm, weights, (sample[None],)).square().sum()

    weights = {name: weight.detach() for name, weight in norm.named_parameters()}
    by_sample = vmap(grad(loss), (None, 0))(weights, tokens())["weight"]
    for sample, mine in zip(tokens(), by_sample, strict=True):
        norm.weight.grad = None
        loss(dict(norm.named_parameters()), sample).backward()
        assert norm.weight.grad is not None
        assert (mine - norm.weight.grad).norm() < ROUNDING * mine.norm()


def test_second_derivatives_are_pytorch_s_within_rounding() -> None:
    slopes = []
    for norm in norms():
        x = tokens().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = norm(x)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        slopes.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert (slopes[0] - slopes[1]).norm() < 4 * ROUNDING * slopes[1].norm()
