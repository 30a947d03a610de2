"""Signs that a run goes wrong: each is seen where it is planted, and nothing is seen in a run that is well."""

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from toy import Recorder

from mae.training.resilience.health import (
    Collapse,
    DataWait,
    Divergence,
    FewCodes,
    GradientGrowth,
    Health,
    LossSpike,
    NoBetterThanMean,
    Overfitting,
    SharedCores,
    Sign,
)

WORDS = {"mean": "the mean colour", "advice": "look at the pictures"}
NOISE = torch.randn(400, generator=torch.Generator().manual_seed(0)).tolist()


def row(step: int, *, loss: float = 0.5, grad_norm: float | None = 1.0, data_wait: float = 0.02) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 64 * step,
        "loss": loss,
        "terms": {"reconstruction": loss},
        "grad_norm": grad_norm,
        "data_wait": data_wait,
    }


def look(step: int, **numbers: float) -> dict[str, Any]:
    return {"step": step, "samples": 64 * step, "evaluation": numbers}


def well() -> list[dict[str, Any]]:
    """A run as it should be: the loss falls under noise, the gradient shrinks, the features spread out."""
    rows = [
        row(
            10 * number,
            loss=0.5 + 0.5 * math.exp(-number / 50) + 0.02 * NOISE[number],
            grad_norm=0.3 + math.exp(-number / 20) + 0.05 * abs(NOISE[-number]),
        )
        for number in range(1, 300)
    ]
    for number in range(9):
        held = 1 - 0.05 * number
        numbers = {"held_out": held, "held_out_train": held - 0.01 * number, "effective_rank": 5.0 + 8 * number}
        rows.append(look(330 * number, **numbers))
    return sorted(rows, key=lambda row: row["step"])


def signs() -> list[Sign]:
    return [
        LossSpike(),
        GradientGrowth(after=6400),
        DataWait(lambda: "decoding"),
        NoBetterThanMean(baseline=1.0, after=6400, **WORDS),
        Overfitting(),
        Collapse(),
        FewCodes(),
        Divergence(baseline=1.0),
    ]


def seen(rows: Iterable[dict[str, Any]], *signs: Sign) -> list[tuple[int, str, str]]:
    recorder = Recorder()
    health = Health(signs, [recorder])
    for each in rows:
        health.log(each)
    return [(row["step"], row["warning"]["name"], row["warning"]["text"]) for row in recorder.rows]


def test_nothing_is_seen_in_a_run_that_is_well() -> None:
    assert seen(well(), *signs()) == []


def test_a_warning_is_a_row_for_the_other_observers() -> None:
    recorder = Recorder()
    health = Health([NoBetterThanMean(baseline=0.5, after=0, **WORDS)], [recorder])
    for step in range(1, 6):
        health.log(row(step))
    (found,) = recorder.rows
    assert found.keys() == {"step", "samples", "warning"} and (found["step"], found["samples"]) == (5, 320)


@pytest.mark.parametrize("where", [15, 200])
def test_a_jump_of_the_loss_is_told_once(where: int) -> None:
    rows = [each for each in well() if "loss" in each]
    for number in range(where, where + 3):
        rows[number]["loss"] = 3.0
    assert [(step, name) for step, name, _ in seen(rows, *signs())] == [(10 * where + 10, "loss spike")]


def test_a_loss_that_stands_still_and_moves_a_little_has_not_jumped() -> None:
    rows = [row(step, loss=0.5 if step < 30 else 0.6) for step in range(1, 40)]
    assert seen(rows, LossSpike()) == []


