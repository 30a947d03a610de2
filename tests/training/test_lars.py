"""LARS against the formula, a number at a time in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from mae.training.lars import LARS


def slow_lars(w: np.ndarray, gradients: list[np.ndarray], *, lr: float, decay: float) -> np.ndarray:
    mu = np.zeros_like(w)
    for g in gradients:
        if w.ndim > 1:
            g = g + decay * w
            weight_norm, update_norm = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
            if weight_norm > 0 and update_norm > 0:
                g = g * (0.001 * weight_norm / update_norm)
        mu = 0.9 * mu + g
        w = w - lr * mu
    return w


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5,), (4, 3), (2, 3, 2)])
@pytest.mark.parametrize("zero", ["nothing", "weights", "gradients", "both", "one gradient"])
def test_steps_are_those_of_the_formula(decay: float, shape: tuple[int, ...], zero: str) -> None:
    generator = np.random.default_rng(0)
    w = generator.normal(size=shape) * (zero not in ("weights", "both"))
    gradients = [generator.normal(size=shape) * (zero not in ("gradients", "both")) for _ in range(5)]
    if zero == "one gradient":
        gradients[2] *= 0
    parameter = nn.Parameter(torch.tensor(w))
    optimizer = LARS([parameter], lr=0.7, weight_decay=decay)
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    np.testing.assert_allclose(parameter.detach().numpy(), slow_lars(w, gradients, lr=0.7, decay=decay), rtol=1e-12)


def test_a_parameter_without_gradient_stays_and_state_is_tensors() -> None:
    linear = nn.Linear(3, 2)
    optimizer = LARS(linear.named_parameters(), lr=1.0, weight_decay=0.5)
    before = linear.bias.detach().clone()
    linear.weight.grad = torch.ones_like(linear.weight)
    optimizer.step()
    assert torch.equal(linear.bias, before) and not optimizer.state[linear.bias]["mu"].any()
    assert set(optimizer.state[linear.weight]) == {"mu"}
    assert optimizer.state[linear.weight]["mu"].shape == linear.weight.shape
