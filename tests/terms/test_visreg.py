"""VISReg against lightly and SciPy's Wasserstein distance, on normal, collapsed and stretched samples."""

import numpy as np
import pytest
import torch
from lightly.loss import VISRegLoss
from scipy.stats import norm, wasserstein_distance
from terms.two_views import by_lightly, gradient, projections, some_directions
from torch import Tensor
from torch.testing import assert_close

from mae.terms.visreg import VISReg, shape

REGULARISER = VISReg(balance=1 - 1e-7)
"""As good as without the distance of views."""


@pytest.mark.parametrize("views", [2, 3])
def test_value_and_gradient_are_lightlys(views: int) -> None:
    z, a = projections(views=views), some_directions()
    theirs = VISRegLoss(lambda_param=0.6, num_slices=a.shape[1])
    assert_close(VISReg().of(z, a), by_lightly(theirs, z, a), rtol=1e-5, atol=1e-6)
    ours = gradient(lambda z: VISReg().of(z, a), z)
    assert_close(ours, gradient(lambda z: by_lightly(theirs, z, a), z), rtol=1e-4, atol=1e-6)


def test_the_shape_is_a_wasserstein_distance_from_quantiles() -> None:
    """SciPy's is of the first order: with a shift alone the second is its square."""
    quantiles = norm.ppf(np.arange(1, 10) / 10)
    x = torch.from_numpy(quantiles)[torch.randperm(9)].float()[:, None, None]
    assert float(shape(x)) < 1e-12
    shifted = x + 0.3
    expected = wasserstein_distance(shifted.flatten().numpy(), quantiles) ** 2
    assert float(shape(shifted)) == pytest.approx(expected, rel=1e-5)


def test_a_large_normal_sample_has_next_to_nothing() -> None:
    z = torch.randn(8192, 1, 5, generator=torch.Generator().manual_seed(0))
    assert float(REGULARISER.of(z, some_directions())) < 2e-3


def test_collapsed_stretched_and_shifted_samples_stand_out() -> None:
    a, normal = some_directions(), torch.randn(256, 2, 5, generator=torch.Generator().manual_seed(0))

    def regulariser(z: Tensor) -> float:
        return float(REGULARISER.of(z, a))

    alike = regulariser(normal)
    stretched = normal * torch.tensor([3.0, 1.0, 1.0, 1.0, 0.1])
    two_lumps = normal[:, :, :1].sign().expand_as(normal)  # of mean 0 and std 1, and no normal distribution
    for other in (torch.zeros_like(normal), 0.01 * normal, stretched, normal + 1, two_lumps):
        assert regulariser(other) > 4 * alike


def test_its_gradient_does_not_vanish_near_collapse() -> None:
    a, noise = some_directions(), torch.randn(64, 1, 5, generator=torch.Generator().manual_seed(0))

    def size(spread: float) -> float:
        return float(gradient(lambda z: REGULARISER.of(z, a), spread * noise).norm())

    assert size(1e-3) > 0.5 * size(0.1) > 0 and size(1e-6) > 0.5 * size(1e-3)


def test_where_all_is_one_point_it_is_finite() -> None:
    z = torch.full((8, 2, 5), 0.7)
    assert gradient(lambda z: VISReg().of(z, some_directions()), z).isfinite().all()
