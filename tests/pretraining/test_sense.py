"""Runs that make no sense are refused with the reason; runs that make little are advised of."""

from typing import Any

import pytest

from mae.config import RunConfig
from mae.errors import UsageError
from mae.models.presets import model_config
from mae.pretraining.derived import advised_batch
from mae.pretraining.sanity import (
    LARGEST_WARMUP,
    LEAST_REACH,
    LEAST_STEPS,
    _reach,
    advise,
    advised_epochs,
    advised_model,
    check_schedule,
    num_parameters,
)
from mae.recipes import recipe_config
from mae.recipes.demo import demo
from mae.training.schedule import WarmupCosine


def config(recipe: str = "mae", **options: Any) -> RunConfig:
    default: dict[str, Any] = {"held_out": 0.0}
    if recipe == "mae" and "steps" not in options:
        default |= {"batch_size": 64, "epochs": 100.0}
    return recipe_config(recipe).override({**default, **options})


@pytest.mark.parametrize(
    ("run", "num_images", "says"),
    [
        (
            config(batch_size=400, held_out=0.2),
            900,
            "720 images in batches of 400 are one step an epoch.*--batch-size 18",
        ),
        (config(batch_size=500), 900, "900 images in batches of 500 are one step an epoch.*--batch-size 18"),
        (config(batch_size=1), 1, "1 images in batches of 1 are one step.*; give more images if there are any"),
        (config(epochs=40.0), 500, "500 images .* for 40 epochs are 280 steps; .*--epochs 43 or more"),
        (config(batch_size=64, steps=299), 5000, "are 299 steps; .*--steps 300 or more"),
        (
            config(warmup_epochs=51.0),
            6400,
            r"\(--warmup-epochs 51\) takes 51% of the run's 10,000.*--warmup-epochs 10,",
        ),
        (
            config("imagenet_base", epochs=40, warmup_epochs=4, batch_size=16),
            500,
            "a rate of 9.3.e-06 over 1,240 steps sums to 0.0058; .*--lr 1e-3",
        ),
    ],
)
def test_nonsense_is_refused_with_what_to_do(run: RunConfig, num_images: int, says: str):
    with pytest.raises(UsageError, match=says):
        check_schedule(run, num_images)


@pytest.mark.parametrize("num_images", [*range(2, 10), 49, 99, 100, 500, 100_000])
@pytest.mark.parametrize("held_out", [0.0, 0.02, 0.5])
@pytest.mark.parametrize("views", [1, 5])
def test_the_batch_that_is_advised_is_not_refused(num_images: int, held_out: float, views: int):
    run = config(batch_size=64 * views, epochs=10_000.0, held_out=held_out, repeated_aug=views)
    advised = advised_batch(run, num_images)
    assert advised % views == 0
    check_schedule(run.override({"batch_size": advised}), num_images)


@pytest.mark.parametrize(
    ("run", "num_images"),
    [
        (config(batch_size=450, epochs=150.0), 900),
        (config(batch_size=64, steps=LEAST_STEPS), 5000),
        (config(warmup_epochs=100 * LARGEST_WARMUP), 6400),
        (config(steps=LEAST_STEPS, batch_size=64, lr=1.01 * 2 * LEAST_REACH / LEAST_STEPS), 5000),
        (demo(), 2048),
        (config("cifar10"), 50_000),
        (config("stl10"), 100_000),
        (config("imagenet_base"), 1_281_167),
        (config("improved", batch_size=64, epochs=100.0, held_out=0.02), 2048),
    ],
)
def test_what_just_makes_sense_and_every_recipe_pass(run: RunConfig, num_images: int):
    check_schedule(run, num_images)


@pytest.mark.parametrize(
    "options", [{}, {"warmup_epochs": 7.0}, {"min_lr": 2e-4, "warmup_epochs": 0.0}, {"base_lr": 1e-3, "epochs": 31.0}]
)
def test_the_reach_is_the_sum_of_the_schedule(options: dict[str, Any]):
    run, num_images = config(**options), 6400
    steps = round((run.optim.epochs or 0) * 100)
    peak = run.optim.lr if run.optim.lr is not None else 1e-3 * 64 / 256
    warmup = 0.1 * steps if run.optim.warmup_epochs is None else 100 * run.optim.warmup_epochs
    schedule = WarmupCosine(peak=peak, floor=run.optim.min_lr, warmup_samples=warmup * 64, total_samples=steps * 64)
    assert _reach(run, num_images) == pytest.approx(sum(schedule(64 * step) for step in range(steps)), rel=2e-3)


