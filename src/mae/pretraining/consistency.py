"""Refuse a run whose options contradict each other, or of which one would change nothing."""

from collections.abc import Collection
from dataclasses import replace

import torch

from mae.config import RunConfig, as_flag
from mae.core.compatibility import check_visible
from mae.core.component import flat_name
from mae.core.contracts import Term
from mae.core.kinds import kinds
from mae.core.method import MethodConfig, names_of
from mae.core.types import MaskRequest
from mae.data.loading.loader import check_micro_batches
from mae.errors import UsageError
from mae.pretraining.derived import micro_batch, peak_rate, steps_per_epoch, total_steps
from mae.training.distributed import World


def check_consistent(config: RunConfig, num_images: int, world: World) -> None:
    """Refuse a resolved run whose options do not fit each other, its images or its processes.

    Raises:
        UsageError: that.
    """
    _check_warmups(config, num_images)
    assert config.optim.batch_size is not None
    check_micro_batches(
        config.optim.batch_size,
        accumulate=config.machine.accumulate,
        world=world.size,
        views=config.data.repeated_aug,
    )
    if config.optim.min_lr > peak_rate(config):
        raise UsageError(
            f"--min-lr is {config.optim.min_lr:g}, above the peak rate of {peak_rate(config):.3g}, from which the rate "
            "falls to it; give a lower one"
        )
    if config.optim.mask_schedule != "const":
        try:
            check_visible(config.resolved, config.optim.mask_start)
        except UsageError as error:
            raise UsageError(f"--mask-start, which the run begins with: {error}") from error
    if config.machine.shard and config.optim.precision == "fp16":
        raise UsageError("--shard trains in bf16 or fp32, and --precision is fp16; give one of these")
    if config.data.reduced_decoding and config.machine.cache_on_device:
        raise UsageError(
            "--reduced-decoding decodes images anew for each crop, and --cache-on-device once for all; leave one of "
            "the two out"
        )
    for term in config.resolved.terms:
        _check_compared(term, config, world)
        _check_pairs(term, config)


def check_read(config: RunConfig, given: Collection[str]) -> None:
    """Refuse what was chosen and would change nothing, but where the user says so: --visreg 0 --visreg-dim 8.

    Raises:
        UsageError: that.
    """
    flat = config.flat()
    _check_teacher_read(config.resolved, given)
    for name in sorted(given):
        owners = [kind for kind in kinds("terms") if name != kind and name in names_of("term", kind)]
        if owners and not any(flat[kind] or kind in given for kind in owners):
            raise UsageError(
                f"{as_flag(name)} is an option of {as_flag(owners[0])}, which counts 0; give its weight too"
            )
    _check_schedule(config, given)


def _check_teacher_read(method: MethodConfig, given: Collection[str]) -> None:
    """Refuse a teacher that nobody reads, and options of outputs where its mask alone does."""
    teacher = method.teacher
    if teacher is None or any(part.needs for part in (method.target, *method.terms)):
        return
    if method.mask.reads <= {"x"}:
        raise UsageError(
            f"--teacher is {teacher.kind}, and neither target nor mask nor a term reads it; give one that does, such "
            f"as --target {'codes' if 'codes' in method.gives else 'features'}, or leave it out"
        )
    named = {flat_name("teacher", teacher.kind, name, None) for name in teacher.for_outputs}
    if unread := sorted(named & set(given)):
        raise UsageError(
            f"{as_flag(unread[0])} says what the teacher gives to a target or a term, and --mask {method.mask.kind} "
            "alone reads the teacher, in another way; leave it out, or give --target features"
        )


def _check_schedule(config: RunConfig, given: Collection[str]) -> None:
    """Refuse options of a mask ratio that changes over epochs where it does not."""
    schedule, unread = config.optim.mask_schedule, sorted({"mask_start", "mask_warmup"} & set(given))
    if unread and schedule == "const" and "mask_schedule" not in given:
        raise UsageError(
            f"{as_flag(unread[0])} is for a mask ratio that changes, and --mask-schedule is const; give another "
            "schedule, or leave it out"
        )
    if schedule == "random" and "mask_warmup" in given:
        raise UsageError(
            "--mask-warmup says over how many epochs the mask ratio changes, and --mask-schedule random draws one for "
            "each batch; leave it out, or give --mask-schedule linear or cosine"
        )


def _check_warmups(config: RunConfig, num_images: int) -> None:
    epochs = total_steps(config, num_images) / steps_per_epoch(config, num_images)
    rate, ratio = config.optim.warmup_epochs, config.optim.mask_warmup
    # The rate must come down again; the mask ratio may take the whole run to get where it ends.
    if rate is not None and rate >= epochs:
        flag, warmup = "--warmup-epochs", rate
    elif config.optim.mask_schedule in ("linear", "cosine") and ratio > epochs:
        flag, warmup = "--mask-warmup", ratio
    else:
        return
    raise UsageError(
        f"the warm-up ({flag}) is {warmup:g} epochs, but the whole run has {epochs:.3g} epochs; give a shorter one"
    )


def _check_compared(term: Term, config: RunConfig, world: World) -> None:
    """Refuse a term that would have too little to compare, or compare what it must not."""
    flag, views = as_flag(term.kind), config.data.repeated_aug
    if term.reads_views and views < 2:
        raise UsageError(
            f"{flag} compares views of an image, and --repeated-aug is {views}; make two crops of each image or more, "
            "each with its own mask: --repeated-aug 2"
        )
    images = micro_batch(config, world) * world.size // views
    if term.reads_batch and images < 2:
        in_views = "" if views == 1 else f" in --repeated-aug {views} views of each image"
        raise UsageError(
            f"{flag} compares the images of a batch, and --batch-size {config.optim.batch_size} in --accumulate "
            f"{config.machine.accumulate} micro-batches{in_views} leaves {images}; expected 2 at least, and its value "
            "says the more the more there are: use larger batches or fewer micro-batches"
        )
    if term.reads_batch and not term.reads_views and views > 1:
        raise UsageError(
            f"{flag} compares the images of a batch, and with --repeated-aug {views} some are views of the same image; "
            "leave one of the two out"
        )


def _check_pairs(term: Term, config: RunConfig) -> None:
    """Refuse a term that compares predicted patches of an image with each other where only one is predicted."""
    if not term.predicts_loss:
        return
    mask, layout = config.resolved.mask, config.resolved.layout
    start = mask.ratio if config.optim.mask_schedule == "const" else config.optim.mask_start
    # Of one sample, for all have equally many.
    request = MaskRequest(
        layout=layout,
        keys=torch.zeros(1, dtype=torch.int64),
        x=torch.zeros(1, layout.channels, *layout.size),
        scores=torch.zeros(1, layout.num_tokens),
    )
    if max(mask.plan(replace(request, ratio=ratio)).predicted.shape[1] for ratio in (start, mask.ratio)) < 2:
        raise UsageError(
            f"{as_flag(term.kind)} compares the predicted patches of an image with each other, and the mask has only "
            "one predicted; expected two or more: predict or mask more of them, or leave it out"
        )
