"""What a run would cost: the arithmetic by hand, the measuring by a clock that the test moves."""

import itertools
import multiprocessing
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mae.core.types import MaskRequest
from mae.data.dataset.images import ImageSet
from mae.data.loading.loader import TrainingLoader
from mae.layers.transformer import Blocks
from mae.masks.random import RandomMasking
from mae.models.build import build_model
from mae.pretraining.estimate import profile as measure
from mae.pretraining.estimate.profile import (
    StepCost,
    available_memory,
    cost_of,
    fitting_part_size,
    measure_loading,
    measure_steps,
    pace_of,
)
from mae.pretraining.resolve import RunContext, prepare_run
from mae.recipes import recipe_config
from mae.training.distributed import World

CPU = torch.device("cpu")
MB = 1 << 20


def prepared(**options: Any) -> RunContext:
    """The tiny run on the embedded digits, settled; options go over its own."""
    tiny = {
        "source": "builtin:digits", "model": "mae_vit_lesson_patch4", "img_size": 8, "patch_size": 2,
        "batch_size": 32, "steps": 400, "workers": 0, "held_out": 0.0, "device": "cpu",
    }  # fmt: skip
    config = recipe_config("default").override({**tiny, **options})
    return prepare_run(config, None, CPU, World(), resume=False)


def cost(part_size: int, seconds: float, peak_bytes: int) -> StepCost:
    return StepCost(part_size=part_size, seconds=seconds, peak_bytes=peak_bytes)


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    moved = Clock()
    monkeypatch.setattr(measure, "perf_counter", moved)
    return moved


@pytest.mark.parametrize(("available", "fits"), [(1000, 90), (110, 1), (109, 0), (50, 0)])
def test_what_fits_is_read_off_a_line(available: int, fits: int):
    costs = [cost(2, 1, 120), cost(8, 1, 180)]  # 100 bytes, and 10 an image
    assert fitting_part_size(costs, available) == fits
    assert fitting_part_size([costs[1], cost(4, 1, 999), costs[0]], available) == fits


def test_without_growth_all_memory_is_laid_to_the_images():
    assert fitting_part_size([cost(2, 1, 200), cost(8, 1, 160)], 1000) == 50
    assert fitting_part_size([cost(2, 1, 0), cost(8, 1, 0)], 1000) == 8000


def test_a_cost_is_measured_or_lies_on_the_line():
    costs = [cost(2, 0.5, 120), cost(4, 9.0, 90), cost(8, 1.1, 180)]
    assert cost_of(costs, 4) is costs[1]
    further, between, below = (cost_of(costs, size) for size in (32, 5, 1))
    assert (further.part_size, further.peak_bytes, further.seconds) == (32, 420, pytest.approx(3.5))
    assert (between.peak_bytes, between.seconds) == (150, pytest.approx(0.8))
    assert (below.peak_bytes, below.seconds) == (110, pytest.approx(0.4))


def test_a_cost_that_does_not_grow_is_a_share_of_the_largest():
    flat = [cost(2, 0.5, 100), cost(8, 0.4, 80)]
    further = cost_of(flat, 32)
    assert (further.seconds, further.peak_bytes) == (pytest.approx(1.6), 320)


def test_a_cost_below_the_measured_is_never_negative():
    assert cost_of([cost(2, 0.1, 10), cost(4, 1.0, 100)], 1) == cost(1, 0.05, 5)


@pytest.mark.parametrize(
    ("model", "loader", "workers", "expected"),
    [
        (100, 100, 0, (50, 0.5, "compute")),
        (100, 25, 0, (20, 0.8, "data")),
        (100, 400, 0, (80, 0.2, "compute")),
        (100, 50, 2, (50, 0.5, "data")),
        (100, 400, 2, (100, 0, "compute")),
    ],
)
def test_the_slower_of_model_and_loader_limits(
    model: float, loader: float, workers: int, expected: tuple[float, float, Any]
):
    pace = pace_of(model, loader, workers)
    assert (pace.images_per_second, pace.data_wait, pace.limit) == (
        pytest.approx(expected[0]), pytest.approx(expected[1]), expected[2]
    )  # fmt: skip


def test_steps_are_real_and_leave_no_trace():
    run = prepared()
    caller = build_model(run.method)
    weights = [weight.clone() for weight in caller.parameters()]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    costs = measure_steps(run, part_sizes=[4, 2], seconds=0.0)
    assert [found.part_size for found in costs] == [4, 2]
    assert all(found.seconds > 0 for found in costs)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(now, then) for now, then in zip(caller.parameters(), weights, strict=True))
    assert all(weight.grad is None for weight in caller.parameters())


def test_a_step_trains_the_model(monkeypatch: pytest.MonkeyPatch):
    made = []

    def build(config: Any, **options: Any) -> Any:
        made.append((model := build_model(config, **options), [weight.clone() for weight in model.parameters()]))
        return model

    monkeypatch.setattr(measure, "build_model", build)
    # The optimizer is made with a rate of 0, which the engine would set: only then do weights stay as they were.
    real = measure.make_optimizer

    def optimizer(model: Any, **options: Any) -> Any:
        made_one = real(model, **options)
        for group in made_one.param_groups:
            group["lr"] = 1e-3
        return made_one

    monkeypatch.setattr(measure, "make_optimizer", optimizer)
    measure_steps(prepared(), part_sizes=[2], seconds=0.0)
    ((model, before),) = made
    changed = [not torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True)]
    assert sum(changed) > len(changed) / 3


