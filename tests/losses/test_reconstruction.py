"""The mean squared error against loops, with and without weights."""

import pytest
import torch
from torch import Tensor

from mae.losses.reconstruction import MeanSquaredError


def loss_by_loops(pred: Tensor, target: Tensor, weight: Tensor | None) -> float:
    total = count = 0.0
    for image in range(pred.shape[0]):
        for patch in range(pred.shape[1]):
            errors = [(float(p) - float(t)) ** 2 for p, t in zip(pred[image, patch], target[image, patch], strict=True)]
            share = 1.0 if weight is None else float(weight[image, patch])
            total += share * sum(errors) / len(errors)
            count += share
    return total / count


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_matches_loops(weighted: bool) -> None:
    pred, target = torch.randn(2, 3, 4, 5)
    weight = torch.rand(3, 4) if weighted else None
    expected = loss_by_loops(pred, target, weight)
    assert float(MeanSquaredError()(pred, target, weight)) == pytest.approx(expected, rel=1e-5)


def test_what_weighs_nothing_does_not_count_and_gets_no_gradient() -> None:
    pred, target = torch.randn(2, 1, 2, 5)
    pred.requires_grad_()
    weight = torch.tensor([[0.0, 1.0]])
    loss = MeanSquaredError()(pred, target, weight)
    assert float(loss) == pytest.approx(loss_by_loops(pred[:, 1:], target[:, 1:], None), rel=1e-5)
    loss.backward()
    assert pred.grad is not None and pred.grad[0, 0].abs().max() == 0 and pred.grad[0, 1].abs().min() > 0


def test_weights_are_relative() -> None:
    pred, target = torch.randn(2, 2, 3, 4)
    weight = torch.rand(2, 3)
    term = MeanSquaredError()
    assert float(term(pred, target, weight)) == pytest.approx(float(term(pred, target, 7 * weight)), rel=1e-5)


def test_half_precision_is_judged_in_float32() -> None:
    pred = torch.full((1, 1, 1000), 1.0, dtype=torch.bfloat16)
    target = torch.full((1, 1, 1000), 1.001)
    loss = MeanSquaredError()(pred, target, None)
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(1e-6, rel=1e-3)
