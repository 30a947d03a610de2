"""The cosine distance against PyTorch's own, and where there is no direction."""

import pytest
import torch
from torch.nn.functional import cosine_similarity
from torch.testing import assert_close

from mae.losses.cosine import CosineDistance

LOSS = CosineDistance()


@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradient_are_torchs(weighted: bool) -> None:
    pred, target = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).double().float()
    ours, theirs = pred.clone().requires_grad_(), pred.clone().requires_grad_()
    weight = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) if weighted else torch.ones(3, 4)
    distance = 1 - cosine_similarity(theirs, target, dim=-1)
    expected = (distance * weight).sum() / weight.sum()
    value = LOSS(ours, target, weight if weighted else None)
    assert_close(value, expected, rtol=1e-5, atol=1e-6)
    value.backward()
    expected.backward()
    assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_it_goes_from_one_direction_to_the_opposite_whatever_the_lengths() -> None:
    target = torch.randn(3, 4, 5)
    assert LOSS(1e-3 * target, target, None) < 1e-6
    assert_close(LOSS(-7 * target, target, None), torch.tensor(2.0))


def test_what_has_no_direction_is_neither_near_nor_far() -> None:
    target, nothing = torch.randn(3, 4, 5), torch.zeros(3, 4, 5)
    assert_close(LOSS(nothing, target, None), torch.tensor(1.0))
    assert_close(LOSS(target, nothing, None), torch.tensor(1.0))
    assert LOSS(nothing, nothing, None) == 0
