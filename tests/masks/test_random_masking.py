"""Uniform random masks: exact counts, fair places, no two alike."""

from math import comb

import pytest
import torch
from pieces import asked, layout_of
from torch import Tensor

from mae.errors import UsageError
from mae.masks.random import RandomMasking
from mae.randomness import sample_keys


def keys(count: int, *, epoch: int = 0, seed: int = 0) -> Tensor:
    return sample_keys(seed, epoch, torch.arange(count))


@pytest.mark.parametrize(
    ("grid", "ratio", "visible"),
    [
        ((14, 14), 0.75, 49),
        ((16, 16), 0.75, 64),
        ((2, 5), 0.9, 1),  # 10 * (1 - 0.9) is 0.9999999999999998 in floating point
        ((10, 10), 0.9, 10),
        ((10, 10), 0.99, 1),
        ((3, 7), 0.5, 10),  # never more visible than the ratio allows
        ((1, 2), 0.5, 1),
        ((8, 32), 0.6, 102),
    ],
)
def test_counts_are_exact(grid: tuple[int, int], ratio: float, visible: int) -> None:
    plan = RandomMasking(ratio=ratio).plan(asked(grid, keys(5)))
    total = grid[0] * grid[1]
    assert plan.visible.shape == (5, visible) and plan.predicted.shape == (5, total - visible)
    assert plan.hidden.sum(dim=1).tolist() == [total - visible] * 5 and plan.weight is None


def test_whole_shares_are_never_rounded_away() -> None:
    for total in range(2, 300):
        for visible in range(1, total):
            assert RandomMasking(ratio=1 - visible / total).num_visible(layout_of((1, total))) == visible


def test_the_three_sets_agree() -> None:
    plan = RandomMasking(ratio=0.6).plan(asked((4, 5), keys(50)))
    both = torch.cat([plan.visible, plan.predicted], dim=1)
    assert torch.equal(both.sort(dim=1).values, torch.arange(20).expand(50, -1))
    assert not plan.hidden.gather(1, plan.visible).any() and plan.hidden.gather(1, plan.predicted).all()


def test_every_place_is_hidden_equally_often() -> None:
    num_images, ratio = 4000, 0.75
    plan = RandomMasking(ratio=ratio).plan(asked((7, 8), keys(num_images)))
    rate = plan.hidden.float().mean(dim=0)
    deviation = (ratio * (1 - ratio) / num_images) ** 0.5
    assert (rate - ratio).abs().max() < 5 * deviation  # 56 places: 5 deviations by chance 1 in 30000


def test_pairs_of_places_are_hidden_independently_of_where_they_stand() -> None:
    plan = RandomMasking(ratio=0.5).plan(asked((4, 4), keys(4000)))
    hidden = plan.hidden.double()
    together = hidden.T @ hidden / len(hidden)
    expected = 8 * 7 / (16 * 15)  # without replacement
    off_diagonal = together[~torch.eye(16, dtype=torch.bool)]
    assert (off_diagonal - expected).abs().max() < 5.5 * (expected * (1 - expected) / 4000) ** 0.5


def test_every_subset_of_a_small_grid_is_reached() -> None:
    plan = RandomMasking(ratio=0.5).plan(asked((2, 3), keys(2000)))
    subsets = {tuple(sorted(row)) for row in plan.visible.tolist()}
    assert len(subsets) == comb(6, 3)


def test_no_two_samples_epochs_or_seeds_share_a_mask() -> None:
    masking = RandomMasking(ratio=0.75)
    rows = torch.cat(
        [masking.plan(asked((14, 14), keys(200, epoch=e, seed=s))).hidden for e in range(4) for s in range(2)]
    )
    assert rows.unique(dim=0).shape[0] == rows.shape[0]


def test_a_mask_is_a_function_of_its_key_alone() -> None:
    masking = RandomMasking(ratio=0.75)
    whole = masking.plan(asked((6, 6), keys(20)))
    part = masking.plan(asked((6, 6), keys(20)[[7, 3]]))
    assert torch.equal(part.visible, whole.visible[[7, 3]]) and torch.equal(part.hidden, whole.hidden[[7, 3]])


@pytest.mark.parametrize(("grid", "ratio"), [((2, 2), 0.9), ((2, 2), 1e-8), ((1, 1), 0.5)])
def test_ratios_that_leave_nothing_are_refused(grid: tuple[int, int], ratio: float) -> None:
    with pytest.raises(UsageError, match="leaves"):
        RandomMasking(ratio=ratio).plan(asked(grid, keys(2)))
