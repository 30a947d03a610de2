"""Trivial predictors against a slow loop, and the values they must have."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mae.core.contracts import Batch
from mae.core.types import MaskPlan, MaskRequest
from mae.errors import UsageError
from mae.evaluation.common.baselines import measure_baselines, predict_mean_of_visible, predict_nearest_visible
from mae.losses.reconstruction import MeanAbsoluteError, MeanSquaredError
from mae.masks.random import RandomMasking
from mae.modalities.images.tokenizer import ImagePatches
from mae.targets.pixels import PixelTarget

P, Q, GRID = 2, 3, (3, 5)
TOKENIZER = ImagePatches(img_size=(GRID[0] * P, GRID[1] * Q), patch_size=(P, Q), in_chans=2)


def batch(seed: int, *, size: int = 2) -> tuple[torch.Tensor, MaskPlan]:
    images = torch.randn(size, 2, *TOKENIZER.layout.size, generator=torch.Generator().manual_seed(seed))
    request = MaskRequest(layout=TOKENIZER.layout, keys=torch.arange(size) + seed)
    return images, RandomMasking(ratio=0.7).plan(request)


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


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [MeanSquaredError(), MeanAbsoluteError()])
def test_the_loss_of_each_trivial_predictor(norm, weighted, loss):
    target = PixelTarget(norm=norm)
    images, plan = batch(0, size=4)
    if weighted:
        plan = replace(plan, weight=torch.rand(plan.predicted.shape, generator=torch.Generator().manual_seed(9)))
    of_images = Batch(x=images, tokenizer=TOKENIZER)
    guesses, true = slow_guesses(target(of_images), plan), target(of_images, plan.predicted)
    expected = [float(loss(guess, true, plan.weight)) for guess in guesses.values()]
    found = measure_baselines(target, TOKENIZER, [(images, plan)], loss=loss)
    assert list(found.as_dict().values()) == pytest.approx(expected, rel=1e-5)
    assert list(found.as_dict()) == ["zero", "mean_of_visible", "nearest_visible"]


def test_batches_count_as_one_large_one():
    target = PixelTarget(norm=False)
    batches = [batch(0, size=1), batch(5, size=3)]
    plans = [plan for _, plan in batches]
    together = MaskPlan(
        visible=torch.cat([plan.visible for plan in plans]),
        predicted=torch.cat([plan.predicted for plan in plans]),
        hidden=torch.cat([plan.hidden for plan in plans]),
    )
    whole = measure_baselines(
        target, TOKENIZER, [(torch.cat([images for images, _ in batches]), together)], loss=MeanSquaredError()
    )
    assert measure_baselines(target, TOKENIZER, iter(batches), loss=MeanSquaredError()).as_dict() == pytest.approx(
        whole.as_dict()
    )


def test_visible_patches_count_nothing_when_all_are_predicted():
    target = PixelTarget()
    images, plan = batch(0)
    found = measure_baselines(target, TOKENIZER, [(images, plan.predict_all())], loss=MeanSquaredError())
    assert found.as_dict() == pytest.approx(
        measure_baselines(target, TOKENIZER, [(images, plan)], loss=MeanSquaredError()).as_dict()
    )


def test_guesses_come_for_the_tokens_asked_for():
    images, plan = batch(0, size=3)
    values = TOKENIZER.cut(images)
    everywhere, seen = plan.predict_all(), ~plan.hidden
    nearest = predict_nearest_visible(values, everywhere, GRID)
    assert torch.equal(nearest[seen], values[seen])  # nothing is nearer to a visible patch than itself
    mean = predict_mean_of_visible(values, everywhere, 2)
    for whole, part in [
        (nearest, predict_nearest_visible(values, plan, GRID)),
        (mean, predict_mean_of_visible(values, plan, 2)),
    ]:
        assert torch.equal(whole.gather(1, plan.predicted.unsqueeze(-1).expand_as(part)), part)


class Largest(TorchDispatchMode):
    """The most values that a tensor has on the way."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.values = max(
            [self.values, *(each.numel() for each in tree_leaves(made) if isinstance(each, torch.Tensor))]
        )
        return made


def test_the_nearest_patches_of_a_fine_grid_take_no_more_memory_for_more_images():
    grid, size = (48, 48), 6
    tokenizer = ImagePatches(img_size=grid, patch_size=(1, 1), in_chans=1)
    plan = RandomMasking(ratio=0.75).plan(MaskRequest(layout=tokenizer.layout, keys=torch.arange(size)))
    values = torch.randn(size, 48 * 48, 1)
    with Largest() as largest:
        found = predict_nearest_visible(values, plan, grid)
    assert largest.values <= 1 << 22 < size * plan.predicted.shape[1] * plan.visible.shape[1]
    alone = replace(plan, visible=plan.visible[3:4], predicted=plan.predicted[3:4], hidden=plan.hidden[3:4])
    assert torch.equal(found[3:4], predict_nearest_visible(values[3:4], alone, grid))


def test_zero_on_normalised_patches_is_nearly_one():
    target = PixelTarget()
    found = measure_baselines(target, TOKENIZER, [batch(0, size=8)], loss=MeanSquaredError())
    assert found.zero == pytest.approx((P * Q * 2 - 1) / (P * Q * 2), rel=1e-4)


def test_no_batch_is_reported():
    with pytest.raises(UsageError, match="at least one batch"):
        measure_baselines(PixelTarget(), TOKENIZER, [], loss=MeanSquaredError())
