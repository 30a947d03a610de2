"""A model must learn what can be learned, and nothing where there is nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from learning import BATCH, noise, structured, trained
from torch import Tensor

from mae.modalities.images.patches import patchify

CROSS = {"decoder": "cross", "mask_predicted": 0.4}
ADDITIONS = {"laplacian": 0.05, "uniformity": 0.01, "focal_frequency": 0.5}


def error_over_baseline(draw: Callable[[torch.Generator], Tensor], **options: Any) -> float:
    """Mean squared error on fresh images over that of predicting each channel's mean over the visible pixels."""
    model, generator = trained(draw, **options)
    images = draw(generator)
    plan = model.plan(images)
    with torch.no_grad():
        error = (model(images, plan=plan).prediction - patchify(images, (4, 4), plan.predicted)).square().mean()
    patches = torch.nn.functional.unfold(images, 4, stride=4).transpose(1, 2)  # [B, N, 3 * 16], channel first
    visible = patches.reshape(BATCH, -1, 3, 16).gather(1, plan.visible[..., None, None].expand(-1, -1, 3, 16))
    mean = visible.mean(dim=(1, 3))  # [B, 3]
    hidden = plan.hidden.reshape(BATCH, 1, 6, 6).repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    squares = (images - mean[..., None, None]).square()
    return float(error / squares[hidden.expand_as(squares)].mean())


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0.25),
        ({"loss": "l1"}, 0.25),
        ({"target": "low_pass", "target_cutoff": 0.5}, 0.25),
        (ADDITIONS, 0.25),
        (CROSS, 0.45),
    ],
)
def test_structured_images_are_predicted_far_better_than_by_their_mean(options: dict[str, Any], most: float) -> None:
    """From a part of the patches one learns more slowly: as many steps of `CROSS` predict two fifths as many."""
    assert error_over_baseline(structured, **options) < most


@pytest.mark.parametrize("options", [{}, ADDITIONS, CROSS], ids=str)
def test_noise_is_not_predicted_at_all(options: dict[str, Any]) -> None:
    assert 0.95 < error_over_baseline(noise, **options) < 1.2
