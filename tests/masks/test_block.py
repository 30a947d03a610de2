"""Block-wise masks: counts, determinism, shape."""

import pytest
import torch
from pieces import asked

from mae.core.contracts import Mask
from mae.errors import UsageError
from mae.masks.block import BlockMasking
from mae.masks.inverse_block import InverseBlockMasking
from mae.masks.multi_block import MultiBlockMasking
from mae.masks.random import RandomMasking
from mae.randomness import sample_keys


def keys(count: int, *, seed: int = 0) -> torch.Tensor:
    return sample_keys(seed, 0, torch.arange(count))


def neighbours(hidden: torch.Tensor) -> float:
    """Of masked patches the fraction whose right neighbour is masked too."""
    return float((hidden[..., 1:] & hidden[..., :-1]).sum() / hidden[..., :-1].sum())


def by_loops(masking: BlockMasking, draws: list[list[float]], rows: int, columns: int, count: int) -> set[int]:
    """The masked patches of one sample, one block after another."""
    hidden: set[int] = set()
    for area_at, aspect_at, down, across in draws:
        left = count - len(hidden)
        least = min(left, masking.min_patches)
        area = least + (left - least) * area_at
        aspect = masking.min_aspect ** (1 - 2 * aspect_at)
        height = min(max(round((area * aspect) ** 0.5), 1), rows)
        width = min(max(round((area / aspect) ** 0.5), 1), columns)
        top, first = int(down * (rows - height + 1)), int(across * (columns - width + 1))
        for row in range(top, top + height):
            for column in range(first, first + width):
                if len(hidden) < count:
                    hidden.add(row * columns + column)
    return hidden


def test_it_is_that_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.rand(5, 64, 4, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("mae.masks.block.uniform", lambda keys, count, stream: draws.flatten(1))
    masking = BlockMasking(ratio=0.5, min_patches=6)
    plan = masking.plan(asked((8, 11), keys(5)))
    for sample in range(5):
        expected = by_loops(masking, draws[sample].tolist(), 8, 11, 44)
        assert set(plan.hidden[sample].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize(("grid", "ratio"), [((14, 14), 0.4), ((4, 6), 0.75), ((2, 2), 0.5), ((1, 30), 0.9)])
def test_every_sample_masks_as_many(grid: tuple[int, int], ratio: float) -> None:
    plan = BlockMasking(ratio=ratio).plan(asked(grid, keys(200)))
    count = grid[0] * grid[1] - BlockMasking(ratio=ratio).num_visible(asked(grid, keys(1)).layout)
    assert plan.hidden.sum(dim=1).unique().tolist() == [count] == [plan.predicted.shape[1]]


@pytest.mark.parametrize(
    ("masking", "centre", "corner"),
    [
        (BlockMasking(ratio=0.4), 0.72, 0.055),
        (InverseBlockMasking(ratio=0.75, roll=False), 1 - 0.67, 1 - 0.01),
        (MultiBlockMasking(), 0.87, 0.06),
    ],
    ids=["block", "inverse_block", "multi_block"],
)
def test_rates_per_position_are_as_documented(masking: Mask, centre: float, corner: float) -> None:
    """docs/method/objectives.md; 4,000 samples leave a std of 0.007."""
    predicted = masking.plan(asked((14, 14), keys(4000), ratio=getattr(masking, "ratio", 0.75))).predicted
    rates = torch.zeros(4000, 196).scatter_(1, predicted, 1.0).mean(dim=0).unflatten(0, (14, 14))
    assert abs(float(rates[6:8, 6:8].mean()) - centre) < 0.02
    corners = [float(rates[row, column]) for row in (0, -1) for column in (0, -1)]
    assert max(abs(rate - corner) for rate in corners) < 0.02


def test_blocks_hang_together_where_random_masks_do_not() -> None:
    block = BlockMasking(ratio=0.4).plan(asked((14, 14), keys(200))).hidden.unflatten(1, (14, 14))
    random = RandomMasking(ratio=0.4).plan(asked((14, 14), keys(200))).hidden.unflatten(1, (14, 14))
    assert neighbours(block) > 0.75 and neighbours(random) < 0.45


def test_larger_blocks_hang_together_more() -> None:
    small, large = (
        BlockMasking(min_patches=count).plan(asked((14, 14), keys(300))).hidden.unflatten(1, (14, 14))
        for count in (1, 60)
    )
    assert neighbours(large) > neighbours(small)


def test_other_than_two_axes_are_refused() -> None:
    with pytest.raises(UsageError, match="rows and columns"):
        BlockMasking().plan(asked((2, 4, 4), keys(1)))
