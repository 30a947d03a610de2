"""The Laplacian term on hand cases and against loops over prediction and image separately."""

from pathlib import Path

import pytest
import torch
from compiler import run_compiled
from torch import Tensor
from torch.testing import assert_close

from mae.terms.laplacian import LaplacianError, laplacian

RAW = pytest.mark.parametrize("raw", [False, True])


def laplacian_by_loops(image: Tensor) -> Tensor:
    """Of one channel, in float64: each pixel's four neighbours, the border repeated outwards."""
    height, width = image.shape
    result = torch.zeros(height, width, dtype=torch.float64)
    for y in range(height):
        for x in range(width):
            for dy, dx in ((-1, 0), (1, 0), (0, -1), (0, 1)):
                there = image[min(max(y + dy, 0), height - 1), min(max(x + dx, 0), width - 1)]
                result[y, x] += there.double() - image[y, x].double()
    return result


def value_by_loops(prediction: Tensor, images: Tensor, hidden: Tensor) -> float:
    differences = []
    for sample in range(len(images)):
        where = hidden[sample, 0]
        for guess, truth in zip(prediction[sample], images[sample], strict=True):
            differences.append((laplacian_by_loops(guess) - laplacian_by_loops(truth)).abs()[where])
    return float(torch.cat(differences).mean())


def some_hidden(batch: int, rows: int, columns: int, patch: int) -> Tensor:
    hidden = torch.rand(batch, 1, rows, columns) < 0.7
    hidden[:, :, 0, 0], hidden[:, :, -1, -1] = True, False
    return hidden.repeat_interleave(patch, 2).repeat_interleave(patch, 3)


def left_half(height: int, width: int) -> Tensor:
    return (torch.arange(width) < width // 2).expand(1, 1, height, width)


def test_a_constant_image_has_none_borders_included() -> None:
    assert laplacian(torch.full((1, 2, 5, 4), 0.3)).abs().max() == 0


def test_a_ramp_has_none_inside_and_its_slope_at_two_borders() -> None:
    ramp = torch.arange(6.0).expand(1, 1, 4, 6)
    expected = torch.zeros(1, 1, 4, 6)
    expected[..., 0], expected[..., -1] = 1, -1
    assert torch.equal(laplacian(ramp), expected)


def test_a_single_pixel_shows_the_kernel() -> None:
    image = torch.zeros(1, 1, 5, 5)
    image[..., 2, 2] = 1
    kernel = torch.tensor([[0.0, 1, 0], [1, -4, 1], [0, 1, 0]])
    expected = torch.zeros(1, 1, 5, 5)
    expected[..., 1:4, 1:4] = kernel
    assert torch.equal(laplacian(image), expected)


def test_a_pixel_in_the_corner_has_two_neighbours() -> None:
    image = torch.zeros(1, 1, 3, 3)
    image[..., 0, 0] = 1
    assert torch.equal(laplacian(image)[0, 0], torch.tensor([[-2.0, 1, 0], [1, 0, 0], [0, 0, 0]]))


def test_nothing_wrong_is_zero() -> None:
    assert LaplacianError().of(torch.zeros(1, 3, 4, 4), left_half(4, 4)) == 0


def test_a_step_to_the_true_patch_counts() -> None:
    everywhere = torch.ones(1, 1, 4, 4)  # all too bright by 1: the decoder's own picture has no step
    assert LaplacianError().of(everywhere, left_half(4, 4)) == 0
    put_together = everywhere * left_half(4, 4)
    assert LaplacianError().of(put_together, left_half(4, 4)) == 0.5  # 1 beside the visible half, 0 in the other column


@RAW
@pytest.mark.parametrize(("rows", "columns", "channels"), [(3, 4, 3), (2, 2, 1)])
def test_value_is_that_of_loops_over_prediction_and_image(rows: int, columns: int, channels: int, raw: bool) -> None:
    prediction, images = torch.randn(2, 2, channels, rows * 2, columns * 2)
    hidden = some_hidden(2, rows, columns, 2)
    if not raw:
        prediction = torch.where(hidden, prediction, images)
    value = LaplacianError().of(prediction - images, hidden)
    assert float(value) == pytest.approx(value_by_loops(prediction, images, hidden), rel=1e-5)


@RAW
def test_gradient_is_that_of_the_plain_formula(raw: bool) -> None:
    error, hidden = torch.randn(2, 3, 6, 8), some_hidden(2, 3, 4, 2)
    error = error if raw else error * hidden
    ours, plain = error.clone().requires_grad_(), error.double().requires_grad_()
    LaplacianError().of(ours, hidden).backward()
    (laplacian(plain).abs() * hidden).sum().div(hidden.sum() * 3).backward()
    assert_close(ours.grad.double(), plain.grad, rtol=1e-5, atol=1e-8)


def test_gradient_reaches_hidden_pixels_and_the_visible_ones_beside_them() -> None:
    error = torch.randn(1, 2, 4, 6, requires_grad=True)
    LaplacianError().of(error, left_half(4, 6)).backward()
    assert error.grad is not None and error.grad[..., :3].abs().max() > 0
    assert error.grad[..., 3].abs().min() > 0 and error.grad[..., 4:].abs().max() == 0


def test_half_precision_is_judged_in_float32() -> None:
    error, hidden = torch.randn(2, 3, 4, 6).bfloat16(), some_hidden(2, 2, 3, 2)
    value = LaplacianError().of(error, hidden)
    assert value.dtype == torch.float32
    assert torch.equal(value, LaplacianError().of(error.float(), hidden))


def test_the_call_leaves_weight_and_input_alone() -> None:
    error, hidden = torch.randn(1, 1, 4, 4), left_half(4, 4)
    before = error.clone()
    assert torch.equal(LaplacianError(weight=3.0).of(error, hidden), LaplacianError(weight=0.0).of(error, hidden))
    assert torch.equal(error, before)


COMPILED = """
import torch
from mae.terms.laplacian import LaplacianError
error, hidden = torch.randn(2, 3, 8, 8), torch.rand(2, 1, 8, 8) < 0.7
term = LaplacianError()
eager, fast = error.clone().requires_grad_(), error.clone().requires_grad_()
value = term.of(eager, hidden)
compiled = torch.compile(lambda e: term.of(e, hidden), fullgraph=True, backend="aot_eager")(fast)
value.backward(), compiled.backward()
torch.testing.assert_close(compiled, value)
torch.testing.assert_close(fast.grad, eager.grad)
"""


@pytest.mark.slow
def test_compiled_it_is_the_same(tmp_path: Path) -> None:
    run_compiled(COMPILED, folder=tmp_path)
