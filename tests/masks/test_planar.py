"""What holds for every mask over rows and columns: exact counts, small grids, one mask a key, the rates it promises."""

import pytest
import torch
from pieces import asked, layout_of
from torch import Tensor

from mae.core.kinds import find, kinds
from mae.errors import UsageError
from mae.masks.planar import PlanarMask
from mae.masks.schedule import RatioSchedule
from mae.randomness import sample_keys

PLANAR = [kind for kind in kinds("masks") if issubclass(find("masks", kind), PlanarMask)]
MANY = 20_000


def keys(count: int, *, seed: int = 0) -> Tensor:
    return sample_keys(seed, 0, torch.arange(count))


@pytest.mark.parametrize("kind", PLANAR)
@pytest.mark.parametrize("grid", [(3, 3), (1, 9), (9, 1), (2, 3), (7, 12), (14, 14)])
@pytest.mark.parametrize("ratio", [0.34, 0.5, 0.75, 0.8])
def test_counts_are_exact_on_any_grid(kind: str, grid: tuple[int, int], ratio: float) -> None:
    masking, total = find("masks", kind)(ratio=ratio), grid[0] * grid[1]
    plan = masking.plan(asked(grid, keys(100)))
    visible = int(total * (1 - ratio) + 1e-6)
    assert plan.visible.shape == (100, visible) and plan.weight is None
    assert plan.hidden.sum(dim=1).unique().tolist() == [total - visible]
    both = torch.cat([plan.visible, plan.predicted], dim=1).sort(dim=1).values
    assert (both[:, 1:] > both[:, :-1]).all()  # no token twice
    assert not plan.hidden.gather(1, plan.visible).any() and plan.hidden.gather(1, plan.predicted).all()
    assert both.shape[1] == total if masking.predicts_all else plan.predicted.shape[1] > 0


@pytest.mark.parametrize("kind", PLANAR)
def test_a_mask_is_the_same_alone_and_in_any_batch(kind: str) -> None:
    masking = find("masks", kind)()
    whole = masking.plan(asked((6, 9), keys(210)))
    for size in (1, 7, 64):
        parts = [masking.plan(asked((6, 9), part)) for part in keys(210).split(size)]
        for name in ("visible", "predicted", "hidden"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@pytest.mark.parametrize("kind", PLANAR)
def test_a_ratio_drawn_for_each_step_is_kept(kind: str) -> None:
    masking, schedule = find("masks", kind)(), RatioSchedule(kind="random", start=0.5, end=0.75)
    counts = set()
    for step in range(30):
        ratio = schedule.ratio(step, steps_per_epoch=10)
        plan = masking.plan(asked((14, 14), keys(3), ratio))
        assert plan.visible.shape == (3, find("masks", kind)(ratio=ratio).num_visible(layout_of((14, 14))))
        assert torch.equal(plan.hidden, find("masks", kind)(ratio=ratio).plan(asked((14, 14), keys(3))).hidden)
        counts.add(plan.visible.shape[1])
    assert len(counts) > 4


@pytest.mark.parametrize("kind", PLANAR)
def test_what_it_cannot_mask_is_refused_before_any_plan(kind: str) -> None:
    with pytest.raises(UsageError, match=rf"mask {kind} is for grids of rows and columns, this one is 2x4x4"):
        find("masks", kind)().num_visible(layout_of((2, 4, 4)))
    with pytest.raises(UsageError, match="leaves 0 visible"):
        find("masks", kind)(ratio=0.95).num_visible(layout_of((3, 3)))


@pytest.mark.parametrize(
    ("kind", "options", "grid"),
    [
        ("inverse_block", {"ratio": 0.65}, (7, 9)),
        ("inverse_block", {"ratio": 0.4}, (1, 12)),
        ("grid", {"ratio": 0.7}, (8, 6)),
        ("grid", {"ratio": 0.7, "cell": 3}, (9, 6)),
        ("regular", {"ratio": 0.6}, (8, 16)),
        ("regular", {"ratio": 0.75}, (6, 10)),
        ("regular", {"ratio": 0.5}, (14, 14)),
        ("noise", {"ratio": 0.75}, (7, 9)),
        ("noise", {"ratio": 0.6}, (4, 6)),
        ("noise", {"ratio": 0.6, "min_frequency": 0.3, "max_frequency": 0.4}, (3, 12)),
    ],
)
def test_each_position_is_masked_equally_often_where_that_is_promised(
    kind: str, options: dict[str, float], grid: tuple[int, int]
) -> None:
    masking = find("masks", kind)(**options)
    total = grid[0] * grid[1]
    rate = (total - masking.num_visible(layout_of(grid))) / total
    rates = masking.plan(asked(grid, keys(MANY))).hidden.double().mean(dim=0)
    assert (rates - rate).abs().max() < 5 * (rate * (1 - rate) / MANY) ** 0.5  # by chance in one of 10,000 such tests