def test_time_is_the_median_without_the_warm_up(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    lasts = iter([50, 50, 1, 2, 1, 6, 9])

    def run(step: object, ratio: float) -> None:
        clock.now += next(lasts)

    monkeypatch.setattr(measure.TrialStep, "run", run)
    (found,) = measure_steps(prepared(), part_sizes=[2], seconds=110.0)
    assert found.seconds == 1.5  # of 1, 2, 1 and 6, which end at 110


@pytest.mark.digits
def test_the_warm_up_hides_the_least_and_the_rest_the_mean(monkeypatch: pytest.MonkeyPatch):
    ratios, real = [], RandomMasking.plan

    def plan(masking: RandomMasking, request: MaskRequest) -> Any:
        ratios.append((request.ratio, len(request.keys)))
        return real(masking, request)

    monkeypatch.setattr(RandomMasking, "plan", plan)
    run = prepared(mask_schedule="linear", mask_start=0.5, mask_ratio=0.75, mask_warmup=400 / 44)
    measure_steps(run, part_sizes=[4, 66], seconds=0.0)  # the second is more than the crops that are loaded
    assert [count for _, count in ratios] == [4] * 3 + [66] * 3
    lowest, again, mean = [ratio for ratio, _ in ratios[:3]]
    assert lowest == again == 0.5
    assert mean == pytest.approx(0.625, abs=0.01)
    ratios.clear()
    (cost,) = measure_steps(prepared(), part_sizes=[4], seconds=0.0)  # a constant share: the second step is timed
    assert len(ratios) == 2 and cost.seconds > 0


def test_steps_are_in_the_precision_of_the_run(monkeypatch: pytest.MonkeyPatch):
    asked, real = [], measure.autocast

    def autocast(precision: str, device: torch.device) -> Any:
        asked.append(precision)
        return real(precision, device)

    monkeypatch.setattr(measure, "autocast", autocast)
    measure_steps(prepared(precision="bf16"), part_sizes=[2], seconds=0.0)
    assert asked == ["bf16"] * 2


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_blocks_are_computed_again_where_the_run_does(monkeypatch: pytest.MonkeyPatch, activation_checkpointing: bool):
    seen: list[bool] = []
    through = Blocks.through

    def noted(self: Blocks, *args: Any) -> Any:
        seen.append(self.activation_checkpointing)
        return through(self, *args)

    monkeypatch.setattr(Blocks, "through", noted)
    measure_steps(
        prepared(activation_checkpointing=activation_checkpointing, decoder="cross"), part_sizes=[2], seconds=0.0
    )
    assert seen and set(seen) == {activation_checkpointing}


def test_memory_that_is_taken_shows():
    with measure.PeakMemory(CPU) as memory:
        held = torch.ones(96 * MB // 4)
        del held
        measure.give_back(CPU)
        time.sleep(0.05)  # it is looked at again, when nothing is held any more
    assert 90 * MB < memory.peak_bytes < 125 * MB


def test_a_step_takes_weights_averages_and_activations_and_gives_them_back():
    run = prepared(img_size=32, patch_size=4)
    num_bytes = 4 * sum(weight.numel() for weight in build_model(run.method).parameters())
    before = psutil.Process().memory_info().rss
    small, large = measure_steps(run, part_sizes=[2, 64], seconds=0.0)
    assert small.peak_bytes > 0.8 * 4 * num_bytes  # with gradients and AdamW's two averages
    # At least what each block keeps of its MLP for the backward, twice the hidden width of the visible tokens.
    kept = 64 * 4 * (17 * 2 * 1024) * 4
    assert large.peak_bytes > small.peak_bytes + kept
    assert psutil.Process().memory_info().rss - before < large.peak_bytes / 2


@pytest.fixture
def slow(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that take a hundredth of a second each, by the test's clock."""
    real = ImageSet.get

    def get(images: ImageSet, index: int) -> Any:
        clock.now += 0.01
        return real(images, index)

    monkeypatch.setattr(ImageSet, "get", get)


def test_only_images_that_are_trained_on_are_read(monkeypatch: pytest.MonkeyPatch):
    run, read, real = prepared(held_out=0.5), set(), ImageSet.get

    def get(images: ImageSet, index: int) -> Any:
        read.add(index)
        return real(images, index)

    monkeypatch.setattr(ImageSet, "get", get)
    measure_steps(run, part_sizes=[64], seconds=0.0)
    measure_loading(run, seconds=0.0)
    assert len(read) >= 64 and read <= set(run.trained.tolist())


@pytest.mark.digits
@pytest.mark.parametrize("batch_size", [8, 32, 1024])
def test_loading_is_counted_in_images(batch_size: int, slow: None):
    assert measure_loading(prepared(batch_size=batch_size), seconds=4.0) == pytest.approx(100)


def test_the_start_of_loading_is_not_counted(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    lasts = [0.5, 0, 0, 0, 0]  # and 1 from there on: what lay ready comes at once

    def iterate(loader: Any, start_step: int) -> Any:
        for number in itertools.count():
            clock.now += lasts[number] if number < len(lasts) else 1
            yield type("Raw", (), {"images": torch.zeros(32, 1)})()

    monkeypatch.setattr(TrainingLoader, "iterate", iterate)
    assert measure_loading(prepared(), seconds=4.0) == pytest.approx(32)


def test_loading_ends_its_processes():
    assert measure_loading(prepared(workers=1), seconds=0.0) > 0
    assert multiprocessing.active_children() == []


def test_the_memory_there_is():
    assert 0 < available_memory(CPU) <= psutil.virtual_memory().total


def test_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = prepared()
    measure_steps(run, part_sizes=[2], seconds=0.0)
    measure_loading(run, seconds=0.0)
    assert list(tmp_path.iterdir()) == []
