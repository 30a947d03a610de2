"""SIGReg against lightly and SciPy's integral, on normal, collapsed and stretched samples."""

import numpy as np
import pytest
import torch
from lightly.loss import LeJEPALoss
from scipy.integrate import trapezoid
from terms.two_views import by_lightly, gradient, projections, some_directions
from torch import Tensor
from torch.testing import assert_close

from mae.terms.sigreg import SIGReg, epps_pulley


@pytest.mark.parametrize("views", [2, 3])
def test_value_and_gradient_are_lightlys(views: int) -> None:
    z, a = projections(views=views), some_directions()
    theirs = LeJEPALoss(lambda_param=0.3, sigreg_num_vectors=a.shape[1])
    assert_close(SIGReg(balance=0.3).of(z, a), by_lightly(theirs, z, a), rtol=1e-5, atol=1e-6)
    ours = gradient(lambda z: SIGReg(balance=0.3).of(z, a), z)
    assert_close(ours, gradient(lambda z: by_lightly(theirs, z, a), z), rtol=1e-4, atol=1e-6)


def test_the_statistic_is_that_of_the_paper_number_by_number() -> None:
    x = projections(dim=2).double()
    t = np.linspace(-3, 3, 33)
    found = []
    for sample in x.permute(1, 2, 0).flatten(0, 1).numpy():
        error = np.abs(np.mean([np.exp(1j * t * number) for number in sample], axis=0) - np.exp(-(t**2) / 2)) ** 2
        found.append(len(sample) * trapezoid(error * np.exp(-(t**2) / 2), t))
    assert float(epps_pulley(x.float())) == pytest.approx(np.mean(found), rel=1e-5)


@pytest.mark.parametrize("count", [4, 64, 512])
def test_normal_samples_of_any_size_have_its_expectation(count: int) -> None:
    """The integral of (1 - exp(-t^2)) exp(-t^2 / 2): the variance of an empirical characteristic function, times N."""
    t = np.linspace(-3, 3, 6001)
    expected = trapezoid((1 - np.exp(-(t**2))) * np.exp(-(t**2) / 2), t)
    x = torch.randn(count, 1, 6000, generator=torch.Generator().manual_seed(0))
    assert float(epps_pulley(x)) == pytest.approx(expected, rel=0.05)


def test_collapsed_stretched_and_shifted_samples_stand_out() -> None:
    a, normal = some_directions(), torch.randn(256, 2, 5, generator=torch.Generator().manual_seed(0))

    def regulariser(z: Tensor) -> float:
        return float(epps_pulley(z @ a))

    alike = regulariser(normal)
    stretched = normal * torch.tensor([3.0, 1.0, 1.0, 1.0, 0.1])
    two_lumps = normal[:, :, :1].sign().expand_as(normal)  # of mean 0 and std 1, and no normal distribution
    for other in (torch.zeros_like(normal), 0.01 * normal, stretched, normal + 1, two_lumps):
        assert regulariser(other) > 4 * alike


def test_its_gradient_vanishes_at_collapse() -> None:
    a, noise = some_directions(), torch.randn(64, 1, 5, generator=torch.Generator().manual_seed(0))

    def size(spread: float) -> float:
        return float(gradient(lambda z: epps_pulley(z @ a), spread * noise).norm())

    assert size(1e-3) < 1e-2 * size(0.5) and size(1e-4) == pytest.approx(size(1e-3) / 10, rel=1e-2)
