"""A plan's arithmetic on costs that are given, its refusals, and the command that carries it out."""

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from light import little_measuring
from test_measure import CPU, prepared

from mae.cli.pretrain import parse
from mae.config import RunConfig
from mae.contention import num_cores
from mae.data.dataset.images import ImageSet
from mae.errors import UsageError
from mae.pretraining.estimate import estimate as planning
from mae.pretraining.estimate.estimate import (
    Plan,
    command_of,
    fitting_accumulate,
    make_plan,
    plan_pretraining,
)
from mae.pretraining.estimate.profile import StepCost
from mae.pretraining.resolve import RunContext, resolve_config, source_stem
from mae.recipes import recipe_config
from mae.training.distributed import World


class Machine:
    """What is measured: a step takes 0.1 s and 0.01 s an image, 1000 bytes and 100 an image."""

    def __init__(self) -> None:
        self.loader_rate = 400.0
        self.available = 1_000_000
        self.taken = 0.0
        self.asked: list[int] = []

    def measure_steps(self, run: RunContext, *, part_sizes: Sequence[int], seconds: float) -> list[StepCost]:
        self.asked += part_sizes
        kept = 10 if run.config.machine.activation_checkpointing else 100
        return [StepCost(part_size=n, seconds=0.1 + 0.01 * n, peak_bytes=1000 + kept * n) for n in part_sizes]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(planning, "is_worth_trying", lambda device, seconds: False)  # which takes real steps
    monkeypatch.setattr(planning, "measure_steps", made.measure_steps)
    monkeypatch.setattr(planning, "measure_loading", lambda run, seconds: made.loader_rate)
    monkeypatch.setattr(planning, "available_memory", lambda device: made.available)
    monkeypatch.setattr(planning.Contention, "look", lambda self: made.taken)
    return made


def test_other_processes_on_the_cores_are_told(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning.torch, "get_num_threads", lambda: num_cores())
    assert not any("other processes" in line for line in make_plan(prepared(batch_size=40), hours=None).advice)
    machine.taken = 1.2
    (told,) = [line for line in make_plan(prepared(batch_size=40), hours=None).advice if "other processes" in line]
    assert told.startswith("other processes take 1.2 of the ")


@pytest.mark.digits
def test_every_number_by_hand(machine: Machine):
    plan = make_plan(prepared(batch_size=40, steps=700), hours=None)
    assert (plan.images, plan.held_out, plan.steps_per_epoch, plan.steps) == (1438, 0, 35, 700)
    assert plan.epochs == 20
    assert plan.model_rate == pytest.approx(80)  # 40 images in 0.1 + 0.4 s
    assert (plan.loader_rate, plan.workers, plan.pace.limit) == (400, 0, "compute")
    assert plan.pace.images_per_second == pytest.approx(1 / (1 / 80 + 1 / 400))
    assert plan.epoch_seconds == pytest.approx(1400 * (1 / 80 + 1 / 400))
    assert plan.run_seconds == pytest.approx(20 * plan.epoch_seconds)
    assert (plan.peak_bytes, plan.available_bytes) == (5000, 1_000_000)
    assert plan.largest_part == 8990  # nine tenths of the memory, 1000 taken off
    assert (plan.part_size, plan.config.optim.batch_size, plan.config.machine.accumulate) == (40, 40, 1)
    assert machine.asked == [2, 4, 40]


def test_the_batch_stays_and_is_divided_where_it_does_not_fit(machine: Machine):
    machine.available = 4000  # 3600 of it: 26 images
    plan = make_plan(prepared(batch_size=40), hours=None)
    assert (plan.largest_part, plan.part_size) == (26, 20)
    assert (plan.config.optim.batch_size, plan.config.machine.accumulate) == (40, 2)
    assert plan.peak_bytes == 3000 and "--accumulate 2" in plan.command
    assert any("--accumulate 2" in text for text in plan.advice)
    assert max(machine.asked) == 26  # no more than fits is tried


def test_blocks_are_computed_again_where_not_one_image_fits_otherwise(machine: Machine):
    machine.available = 1200  # 1080 of it: 0 images, or 8
    plan = make_plan(prepared(batch_size=40), hours=None)
    assert plan.config.machine.activation_checkpointing and "--activation-checkpointing" in plan.command
    assert plan.advice[0].startswith("--activation-checkpointing")
    assert (plan.largest_part, plan.config.machine.accumulate, plan.peak_bytes) == (8, 5, 1080)
    machine.available = 1300
    plan = make_plan(prepared(batch_size=40), hours=None)
    assert not plan.config.machine.activation_checkpointing  # one fits: micro-batches cost less
    machine.available = 1100  # 990
    with pytest.raises(UsageError, match="smaller --model"):
        make_plan(prepared(batch_size=40), hours=None)