def test_the_reach_that_is_named_for_the_demo():
    assert _reach(demo(), 2048) == pytest.approx(1.1, abs=0.05)


@pytest.mark.parametrize(
    ("num_images", "name"),
    [
        (9_999, "mae_vit_compact_patch16"),
        (10_000, "mae_vit_small_patch16"),
        (100_000, "mae_vit_small12_patch16"),
        (1_281_167, "mae_vit_base_patch16_dec512d8b"),
    ],
)
def test_models_grow_with_the_number_of_images(num_images: int, name: str):
    assert advised_model(num_images) == name


@pytest.mark.parametrize(("an_epoch", "epochs"), [(7, 1600), (62, 323), (195, 103), (312, 100)])
def test_epochs_are_advised_for_enough_steps(an_epoch: int, epochs: int):
    assert advised_epochs(an_epoch) == epochs


GOOD = {"model": "mae_vit_small12_patch16", "epochs": 100.0, "batch_size": 256}


def advice(num_images: int, *, decoder_depth: int = 8, given: tuple[str, ...] | None = None, **options: Any) -> str:
    run = config(**{**GOOD, **options})
    assert run.model is not None
    model = model_config(run.model, decoder_depth=decoder_depth)
    said = (*GOOD, *options, "decoder_depth") if given is None else given
    return "\n".join(advise(run, model, num_images, epoch_seconds=36.0, given=said))


def test_only_what_was_asked_for_is_advised_against():
    small = {"model": "mae_vit_small", "decoder_depth": 3}
    assert "an epoch are few" in advice(256 * 49, **small, given=("batch_size",))
    assert "a decoder of" in advice(256 * 49, **small, given=("model",))
    own = advice(256 * 49, **small, given=())
    assert "an epoch are few" not in own and "a decoder of" not in own


@pytest.mark.parametrize(("batch_size", "told"), [(1, False), (2, False), (4, True)])
def test_only_a_smaller_batch_is_advised_for_more_steps(batch_size: int, told: bool):
    assert ("an epoch are few: --batch-size 2 gives more" in advice(20, batch_size=batch_size)) == told


def test_nothing_is_said_of_a_good_run():
    assert advice(300_000) == ""


@pytest.mark.parametrize(
    ("num_images", "options", "says"),
    [
        (
            300_000,
            {"model": "mae_vit_large_patch16"},
            "mae_vit_large_patch16 is large for 300,000 images; --model mae_vit",
        ),
        (199_999, {}, "fewer than 200,000 images"),
        (300_000, {"epochs": None, "steps": 999}, "999 steps are few"),
        (256 * 49, {"model": "mae_vit_small"}, "49 steps an epoch are few: --batch-size 250 gives more"),
        (300_000, {"epochs": 99.0}, "99 epochs are few for 300,000 images: 100 would take 1 h 00 min"),
        (300_000, {"lr": 7e-6}, "the rate sums to 0.41 over the run"),
        (300_000, {"decoder_depth": 3}, "a decoder of 3 block"),
        (300_000, {"compile": "on"}, "measured without --compile"),
    ],
)
def test_each_fault_has_its_advice(num_images: int, options: dict[str, Any], says: str):
    assert says in advice(num_images, **options)


@pytest.mark.parametrize(
    ("num_images", "options", "says"),
    [
        (1_000_000, {"model": "mae_vit_base_patch16"}, "is large for"),
        (200_000, {}, "fewer than"),
        (300_000, {"epochs": None, "steps": 1000}, "steps are few"),
        (256 * 50, {"model": "mae_vit_small"}, "an epoch are few"),
        (300_000, {"lr": 1e-5}, "the rate sums"),
        (300_000, {"decoder_depth": 4}, "a decoder of"),
    ],
)
def test_advice_is_silent_at_its_bound(num_images: int, options: dict[str, Any], says: str):
    assert says not in advice(num_images, **options)


def test_parameters_are_counted_by_part():
    small = model_config("mae_vit_compact_patch16")
    assert num_parameters(small) == pytest.approx(4.62e6, rel=2e-3)  # as in docs/method/models.md
    assert num_parameters(small, "encoder") == pytest.approx(3.71e6, rel=2e-3)
