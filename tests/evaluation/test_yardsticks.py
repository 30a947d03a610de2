"""Trivial predictors against a slow loop, and the values they must have."""

from dataclasses import replace

import pytest
import torch

from mae.errors import UsageError
from mae.evaluation.yardsticks import measure_yardsticks, predict_mean_of_visible, predict_nearest_visible
from mae.losses.reconstruction import MeanAbsoluteError, MeanSquaredError
from mae.masking.random import RandomMasking
from mae.targets.pixels import PixelTarget
from mae.types import MaskPlan

P, Q, GRID = 2, 3, (3, 5)


def batch(seed: int, *, size: int = 2) -> tuple[torch.Tensor, MaskPlan]:
    images = torch.randn(size, 2, GRID[0] * P, GRID[1] * Q, generator=torch.Generator().manual_seed(seed))
    return images, RandomMasking(ratio=0.7).plan(GRID, torch.arange(size) + seed)


def slow_guesses(values: torch.Tensor, plan: MaskPlan) -> dict[str, torch.Tensor]:
    """Each predictor patch by patch; values [B, N, P*Q*2] with the channel last."""
    guesses = {name: torch.zeros(*plan.predicted.shape, values.shape[-1]) for name in ("zero", "mean", "nearest")}
    for image, (visible, predicted) in enumerate(zip(plan.visible.tolist(), plan.predicted.tolist(), strict=True)):
        for place, token in enumerate(predicted):
            for channel in range(2):
                seen = [v for token in visible for v in values[image, token].tolist()[channel::2]]
                guesses["mean"][image, place, channel::2] = sum(seen) / len(seen)
            distances = {
                v: (v // GRID[1] - token // GRID[1]) ** 2 + (v % GRID[1] - token % GRID[1]) ** 2 for v in visible
            }
            best = min(v for v in visible if distances[v] == min(distances.values()))
            guesses["nearest"][image, place] = values[image, best]
    return guesses


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [MeanSquaredError(), MeanAbsoluteError()])
def test_the_loss_of_each_trivial_predictor(norm_pix, weighted, loss):
    target = PixelTarget(patch_size=(P, Q), norm_pix=norm_pix)
    images, plan = batch(0, size=4)
    if weighted:
        plan = replace(plan, weight=torch.rand(plan.predicted.shape, generator=torch.Generator().manual_seed(9)))
    guesses = slow_guesses(target(images), plan)
    expected = [float(loss(guess, target(images, plan.predicted), plan.weight)) for guess in guesses.values()]
    found = measure_yardsticks(target, [(images, plan)], (P, Q), loss=loss)
    assert list(found.as_dict().values()) == pytest.approx(expected, rel=1e-5)
    assert list(found.as_dict()) == ["zero", "mean_of_visible", "nearest_visible"]


def test_batches_count_as_one_large_one():
    target = PixelTarget(patch_size=(P, Q), norm_pix=False)
    batches = [batch(0, size=1), batch(5, size=3)]
    plans = [plan for _, plan in batches]
    together = MaskPlan(
        visible=torch.cat([plan.visible for plan in plans]),
        predicted=torch.cat([plan.predicted for plan in plans]),
        hidden=torch.cat([plan.hidden for plan in plans]),
    )
    whole = measure_yardsticks(
        target, [(torch.cat([images for images, _ in batches]), together)], (P, Q), loss=MeanSquaredError()
    )
    assert measure_yardsticks(target, iter(batches), (P, Q), loss=MeanSquaredError()).as_dict() == pytest.approx(
        whole.as_dict()
    )


def test_visible_patches_count_nothing_when_all_are_predicted():
    target = PixelTarget(patch_size=(P, Q))
    images, plan = batch(0)
    found = measure_yardsticks(target, [(images, plan.predict_all())], (P, Q), loss=MeanSquaredError())
    assert found.as_dict() == pytest.approx(
        measure_yardsticks(target, [(images, plan)], (P, Q), loss=MeanSquaredError()).as_dict()
    )


def test_guesses_come_for_the_tokens_asked_for():
    images, plan = batch(0, size=3)
    values = PixelTarget(patch_size=(P, Q), norm_pix=False)(images)
    everywhere, seen = plan.predict_all(), ~plan.hidden
    nearest = predict_nearest_visible(values, everywhere, GRID)
    assert torch.equal(nearest[seen], values[seen])  # nothing is nearer to a visible patch than itself
    mean = predict_mean_of_visible(values, everywhere, 2)
    for whole, part in [
        (nearest, predict_nearest_visible(values, plan, GRID)),
        (mean, predict_mean_of_visible(values, plan, 2)),
    ]:
        assert torch.equal(whole.gather(1, plan.predicted.unsqueeze(-1).expand_as(part)), part)


def test_zero_on_norm_pix_is_nearly_one():
    target = PixelTarget(patch_size=(P, Q))
    found = measure_yardsticks(target, [batch(0, size=8)], (P, Q), loss=MeanSquaredError())
    assert found.zero == pytest.approx((P * Q * 2 - 1) / (P * Q * 2), rel=1e-4)


def test_no_batch_is_said():
    with pytest.raises(UsageError, match="at least one batch"):
        measure_yardsticks(PixelTarget(patch_size=(P, Q)), [], (P, Q), loss=MeanSquaredError())
