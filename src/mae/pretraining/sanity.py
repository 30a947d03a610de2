"""Whether a run makes sense for so many images: what is refused before it begins, and what is advised."""

from collections.abc import Collection
from math import ceil, inf
from typing import Literal

import torch

from mae.config import RunConfig
from mae.core.component import options_of
from mae.core.method import MethodConfig
from mae.errors import UsageError
from mae.models.build import build_model
from mae.models.presets import model_config
from mae.pretraining.derived import (
    FEW_STEPS_AN_EPOCH,
    advised_batch,
    num_held_out,
    peak_rate,
    steps_per_epoch,
    total_steps,
    warmup_steps,
)
from mae.report.terminal.console import duration

LEAST_STEPS = 300
"""Fewer optimizer steps are refused. An epoch of the paper's own recipe has 312, and in a published log of the official
code the loss is 0.95 over the first epoch, where it goes to 0.56 by the fourteenth."""
FEW_STEPS = 1000
"""Fewer are warned of: recipe `demo`, the shortest with a measured result, takes 1,500."""
MANY_STEPS = 5000
"""From so many on it does not matter how few of them an epoch has."""
LARGEST_WARMUP = 0.5
"""Share of the run that its warm-up may take; it is 0.05 in the paper and 0.1 by default."""
LEAST_REACH, LITTLE_REACH = 0.1, 0.5
"""Of the learning rate summed over all steps. AdamW moves a weight by about the rate in a step, so this bounds how far
any weight can go; recipe `demo` has 1.1. Below the first it is refused, below the second warned of."""
ENOUGH_STEPS, FEWEST_EPOCHS, MOST_EPOCHS = 20_000, 100, 1600
"""Epochs that are advised: for as many steps as recipe `cifar10` takes, but no fewer than a run does by default and no
more than the paper's longest."""
FEW_IMAGES = 200_000
"""With fewer, maintainers of MAE code advise to begin with weights trained on ImageNet."""
SHALLOW_DECODER = 4
"""Fewer blocks cost frozen features: 51.6 % against 66.9 % by linear probe for 2 and 8 blocks (MultiMAE, issue 1)."""

_MODELS = (
    (10_000, "mae_vit_compact_patch16"),
    (100_000, "mae_vit_small_patch16"),
    (1_000_000, "mae_vit_small12_patch16"),
)
_LARGE_MODEL = "mae_vit_base_patch16_dec512d8b"


def check_schedule(config: RunConfig, num_images: int) -> None:
    """Refuse a run that can be carried out but would learn nothing.

    Args:
        config: settled, see `resolve_config`.
        num_images: of the source.

    Raises:
        UsageError: one step an epoch, fewer steps than `LEAST_STEPS`, a warm-up that takes more than `LARGEST_WARMUP`
            of them, or rates that sum to less than `LEAST_REACH`.
    """
    an_epoch, steps = steps_per_epoch(config, num_images), total_steps(config, num_images)
    of = f"{num_images - num_held_out(config, num_images):,} images in batches of {config.optim.batch_size}"
    if an_epoch < 2:
        assert config.optim.batch_size is not None  # settled
        smaller = advised_batch(config, num_images)
        use = f"use --batch-size {smaller}, and" if smaller < config.optim.batch_size else "give"
        raise UsageError(
            f"{of} are one step an epoch, so every step sees the same images; {use} more images if there are any"
        )
    if steps < LEAST_STEPS:
        longer = f"--steps {LEAST_STEPS}" if config.optim.steps else f"--epochs {ceil(LEAST_STEPS / an_epoch)}"
        raise UsageError(
            f"{of} for {steps / an_epoch:.3g} epochs are {steps} steps; expected {LEAST_STEPS} or more: the paper's "
            f"own run learns little in its first {LEAST_STEPS}. Use {longer} or more, or a smaller --batch-size"
        )
    if (warmup := warmup_steps(config, num_images)) > LARGEST_WARMUP * steps:
        raise UsageError(
            f"the warm-up (--warmup-epochs {config.optim.warmup_epochs:g}) takes {warmup / steps:.0%} of the run's "
            f"{steps:,} "
            f"steps; expected {LARGEST_WARMUP:.0%} at most, for the rate must come down again. Use --warmup-epochs "
            f"{0.1 * steps / an_epoch:.3g}, or more epochs"
        )
    if (reach := _reach(config, num_images)) < LEAST_REACH:
        raise UsageError(
            f"a rate of {peak_rate(config):.3g} over {steps:,} steps sums to {reach:.2g}; expected {LEAST_REACH} or "
            "more: AdamW moves a weight by about the rate in a step, so none could go far. The paper's --base-lr "
            f"1.5e-4 is meant for batches of 4096 and 250,000 steps; for {num_images:,} images use --lr 1e-3, or more "
            "epochs"
        )


