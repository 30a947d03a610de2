"""The reconstruction losses against loops and PyTorch's own, with and without weights."""

from collections.abc import Callable
from math import isnan

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import hessian
from torch.func import grad, jvp, vmap
from torch.nn import functional

from mae.losses.reconstruction import KnownValues, MeanAbsoluteError, MeanSquaredError, SmoothL1

Judge = Callable[[float], float]


def smooth(beta: float) -> Judge:
    return lambda error: error**2 / (2 * beta) if abs(error) < beta else abs(error) - beta / 2


CASES = [
    (MeanSquaredError(), lambda error: error**2, functional.mse_loss),
    (MeanAbsoluteError(), abs, functional.l1_loss),
    (SmoothL1(), smooth(1.0), functional.smooth_l1_loss),
    (SmoothL1(beta=0.3), smooth(0.3), lambda p, t: functional.smooth_l1_loss(p, t, beta=0.3)),
]


def loss_by_loops(judge: Judge, pred: Tensor, target: Tensor, weight: Tensor | None) -> float:
    total = count = 0.0
    for image in range(pred.shape[0]):
        for patch in range(pred.shape[1]):
            pairs = zip(pred[image, patch], target[image, patch], strict=True)
            errors = [judge(float(p) - float(t)) for p, t in pairs]
            share = 1.0 if weight is None else float(weight[image, patch])
            total += share * sum(errors) / len(errors)
            count += share
    return total / count


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_loss_matches_loops(term, judge, torchs, weighted: bool) -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    weight = torch.rand(3, 4) if weighted else None
    expected = loss_by_loops(judge, pred, target, weight)
    assert float(term(pred, target, weight)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_loss_and_gradient_are_torchs(term, judge, torchs) -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    ours, theirs = pred.clone().requires_grad_(), pred.clone().requires_grad_()
    value, expected = term(ours, target, None), torchs(theirs, target)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    value.backward()
    expected.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_the_squared_error_is_the_mean_of_patches_to_rounding() -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    weight = torch.rand(3, 4)
    per_patch = (pred - target).square().mean(dim=-1)
    torch.testing.assert_close(MeanSquaredError()(pred, target, None), per_patch.mean(), rtol=1e-6, atol=0)
    weighted = (per_patch * weight).sum() / weight.sum()
    torch.testing.assert_close(MeanSquaredError()(pred, target, weight), weighted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_squared_error_of_many_values_is_exact_and_keeps_one_tensor_of_their_size(dtype: torch.dtype) -> None:
    pred, target = torch.randn(64, 196, 256).to(dtype).requires_grad_(), torch.randn(64, 196, 256)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: kept.append(value) or value, lambda value: value):
        loss = MeanSquaredError()(pred, target, None)
    assert sum(value.nbytes for value in kept if value.numel() >= pred.numel()) == target.nbytes
    difference = pred.detach().double() - target.double()
    assert loss.item() == pytest.approx(float(difference.square().mean()), rel=1e-6)
    loss.backward()
    expected = (2 * difference / difference.numel()).to(dtype)
    torch.testing.assert_close(pred.grad, expected, rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-12)


@pytest.mark.parametrize("power", [1, 3])
def test_second_derivatives_of_the_squared_error_are_those_of_its_formula(power: int) -> None:
    pred, target = torch.randn(2, 2, 3, 4)
    weight = torch.rand(2, 3)

    def formula(pred: Tensor, target: Tensor) -> Tensor:
        return (((pred - target).square().mean(dim=-1) * weight).sum() / weight.sum()) ** power

    ours = hessian(lambda *given: MeanSquaredError()(*given, weight) ** power, (pred, target))
    torch.testing.assert_close(ours, hessian(formula, (pred, target)))


def test_the_squared_error_goes_through_transforms_of_functions() -> None:
    pred, target = torch.randn(2, 5, 3, 4)

    def loss(pred: Tensor, target: Tensor) -> Tensor:
        return MeanSquaredError()(pred[None], target[None], None)

    by_sample = vmap(grad(loss))(pred, target)
    torch.testing.assert_close(by_sample, 2 * (pred - target) / pred[0].numel())
    value, change = jvp(lambda pred: loss(pred, target[0]), (pred[0],), (torch.ones(3, 4),))
    torch.testing.assert_close(value, functional.mse_loss(pred[0], target[0]))
    torch.testing.assert_close(change, by_sample[0].sum())


@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_what_weighs_nothing_does_not_count_and_gets_no_gradient(term, judge, torchs) -> None:
    pred, target = torch.randn(2, 1, 2, 5)
    pred.requires_grad_()
    weight = torch.tensor([[0.0, 1.0]])
    loss = term(pred, target, weight)
    assert loss.item() == pytest.approx(loss_by_loops(judge, pred.detach()[:, 1:], target[:, 1:], None), rel=1e-5)
    loss.backward()
    assert pred.grad is not None and pred.grad[0, 0].abs().max() == 0 and pred.grad[0, 1].abs().min() > 0


@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_weights_are_relative(term, judge, torchs) -> None:
    pred, target = torch.randn(2, 2, 3, 4)
    weight = torch.rand(2, 3)
    assert float(term(pred, target, weight)) == pytest.approx(float(term(pred, target, 7 * weight)), rel=1e-5)


@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_half_precision_is_judged_in_float32(term, judge, torchs) -> None:
    pred = torch.full((1, 1, 1000), 1.0, dtype=torch.bfloat16)
    target = torch.full((1, 1, 1000), 1.001)
    loss = term(pred, target, None)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(judge(0.001), rel=1e-3)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_where_there_is_no_data_nothing_is_asked(term, judge, torchs, weighted: bool) -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    target[torch.rand(3, 4, 5) < 0.3] = torch.nan
    target[0, 1] = torch.nan  # a patch of which nothing is known
    weight = torch.rand(3, 4) if weighted else torch.ones(3, 4)
    total = count = 0.0
    for image, patch, value in torch.ones_like(target).nonzero().tolist():
        error = float(pred[image, patch, value] - target[image, patch, value])
        total += 0.0 if isnan(error) else float(weight[image, patch]) * judge(error)
        count += float(weight[image, patch])  # of what is missing too
    ours = pred.clone().requires_grad_()
    loss = KnownValues(loss=term)(ours, target, weight if weighted else None)
    assert float(loss.detach()) == pytest.approx(total / count, rel=1e-5)
    loss.backward()
    assert ours.grad is not None and torch.equal(ours.grad != 0, ~target.isnan())


@pytest.mark.parametrize(("term", "judge", "torchs"), CASES)
def test_with_all_data_there_it_is_the_loss_itself(term, judge, torchs) -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    weight = torch.rand(3, 4)
    for given in (None, weight):
        torch.testing.assert_close(KnownValues(loss=term)(pred, target, given), term(pred, target, given))


def test_parts_of_a_batch_with_gaps_add_up_to_the_whole() -> None:
    pred, target = torch.randn(2, 4, 5, 6)
    target[2:][torch.rand(2, 5, 6) < 0.9] = torch.nan
    term = KnownValues(loss=MeanSquaredError())
    halves = [term(pred[part], target[part], None) for part in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(sum(halves) / 2, term(pred, target, None))


def test_of_nothing_known_the_loss_is_0_and_asks_nothing() -> None:
    pred = torch.randn(2, 3, 4, requires_grad=True)
    loss = KnownValues(loss=MeanSquaredError())(pred, torch.full((2, 3, 4), torch.nan), None)
    loss.backward()
    assert float(loss.detach()) == 0 and pred.grad is not None and not pred.grad.any()