@pytest.mark.digits
def test_what_takes_long_is_not_tried_in_full(machine: Machine):
    make_plan(prepared(batch_size=1438 // 2), hours=None)  # a step of these would take 7.3 s
    assert machine.asked == [2, 4, 719 // 2]


@pytest.mark.parametrize(
    ("options", "size", "largest", "expected"),
    [
        ({"batch_size": 64}, 1, 64, 1),
        ({"batch_size": 64}, 1, 63, 2),
        ({"batch_size": 64, "accumulate": 4}, 1, 64, 4),
        ({"batch_size": 30, "accumulate": 4}, 1, 64, 5),
        ({"batch_size": 7}, 1, 6, 7),
        ({"batch_size": 64}, 2, 16, 2),
    ],
)
def test_the_fewest_equal_parts_that_fit(options: dict[str, Any], size: int, largest: int, expected: int):
    assert fitting_accumulate(RunConfig.of(**options), World(size=size), largest) == expected


def test_no_memory_for_one_image_is_refused():
    with pytest.raises(UsageError, match="--batch-size 64 cannot be divided .* 0 image.*smaller --model"):
        fitting_accumulate(RunConfig.of(batch_size=64), World(), 0)


@pytest.mark.digits
def test_hours_choose_whole_epochs(machine: Machine):
    run = prepared(batch_size=40)
    epoch = make_plan(run, hours=None).epoch_seconds
    plan = make_plan(run, hours=12.9 * epoch / 3600)
    assert (plan.config.optim.epochs, plan.config.optim.steps, plan.steps) == (12, None, 420)
    assert plan.hours == 12.9 * epoch / 3600
    assert plan.run_seconds == pytest.approx(12 * epoch)
    assert "--epochs 12" in plan.command and "--steps" not in plan.command


@pytest.mark.digits
def test_nonsense_is_refused_before_and_after_measuring(machine: Machine):
    with pytest.raises(UsageError, match="100 steps; expected 300"):
        make_plan(prepared(steps=100), hours=None)
    assert machine.asked == []
    run = prepared(batch_size=40)
    for hours, epochs in ((21.1 / 3600, 1), (0.001, 0)):  # an epoch takes 21 s
        with pytest.raises(UsageError, match=rf"in which {epochs} epoch.* takes --hours 0.053 or more \(9 epochs\)"):
            make_plan(run, hours=hours)
    make_plan(run, hours=0.053)
    with pytest.raises(UsageError, match="warm-up .* is 30 epochs, but the whole run has 12"):
        make_plan(prepared(batch_size=40, warmup_epochs=30.0, steps=4000), hours=12.5 * 21 / 3600)


@pytest.mark.parametrize("hours", [0.0, -1.0, float("inf"), float("nan")])
def test_hours_that_are_none_are_refused(hours: float):
    with pytest.raises(UsageError, match="--hours is"):
        plan_pretraining(RunConfig.of(source="builtin:digits"), hours=hours)


def test_a_source_is_needed_and_a_new_folder(tmp_path: Path):
    with pytest.raises(UsageError, match="no images are named"):
        plan_pretraining(RunConfig.of(), hours=None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="holds another run"):
        plan_pretraining(RunConfig.of(source="builtin:digits", out=tmp_path), hours=None)


def test_a_slow_source_limits(monkeypatch: pytest.MonkeyPatch, machine: Machine):
    monkeypatch.undo()  # everything is measured here
    little_measuring(monkeypatch)
    real = ImageSet.get

    def get(images: ImageSet, index: int) -> Any:
        time.sleep(0.1)
        return real(images, index)

    run = prepared(batch_size=4)
    monkeypatch.setattr(ImageSet, "get", get)
    monkeypatch.setattr("mae.pretraining.estimate.profile._CROPS", 4)
    plan = make_plan(run, hours=None)
    assert plan.pace.limit == "data" and plan.pace.data_wait > 0.5
    assert any("waits for images" in text for text in plan.advice)


COMMANDS: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("default", {"steps": None, "epochs": 300.0, "norm_pix_loss": False, "cls_token": False, "betas": (0.9, 0.99)}),
    ("default", {"base_lr": 4e-3, "clip_grad": None, "precision": "bf16", "seed": 3, "decoder_depth": 4}),
    ("default", {"img_size": (16, 8), "patch_size": (4, 2), "mlp_ratio": 2.0, "pos_embed": "learned", "compile": "on"}),
    ("improved", {"laplacian": 0.2, "mask_warmup": 2.5, "workers": 2, "monitor": "builtin:digits"}),
    ("demo", {"lr": 0.00123456789, "warmup_epochs": 1.0, "out": "my runs/a"}),
    ("cifar10", {"steps": None, "epochs": 120.5, "data_root": "some where"}),
]


def carried_out(plan: Plan, run: RunContext) -> RunConfig:
    """The settled configuration of the command that a plan shows."""
    program, command, *args = shlex.split(plan.command)
    assert (program, command) == ("mae", "pretrain")
    config, _, resume, _ = parse(args)
    assert not resume
    return resolve_config(config, run.images, run.device, run.world)


@pytest.mark.parametrize("hours", [None, 0.2])
@pytest.mark.parametrize(("recipe", "options"), COMMANDS)
def test_the_command_means_the_plan(recipe: str, options: dict[str, Any], hours: float | None, machine: Machine):
    base = {"model": "mae_vit_lesson_patch4", "img_size": (8, 8), "patch_size": (2, 2), "steps": 900, "batch_size": 30}
    config = recipe_config(recipe).override({"source": "builtin:digits", **base, **options, "recipe": recipe})
    images, world = prepared().images, World()
    run = replace(prepared(), config=resolve_config(config, images, CPU, world), images=images)
    machine.available = 3000
    plan = make_plan(run, hours=hours)
    assert plan.config.machine.accumulate == 2
    assert carried_out(plan, run) == plan.config


def test_the_command_is_short(machine: Machine):
    plan = make_plan(prepared(workers=None, held_out=0.02, steps=None, device="auto"), hours=None)
    assert plan.command == (
        "mae pretrain builtin:digits --model mae_vit_lesson_patch4 --img-size 8x8 --patch-size 2x2 --epochs 100 "
        "--batch-size 32"
    )


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, ""), ({"epochs": 40.0}, " --epochs 40"), ({"base_lr": 0.01}, " --base-lr 0.01")],
)
def test_the_command_of_a_recipe_names_what_differs(options: dict[str, Any], more: str):
    run = prepared()
    config = recipe_config("demo").override({"source": "builtin:digits", **options})
    resolved = resolve_config(config, run.images, CPU, World())
    assert command_of(resolved, run.images, CPU, World()) == f"mae pretrain builtin:digits --recipe demo{more}"


