"""The step's memory that is published, by hand."""

import pytest
import torch
from step_memory import most_bytes
from torch import nn


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 16))


def test_a_step_holds_what_was_counted_by_hand() -> None:
    model = Exponential()
    # The result, which the gradient is made of, the gradient, and two averages.
    expected = 4 * model.weight.nbytes
    assert most_bytes(model, lambda: model.weight.exp().sum(), "fp32") == pytest.approx(expected, rel=0.01)
