"""Blocks predicted from a block around them: against loops, how many are predicted, where the rest stands."""

import random
from itertools import product
from math import floor

import pytest
import torch
from pieces import asked, layout_of
from torch import Tensor

from mae.errors import UsageError
from mae.masks.multi_block import MultiBlockMasking
from mae.randomness import sample_keys

Block = tuple[int, int, int, int]
"""Top, left, height, width."""


def keys(count: int) -> Tensor:
    return sample_keys(0, 0, torch.arange(count))


def target(masking: MultiBlockMasking, draws: list[float], rows: int, columns: int) -> Block:
    area = (masking.scale[0] + (masking.scale[1] - masking.scale[0]) * draws[0]) * rows * columns
    aspect = masking.aspect[0] + (masking.aspect[1] - masking.aspect[0]) * draws[1]
    height = min(max(round((area * aspect) ** 0.5), 1), rows)
    width = min(max(round(area / height), 1), columns)
    return floor(draws[2] * (rows - height + 1)), floor(draws[3] * (columns - width + 1)), height, width


def around(masking: MultiBlockMasking, draws: list[float], rows: int, columns: int) -> Block:
    side = (masking.context[0] + (masking.context[1] - masking.context[0]) * draws[0]) ** 0.5
    height, width = (min(max(round(side * length), 1), length) for length in (rows, columns))
    return floor(draws[1] * (rows - height + 1)), floor(draws[2] * (columns - width + 1)), height, width


def layers(block: Block, row: int, column: int) -> int:
    """How often a block can be peeled until a patch lies outside; for one outside, less how often it must grow."""
    top, left, height, width = block

    def within(by: int) -> bool:
        return top + by <= row < top + height - by and left + by <= column < left + width - by

    by = 0
    while within(by + 1):
        by += 1
    while not within(by):
        by -= 1
    return by


def by_loops(
    masking: MultiBlockMasking, draws: list[float], grid: tuple[int, int], visible: int, predicted: int
) -> tuple[set[int], set[int]]:
    """Visible and predicted patches of one sample."""
    rows, columns = grid
    split = 4 * masking.blocks
    blocks = [target(masking, draws[at : at + 4], rows, columns) for at in range(0, split, 4)]
    context = around(masking, draws[split : split + 3], rows, columns)
    total = rows * columns
    chance, other = draws[split + 3 : split + 3 + total], draws[split + 3 + total :]
    depth = [max(layers(block, *divmod(token, columns)) for block in blocks) for token in range(total)]
    targets = set(sorted(range(total), key=lambda token: (-depth[token], -chance[token]))[:predicted])
    outside = [layers(context, *divmod(token, columns)) < 0 for token in range(total)]
    rest = sorted(set(range(total)) - targets, key=lambda token: (outside[token], other[token]))
    return set(rest[:visible]), targets


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        ((8, 11), {}),
        ((8, 11), {"ratio": 0.3}),
        ((7, 7), {"blocks": 2, "scale": (0.3, 0.5), "aspect": (0.3, 3.0), "context": (0.5, 0.9), "ratio": 0.8}),
        ((1, 16), {}),
        ((3, 3), {}),
    ],
)
def test_it_is_that_of_loops(grid: tuple[int, int], options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    masking = MultiBlockMasking(**options)
    total, generator = grid[0] * grid[1], torch.Generator().manual_seed(0)
    draws = torch.rand(20, 4 * masking.blocks + 3 + 2 * total, generator=generator)
    monkeypatch.setattr("mae.masks.multi_block.uniform", lambda keys, count, stream: draws)
    plan = masking.plan(asked(grid, keys(20)))
    for sample in range(20):
        visible, predicted = by_loops(
            masking, draws[sample].tolist(), grid, plan.visible.shape[1], plan.predicted.shape[1]
        )
        assert set(plan.visible[sample].tolist()) == visible and set(plan.predicted[sample].tolist()) == predicted


def test_as_many_are_predicted_as_blocks_cover_on_average() -> None:
    """Two blocks of 2 x 3 on 4 x 5 patches: all pairs of places."""
    places = list(product(range(3), range(3)))
    covered = [
        len({(top + row, left + column) for top, left in pair for row in range(2) for column in range(3)})
        for pair in product(places, repeat=2)
    ]
    mean = sum(covered) / len(covered)
    masking = MultiBlockMasking(blocks=2, scale=(0.3, 0.3), aspect=(0.667, 0.667), ratio=0.7)
    assert masking.num_predicted(layout_of((4, 5))) == round(mean) == 10
    assert masking.num_predicted(layout_of((4, 5)), 0.3) == 6  # no more than are masked


def test_at_its_defaults_blocks_are_changed_little() -> None:
    masking, rng, covered = MultiBlockMasking(), random.Random(0), []
    assert masking.num_predicted(layout_of((14, 14))) == 97
    for _ in range(2000):
        blocks = [target(masking, [rng.random() for _ in range(4)], 14, 14) for _ in range(4)]
        covered.append(
            len(
                {
                    (row, column)
                    for top, left, height, width in blocks
                    for row in range(top, top + height)
                    for column in range(left, left + width)
                }
            )
        )
    assert abs(sum(covered) / 2000 - 97) < 5


def test_each_position_is_predicted_and_masked_as_often_as_by_loops_with_other_random_numbers() -> None:
    masking, grid, many, few = MultiBlockMasking(), (6, 7), 20_000, 3000
    plan = masking.plan(asked(grid, keys(many)))
    found = torch.stack(
        [plan.hidden.double().mean(dim=0), torch.zeros(many, 42).scatter_(1, plan.predicted, 1).mean(0)]
    )
    expected, rng = torch.zeros(2, 42, dtype=torch.float64), random.Random(0)
    for _ in range(few):
        draws = [rng.random() for _ in range(4 * 4 + 3 + 2 * 42)]
        visible, predicted = by_loops(masking, draws, grid, plan.visible.shape[1], plan.predicted.shape[1])
        expected[0, list(set(range(42)) - visible)] += 1 / few
        expected[1, list(predicted)] += 1 / few
    bound = 5 * (expected * (1 - expected) * (1 / many + 1 / few)).sqrt()
    assert ((found - expected).abs() < bound).all()


def test_the_rates_that_its_docstring_tells() -> None:
    plan = MultiBlockMasking().plan(asked((14, 14), keys(20_000)))
    rates = torch.zeros(20_000, 196).scatter_(1, plan.predicted, 1).mean(dim=0).reshape(14, 14)
    for place, rate in (((7, 7), 0.87), ((0, 7), 0.27), ((0, 0), 0.06)):
        assert abs(float(rates[place]) - rate) < 0.005 + 4 * (rate * (1 - rate) / 20_000) ** 0.5
    assert (rates - rates.flip(0)).abs().max() < 0.025 and (rates - rates.flip(1)).abs().max() < 0.025


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": (0.3, 0.2)}, r"mask_scale is 0.3 to 0.2; expected the smaller one first"),
        ({"aspect": (2.0, 1.0)}, r"mask_aspect is 2.0 to 1.0"),
        ({"context": (1.0, 0.5)}, r"mask_context is 1.0 to 0.5"),
        ({"scale": (0.0, 0.2)}, "mask_scale is"),
        ({"blocks": 0}, "mask_blocks is 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        MultiBlockMasking(**options)


def test_it_says_that_not_all_masked_patches_are_predicted() -> None:
    plan = MultiBlockMasking().plan(asked((14, 14), keys(2)))
    assert not MultiBlockMasking.predicts_all and plan.predicted.shape[1] < int(plan.hidden[0].sum())
