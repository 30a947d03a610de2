"""The contrast of views against lightly and loops."""

import math

import pytest
import torch
from lightly.loss import NTXentLoss
from terms.two_views import gradient, projections
from torch import Tensor
from torch.testing import assert_close

from mae.terms.infonce import InfoNCE


def by_loops(z: Tensor, temperature: float) -> Tensor:
    """In float64, for any number of views."""
    rows = [(number, view / view.norm()) for number, image in enumerate(z.double()) for view in image]
    found = []
    for i, (image, row) in enumerate(rows):
        among = torch.stack([(row @ other / temperature).exp() for k, (_, other) in enumerate(rows) if k != i]).sum()
        for j, (same, other) in enumerate(rows):
            if j != i and same == image:
                found.append(among.log() - row @ other / temperature)
    return torch.stack(found).mean()


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_value_and_gradient_of_two_views_are_lightlys(temperature: float) -> None:
    z, theirs = projections(views=2), NTXentLoss(temperature=temperature)
    term = InfoNCE(temperature=temperature)
    assert_close(term.of(z), theirs(z[:, 0], z[:, 1]), rtol=1e-5, atol=1e-6)
    assert_close(gradient(term.of, z), gradient(lambda z: theirs(z[:, 0], z[:, 1]), z), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("views", [2, 3, 4])
def test_any_number_of_views_is_as_by_loops(views: int) -> None:
    z = projections(images=5, views=views)
    assert_close(InfoNCE(temperature=0.3).of(z).double(), by_loops(z, 0.3), rtol=1e-5, atol=1e-6)


def test_projections_that_are_all_alike_are_guessed_among() -> None:
    z = torch.ones(6, 2, 5)
    assert float(InfoNCE().of(z)) == pytest.approx(math.log(11), abs=1e-5)
    assert gradient(InfoNCE().of, z).isfinite().all()


def test_views_that_are_found_at_once_cost_nothing_and_strangers_much() -> None:
    z = torch.eye(6)[:, None].expand(-1, 2, -1).clone()
    assert float(InfoNCE(temperature=0.05).of(z)) < 1e-6
    z[:, 1] = z[:, 1].roll(1, dims=0)
    assert float(InfoNCE(temperature=0.05).of(z)) > 10
