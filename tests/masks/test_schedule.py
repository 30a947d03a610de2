"""How much is hidden over a run."""

from collections import Counter

import pytest
from pieces import layout_of

from mae.errors import UsageError
from mae.masks.random import RandomMasking
from mae.masks.schedule import RatioSchedule

GRID = (14, 14)
STEPS_PER_EPOCH = 40


def ratios(steps: int = 400, **options) -> list[float]:
    schedule = RatioSchedule(**options)
    return [schedule.ratio(step, steps_per_epoch=STEPS_PER_EPOCH) for step in range(steps)]


def test_a_constant_schedule_is_the_ratio_itself():
    assert set(ratios(kind="const", start=0.3, end=0.9)) == {0.9}


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_curriculum_rises_from_one_ratio_to_the_other_and_stays(kind: str):
    found = ratios(kind=kind)
    assert found[0] == 0.5 and set(found[5 * STEPS_PER_EPOCH :]) == {0.75}
    assert found == sorted(found)
    assert 0.75 in found[: 5 * STEPS_PER_EPOCH] and found[2 * STEPS_PER_EPOCH + STEPS_PER_EPOCH // 2] == 0.625


def test_a_curriculum_may_go_down():
    found = ratios(kind="linear", start=0.9, end=0.5, warmup=10)
    assert found[0] == 0.9 and found == sorted(found, reverse=True)


def test_half_a_wave_is_flatter_at_its_ends_than_a_line():
    line, wave = Counter(ratios(200, kind="linear")), Counter(ratios(200, kind="cosine"))
    assert wave[0.5] > line[0.5] and wave[0.75] > line[0.75] and wave[0.625] < line[0.625]
    assert ratios(200, kind="cosine") != ratios(200, kind="linear")


@pytest.mark.parametrize("kind", ["linear", "cosine", "random"])
def test_there_are_few_lengths(kind: str):
    found = {RandomMasking().num_visible(layout_of(GRID), ratio) for ratio in ratios(kind=kind)}
    assert len(found) == 9
    assert len({RandomMasking().num_visible(layout_of(GRID), ratio) for ratio in ratios(kind=kind, start=0.74)}) <= 3


def test_chance_takes_each_ratio_as_often_and_only_by_seed_and_step():
    found = ratios(2700, kind="random", seed=3)
    counts = Counter(found)
    assert len(counts) == 9 and min(counts) == 0.5 and max(counts) == 0.75
    assert max(abs(count - 300) for count in counts.values()) < 82  # five deviations
    again = RatioSchedule(kind="random", seed=3)
    assert again.ratio(700, steps_per_epoch=STEPS_PER_EPOCH) == found[700]
    assert ratios(kind="random", seed=4) != found[:400]


def test_a_share_of_a_step_does_not_depend_on_the_batch_size():
    """Twice as many steps an epoch: the same ratio after the same number of images."""
    schedule = RatioSchedule(kind="linear")
    for step in range(0, 250, 10):
        assert schedule.ratio(step, steps_per_epoch=40) == schedule.ratio(2 * step, steps_per_epoch=80)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "lineer"}, "mask_schedule is 'lineer'"),
        ({"start": 0.0}, "mask_start is 0.0"),
        ({"end": 1.0}, "mask_ratio is 1.0"),
        ({"warmup": -1.0}, "mask_warmup is -1.0"),
        ({"warmup": float("inf")}, "mask_warmup is inf"),
    ],
)
def test_what_cannot_be_is_refused(options: dict, says: str):
    with pytest.raises(UsageError, match=says):
        RatioSchedule(**options)