@pytest.mark.parametrize(
    ("taken", "threads", "told"), [(1.0, 2, True), (0.4, 2, False), (1.0, 1, False), (1.3, 1, True)]
)
def test_other_processes_on_the_cores_are_told_once(
    monkeypatch: pytest.MonkeyPatch, taken: float, threads: int, told: bool
) -> None:
    now = 0.0
    monkeypatch.setattr("mae.training.resilience.health.monotonic", lambda: now)
    sign = SharedCores(lambda: taken, threads=threads, cores=2)
    found = []
    for step in range(1, 9):
        now += 4.0  # seconds: too short a time by itself
        found += seen([row(step)], sign)
    assert [step for step, _, _ in found] == ([3] if told else [])
    assert all(f"other processes take {taken:.1f} of the 2 cores" in text for _, _, text in found)


def test_a_gradient_that_grows_is_told_and_told_again_when_it_grows_as_much_again() -> None:
    rows = [row(step, grad_norm=0.5 * (1.0 if step < 150 else 1.1 ** (step - 150))) for step in range(1, 210)]
    found = seen(rows, GradientGrowth(after=6400))
    assert [step for step, _, _ in found] == [177, 202] and "11 times" in found[0][2]
    assert seen([row(step, grad_norm=100 / step) for step in range(1, 200)], GradientGrowth(after=0)) == []
    high_while_warming_up = [row(step, grad_norm=0.01 if step <= 100 else 1.0) for step in range(1, 200)]
    assert seen(high_while_warming_up, GradientGrowth(after=6400)) == []


def test_a_gradient_of_zero_is_no_beginning_of_growth() -> None:
    """As where batches hold no data: no multiple of it can be told."""
    rows = [row(step, grad_norm=0.0 if step < 10 else 1.0) for step in range(1, 30)]
    assert seen(rows, GradientGrowth(after=0)) == []


def test_a_gradient_that_is_not_told_is_passed_over() -> None:
    assert seen([row(step, grad_norm=None) for step in range(1, 50)], GradientGrowth(after=0)) == []


@pytest.mark.parametrize(("wait", "told"), [(0.14, 0), (0.16, 1)])
def test_waiting_for_images_is_told_once_with_its_reason(wait: float, told: int) -> None:
    rows = [row(10 * number, data_wait=wait) for number in range(1, 100)]
    found = seen(rows, DataWait(lambda: "decoding takes longest"))
    assert len(found) == told
    if told:
        assert found[0][0] == 210 and "16%" in found[0][2] and "decoding takes longest" in found[0][2]


def test_a_short_wait_is_none() -> None:
    """The first batches are always waited for."""
    rows = [row(10 * number, data_wait=0.9 if number < 4 else 0.0) for number in range(1, 100)]
    assert seen(rows, DataWait(lambda: "")) == []


@pytest.mark.parametrize(("loss", "steps"), [(0.94, []), (0.96, [50, 100])])
def test_a_model_that_learned_nothing_is_told_so(loss: float, steps: list[int]) -> None:
    rows = [row(step, loss=loss) for step in range(1, 300)]
    found = seen(rows, NoBetterThanMean(baseline=1.0, after=50 * 64, **WORDS))
    assert [step for step, _, _ in found] == steps
    assert all(
        "predicting the mean colour alone" in text and text.endswith("; look at the pictures") for _, _, text in found
    )


def test_overfitting_is_named_when_it_began() -> None:
    held_out = [1.0, 0.8, 0.7, 0.72, 0.75, 0.8, 0.9]
    rows = [
        look(100 * number, held_out=value, held_out_train=1.0 - 0.1 * number) for number, value in enumerate(held_out)
    ]
    ((step, _, text),) = seen(rows, Overfitting())
    assert step == 400 and "since step 200" in text and "0.7000 to 0.7500" in text


@pytest.mark.parametrize("trained", [0.9, 0.8])
def test_a_loss_that_rises_everywhere_is_no_overfitting(trained: float) -> None:
    rows = [look(100 * n, held_out=0.7 + 0.05 * n, held_out_train=0.8 + (trained - 0.8) * n) for n in range(6)]
    assert seen(rows, Overfitting()) == []