def test_odd_names_are_quoted(photos: Path, tmp_path: Path):
    odd = photos.rename(tmp_path / "my 'photos' $HOME")
    run = prepared()
    config = recipe_config("default").override({"source": str(odd), "steps": 300, "batch_size": 4})
    resolved = resolve_config(config, run.images, CPU, World())
    assert parse(shlex.split(command_of(resolved, run.images, CPU, World()))[2:])[0].source == str(odd)


def test_planning_leaves_no_trace(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    config = recipe_config("default").override(
        {"source": "builtin:digits", "model": "mae_vit_lesson_patch4", "device": "cpu"}
    )
    _, plan = plan_pretraining(config, hours=None)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(tmp_path.iterdir()) == []
    told = plan.to_json()
    assert told["config"]["model"] == "mae_vit_lesson_patch4" and told["command"] == plan.command
    assert told["pace"]["limit"] == "compute"


def test_a_folder_named_after_its_source_can_be_made_and_typed():
    found = [source_stem(source) for source in ("a/" + "x" * 250, "b/" + "\u00fc" * 120, "c/one\ntwo\x1b", "{a,b}.tar")]
    assert found == ["x" * 100, "\u00fc" * 50, "one-two-", "a,b"]


@pytest.mark.digits
def test_the_plans_command_takes_the_plans_advice(machine: Machine):
    """A run of no given length gets as many epochs as are advised; one that was told its length keeps it."""
    config = recipe_config("default").override({"source": "builtin:digits", "device": "cpu"})
    _, plan = plan_pretraining(config, hours=None)
    assert plan.epochs > 100 and f"--epochs {plan.epochs:.0f}" in plan.command
    assert "epochs are taken here" in plan.advice[0] and not any("epochs are few" in line for line in plan.advice)
    _, plan = plan_pretraining(config.override({"epochs": 100.0}), hours=None, given={"epochs"})
    assert plan.epochs == 100 and any("epochs are few" in line for line in plan.advice)