def _reach(config: RunConfig, num_images: int) -> float:
    """The learning rate summed over the run: half the peak on average in the warm-up, then the mean of a cosine."""
    steps, warmup, peak = total_steps(config, num_images), warmup_steps(config, num_images), peak_rate(config)
    return warmup * peak / 2 + (steps - warmup) * (peak + config.optim.min_lr) / 2


def advised_model(num_images: int) -> str:
    """The largest model that is advised for so many images: see docs/method/models.md."""
    return next((name for most, name in _MODELS if num_images < most), _LARGE_MODEL)


def advised_epochs(steps_per_epoch: int) -> int:
    """Epochs that are `ENOUGH_STEPS`, between `FEWEST_EPOCHS` and `MOST_EPOCHS`."""
    return min(max(ceil(ENOUGH_STEPS / steps_per_epoch), FEWEST_EPOCHS), MOST_EPOCHS)


def advise(
    config: RunConfig, model: MethodConfig, num_images: int, *, epoch_seconds: float, given: Collection[str] = ()
) -> list[str]:
    """What is worth changing in a run that makes sense, a sentence each; nothing against our own defaults.

    Args:
        config: settled, see `resolve_config`.
        model: what it trains.
        num_images: of the source.
        epoch_seconds: time of an epoch.
        given: names of the options that the user set.
    """
    an_epoch, steps = steps_per_epoch(config, num_images), total_steps(config, num_images)
    advice, epochs = [], advised_epochs(an_epoch)
    better = advised_model(num_images)
    if num_parameters(model, "encoder") > num_parameters(model_config(better), "encoder"):
        advice.append(
            f"{config.model} is large for {num_images:,} images; --model {better} is what we advise for so many: with "
            "few images a larger model rarely helps, more epochs do"
        )
    if num_images < FEW_IMAGES and config.init_from is None:
        advice.append(
            f"fewer than {FEW_IMAGES:,} images: maintainers of MAE code advise to begin with weights trained on "
            "ImageNet: --init-from; otherwise give a small model many epochs"
        )
    if steps < FEW_STEPS:
        advice.append(f"{steps} steps are few: the shortest recipe with a measured result, demo, takes 1,500")
    smaller, asked_batch = advised_batch(config, num_images), config.optim.batch_size
    few = "batch_size" in given and an_epoch < FEW_STEPS_AN_EPOCH and steps < MANY_STEPS
    if few and asked_batch is not None and smaller < asked_batch:
        advice.append(f"{an_epoch} steps an epoch are few: --batch-size {smaller} gives more for the same work")
    if steps / an_epoch < epochs:
        took = duration(epochs * epoch_seconds)
        advice.append(f"{steps / an_epoch:.3g} epochs are few for {num_images:,} images: {epochs:,} would take {took}")
    if (reach := _reach(config, num_images)) < LITTLE_REACH:
        advice.append(f"the rate sums to {reach:.2g} over the run, which is little; recipe demo's sums to 1.1")
    depth = options_of(model.decoder).get("depth", inf)
    if not {"model", "decoder_depth"}.isdisjoint(given) and depth < SHALLOW_DECODER:
        advice.append(
            f"a decoder of {depth} block(s) costs frozen features; for k-NN and probes take "
            "--decoder-depth 4 or more, up to the paper's 8"
        )
    if config.machine.compile == "on":
        advice.append("the steps were measured without --compile")
    return advice


def num_parameters(model: MethodConfig, part: Literal["", "encoder"] = "") -> int:
    """Trained values of the model, or of its encoder."""
    with torch.device("meta"):
        module = build_model(model).get_submodule(part)
    return sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
