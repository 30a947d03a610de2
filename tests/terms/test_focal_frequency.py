"""The focal frequency term against the package of its authors and hand cases."""

import pytest
import torch
from focal_frequency_loss import FocalFrequencyLoss
from torch.testing import assert_close

from mae.errors import UsageError
from mae.terms.focal_frequency import FocalFrequencyError

OPTIONS = [
    {},
    {"alpha": 0.0},
    {"alpha": 2.0},
    {"log_matrix": True},
    {"batch_matrix": True},
    {"average_spectrum": True},
    {"patch_factor": 2},
    {"alpha": 2.0, "log_matrix": True, "batch_matrix": True, "average_spectrum": True, "patch_factor": 2},
]


def everything(images: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(images[:, :1], dtype=torch.bool)


@pytest.mark.parametrize("size", [(8, 12), (6, 10)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradient_are_those_of_the_authors_package(options: dict, size: tuple[int, int]) -> None:
    images, start = torch.randn(2, 3, 2, *size)
    ours, theirs = start.clone().requires_grad_(), start.clone().requires_grad_()
    named = {"ave_spectrum" if name == "average_spectrum" else name: value for name, value in options.items()}
    expected = FocalFrequencyLoss(**named)(theirs, images)
    value = FocalFrequencyError(**options).of(ours - images)
    assert_close(value, expected, rtol=1e-6, atol=1e-6)
    value.backward()
    expected.backward()
    assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [(5, 7), (1, 4), (4, 1)])
def test_odd_sides_too(size: tuple[int, int]) -> None:
    images, prediction = torch.randn(2, 3, 2, *size)
    value = FocalFrequencyError().of(prediction - images)
    assert_close(value, FocalFrequencyLoss()(prediction, images), rtol=1e-6, atol=1e-6)


def test_alike_weighed_it_is_the_mean_squared_error() -> None:
    error = torch.randn(2, 3, 6, 8)
    value = FocalFrequencyError(alpha=0.0).of(error)  # Parseval
    assert float(value) == pytest.approx(float(error.square().mean()), rel=1e-5)


def test_one_wave_weighs_fully() -> None:
    wave = torch.cos(2 * torch.pi * torch.arange(8.0) / 4).expand(1, 1, 4, 8)
    value = FocalFrequencyError().of(wave)
    assert float(value) == pytest.approx(0.5, rel=1e-5)  # its mean square


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("filling", [0.0, 1.0])
def test_gradient_is_finite_where_nothing_is_wrong(filling: float, options: dict) -> None:
    error = torch.zeros(2, 1, 4, 4)
    error[0] = filling  # 1: all but one frequency of the first image are 0; the second image has no error at all
    error.requires_grad_()
    value = FocalFrequencyError(**options).of(error)
    value.backward()
    assert value.isfinite() and error.grad is not None and error.grad.isfinite().all()
    assert filling == 1.0 or (value == 0 and error.grad.abs().max() == 0)


def test_half_precision_is_judged_in_float32() -> None:
    error = torch.randn(2, 3, 4, 6).bfloat16()
    value = FocalFrequencyError().of(error)
    assert value.dtype == torch.float32
    assert torch.equal(value, FocalFrequencyError().of(error.float()))


def test_the_call_leaves_the_weight_alone() -> None:
    error = torch.randn(1, 1, 4, 4)
    values = [FocalFrequencyError(weight=weight).of(error) for weight in (0.0, 3.0)]
    assert torch.equal(*values)


@pytest.mark.parametrize("size", [(8, 6), (6, 8)])
def test_a_patch_factor_that_does_not_divide_a_side_is_refused(size: tuple[int, int]) -> None:
    error = torch.zeros(1, 1, *size)
    with pytest.raises(UsageError, match=f"{size[0]}x{size[1]} does not divide into 4x4 parts.*such as 2"):
        FocalFrequencyError(patch_factor=4).of(error)
