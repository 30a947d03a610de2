"""VICReg against lightly and loops."""

import itertools

import pytest
import torch
from lightly.loss import VICRegLoss
from terms.two_views import gradient, projections
from torch import Tensor
from torch.testing import assert_close

from mae.terms.vicreg import VICReg


def by_loops(z: Tensor) -> float:
    """In float64 with weights of 25, 25 and 1, for any number of views."""
    z = z.double()
    images, views, dim = z.shape
    pairs = [(z[:, i] - z[:, j]).square().mean() for i, j in itertools.combinations(range(views), 2)]
    varying, together = [], []
    for view in z.unbind(1):
        centred = view - view.sum(dim=0) / images
        covariance = [[(centred[:, i] * centred[:, j]).sum() / (images - 1) for j in range(dim)] for i in range(dim)]
        varying.append(sum(max(0.0, 1 - float(covariance[i][i] + 1e-4) ** 0.5) for i in range(dim)) / dim)
        together.append(sum(float(covariance[i][j]) ** 2 for i in range(dim) for j in range(dim) if i != j) / dim)
    return 25 * float(sum(pairs)) / len(pairs) + 25 * sum(varying) / views + 2 * sum(together) / views


def test_value_and_gradient_of_two_views_are_lightlys() -> None:
    z, theirs = projections(views=2), VICRegLoss()
    assert_close(VICReg().of(z), theirs(z[:, 0], z[:, 1]), rtol=1e-5, atol=1e-6)
    assert_close(gradient(VICReg().of, z), gradient(lambda z: theirs(z[:, 0], z[:, 1]), z), rtol=1e-4, atol=1e-5)


def test_its_weights_are_those_of_its_parts() -> None:
    z = projections(views=2)
    term, theirs = VICReg(invariance=3, variance=5, covariance=7), VICRegLoss(3, 5, 7)
    assert_close(term.of(z), theirs(z[:, 0], z[:, 1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("views", [2, 3])
def test_any_number_of_views_is_as_by_loops(views: int) -> None:
    z = projections(images=6, views=views)
    assert float(VICReg().of(z)) == pytest.approx(by_loops(z), rel=1e-5)


def test_what_varies_by_itself_costs_next_to_nothing_and_what_does_not_costs() -> None:
    normal = torch.randn(4096, 1, 5, generator=torch.Generator().manual_seed(0)).expand(-1, 2, -1) * 1.1
    assert float(VICReg().of(normal)) < 0.02
    for other in (torch.zeros_like(normal), 0.1 * normal, normal[:, :, :1].expand(-1, -1, 5)):
        assert float(VICReg().of(other)) > 5
    assert gradient(VICReg().of, torch.full((8, 2, 5), 0.7)).isfinite().all()