def test_one_look_that_is_worse_is_no_overfitting() -> None:
    rows = [look(100 * n, held_out=value, held_out_train=1 - 0.1 * n) for n, value in enumerate([0.9, 0.7, 0.75, 0.69])]
    assert seen(rows, Overfitting()) == []


def test_features_that_lose_their_dimensions() -> None:
    ranks = [200.0, 20.0, 40.0, 30.0, 19.0, 18.0, 9.0]
    found = seen([look(100 * n, effective_rank=rank) for n, rank in enumerate(ranks)], Collapse())
    assert [step for step, _, _ in found] == [400, 600] and "19.0 from 40.0" in found[0][2]


def test_a_run_that_goes_on_remembers_what_was_before() -> None:
    rows = [look(100 * number, effective_rank=rank) for number, rank in enumerate([5.0, 40.0, 15.0])]
    recorder = Recorder()
    health = Health([Collapse()], [recorder])
    health.remember(rows[:2])
    assert recorder.rows == []
    health.log(rows[2])
    assert len(recorder.rows) == 1


def test_a_loss_far_above_that_of_predicting_nothing_is_told_at_once() -> None:
    """As with a rate a thousand times too high: it never falls, so it never jumps either."""
    rows = [row(10 * number, loss=2.1 if number == 1 else 27.0 + NOISE[number]) for number in range(1, 40)]
    told = seen(rows, *signs())
    assert [(step, name) for step, name, _ in told][0] == (40, "diverging")
    assert [name for _, name, _ in told].count("diverging") == 1
    assert "predicting 0 everywhere gives 1: the rate is far too high" in told[0][2]


def test_fresh_weights_and_one_bad_row_diverge_not() -> None:
    losses = [2.4, 2.1, 1.4, 1.0, 9.0, 9.0, 0.9, 9.0, 0.8]
    assert seen([row(10 * number, loss=loss) for number, loss in enumerate(losses)], Divergence(baseline=1.0)) == []


def test_fresh_weights_far_above_flat_images_diverge_not() -> None:
    """As on blobs before black: standardised patches are mostly 0, and predicting 0 is hard to beat at first."""
    losses = [0.95, 0.86, 0.7, 0.6, 0.45, 0.3, 0.12]
    assert seen([row(10 * number, loss=loss) for number, loss in enumerate(losses)], Divergence(baseline=0.1)) == []


def test_features_of_one_dimension_are_told_though_they_never_had_more() -> None:
    ranks = [29.3, 1.02, 1.0, 1.0, 8.0, 1.05]
    told = seen([look(100 * number, effective_rank=rank) for number, rank in enumerate(ranks)], Collapse())
    assert [step for step, _, _ in told] == [100, 500]
    assert "is 1.02: all images look alike" in told[0][2]


def test_features_that_stay_alike_are_told_once_and_not_before_the_first_step() -> None:
    alike = {"effective_rank": 4.238, "feature_std": 0.08954, "mean_cosine": 0.9905}
    found = seen([look(100 * number, **alike) for number in range(4)], Collapse())
    assert [step for step, _, _ in found] == [100] and "mean cosine 0.991" in found[0][2]
    spread = [{**alike, "mean_cosine": 0.9}, {**alike, "effective_rank": 40.0}]
    assert all(seen([look(100, **numbers)], Collapse()) == [] for numbers in spread)


def test_a_codebook_of_hardly_any_code_is_told_once_until_it_recovers():
    used = [1.0, 1.2, 1.1, 1.8, 1.3]  # before the first step nothing was seen yet; 1.8: two codes, of 70 and 30 %
    found = seen([look(100 * number, codes_used=codes) for number, codes in enumerate(used)], FewCodes())
    assert [step for step, _, _ in found] == [100, 400]
    assert "as if it had 1.20 codes" in found[0][2] and "1.30 codes" in found[1][2]


def test_either_codebook_of_a_run_is_watched():
    found = seen([look(100, codes_used=30.0, code_prediction_codes_used=1.2)], FewCodes())
    assert [step for step, _, _ in found] == [100]
