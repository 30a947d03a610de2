"""Masks the caller drew, in each shape they may come in."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mae.core.types import Layout, MaskPlan
from mae.errors import UsageError
from mae.masks.given import plan_from_mask

GRID, PATCH = (2, 3), (4, 2)
LAYOUT = Layout(size=(8, 6), patch=PATCH, channels=3)
HIDDEN = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 1, 1, 0, 1, 0]]).bool()


def plan_of(mask: Tensor, **changes: Any) -> MaskPlan:
    return plan_from_mask(mask, **{"batch": 2, "layout": LAYOUT, **changes})


def over_pixels(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, *GRID).repeat_interleave(PATCH[0], dim=1).repeat_interleave(PATCH[1], dim=2)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64, torch.uint8])
@pytest.mark.parametrize("shape", ["tokens", "grid", "pixels"])
def test_each_shape_and_type_gives_the_same_plan(shape: str, kind: torch.dtype) -> None:
    mask = {"tokens": HIDDEN, "grid": HIDDEN.reshape(2, *GRID), "pixels": over_pixels(HIDDEN)}[shape]
    plan = plan_of(mask.to(kind))
    assert torch.equal(plan.hidden, HIDDEN)
    assert plan.visible.tolist() == [[1, 2, 4], [0, 3, 5]] and plan.predicted.tolist() == [[0, 3, 5], [1, 2, 4]]


@pytest.mark.parametrize("shape", ["tokens", "grid", "pixels"])
def test_one_mask_serves_the_whole_batch(shape: str) -> None:
    one = HIDDEN[:1]
    mask = {"tokens": one[0], "grid": one.reshape(GRID), "pixels": over_pixels(one)[0]}[shape]
    assert torch.equal(plan_of(mask, batch=3).hidden, one.expand(3, -1))


def test_as_many_images_as_pixels_in_a_column_have_masks_of_their_own() -> None:
    layout = Layout(size=(4, 4), patch=(2, 2), channels=3)
    hidden = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).bool()
    assert torch.equal(plan_from_mask(hidden, batch=4, layout=layout).hidden, hidden)


def test_one_hidden_pixel_hides_its_patch() -> None:
    mask = torch.zeros(1, 8, 6)
    mask[0, 7, 1] = 1  # last row, second column of pixels: lower left patch
    assert plan_of(mask, batch=1).hidden.tolist() == [[False, False, False, True, False, False]]


def test_images_that_hide_different_numbers_are_refused() -> None:
    mask = HIDDEN.clone()
    mask[0, 1] = True
    with pytest.raises(UsageError, match="between 3 and 4 patches"):
        plan_of(mask)


@pytest.mark.parametrize(("value", "count"), [(0, "0 of 6"), (1, "6 of 6")])
def test_a_mask_that_hides_nothing_or_all_is_refused(value: int, count: str) -> None:
    with pytest.raises(UsageError, match=count):
        plan_of(torch.full((2, 6), value))


@pytest.mark.parametrize("value", [2.0, -1.0, 0.5, float("nan")])
def test_other_values_than_zero_and_one_are_refused(value: float) -> None:
    mask = HIDDEN.float()
    mask[0, 0] = value
    with pytest.raises(UsageError, match="other than 0 and 1"):
        plan_of(mask)


@pytest.mark.parametrize("shape", [(2, 5), (3, 6), (2, 3, 2), (2, 1, 8, 6), (6, 8), (2, 6, 1)])
def test_other_shapes_are_refused_with_the_right_ones(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"\[2, 6\] over tokens, \[2, 2, 3\] over the grid or \[2, 8, 6\]"):
        plan_of(torch.zeros(shape))


def test_an_empty_batch_is_refused() -> None:
    for mask in (HIDDEN[0], HIDDEN[:0]):
        with pytest.raises(UsageError, match="holds no image"):
            plan_of(mask, batch=0)
