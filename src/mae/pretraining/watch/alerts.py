"""What is looked at while a run goes on, to tell early that it goes wrong."""

import shlex
import time
from collections.abc import Sequence
from functools import partial
from math import prod

import torch

from mae.contention import Contention, num_cores
from mae.data.loading.worker import CropDataset
from mae.evaluation.common.baselines import TrivialBaselines
from mae.evaluation.common.capabilities import predicts_pixels
from mae.pretraining.build import num_workers, readable
from mae.pretraining.resolve import RunContext
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.report.terminal.console import NO_BASELINE
from mae.training.engine import Trainer
from mae.training.log import Callback
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

_STEPS_TO_LEARN = 2000
"""Updates after which a model that learns at all is better than the mean; in short runs half of the run."""
_TIMED_IMAGES = 32


def make_health(
    prepared: RunContext, trainer: Trainer, baselines: TrivialBaselines, observers: Sequence[Callback]
) -> Health:
    """What looks for signs that the run goes wrong, and tells the observers."""
    schedule, batch_size = trainer.settings.schedule, trainer.settings.batch_size
    learned = max(schedule.warmup_samples, batch_size * min(_STEPS_TO_LEARN, prepared.total_steps // 2))
    signs: list[Sign] = [
        LossSpike(),
        GradientGrowth(after=schedule.warmup_samples),
        DataWait(partial(what_limits_loading, prepared)),
        Overfitting(),
        Collapse(),
        FewCodes(),
    ]
    if prepared.device.type == "cpu":
        threads = torch.get_num_threads() * prepared.world.local_size
        signs.append(SharedCores(Contention().look, threads=threads, cores=num_cores()))
    if baselines.mean_of_visible >= NO_BASELINE and not prepared.method.target_changes:
        signs.append(_no_better_than_mean(prepared, baseline=baselines.mean_of_visible, after=learned))
    if baselines.zero >= NO_BASELINE:
        signs.append(Divergence(baseline=baselines.zero))
    return Health(signs, observers)


def _no_better_than_mean(prepared: RunContext, *, baseline: float, after: float) -> NoBetterThanMean:
    """The sign in words that fit the target: only of pixels the mean is a colour, and are panels drawn."""
    pixels = predicts_pixels(prepared.method)
    return NoBetterThanMean(
        baseline=baseline,
        after=after,
        mean="the mean colour" if pixels else "the mean target of the visible patches",
        advice=f"{'look at the newest panel, and ' if pixels else ''}check the run with: "
        f"mae doctor {shlex.quote(str(prepared.folder.root))}",
    )


def what_limits_loading(prepared: RunContext) -> str:
    """How long reading, decoding and cropping take of some images, one after another, and what to do about it."""
    if prepared.config.machine.cache_on_device:
        return "making the crops on the device limits; without --cache-on-device loader processes make them meanwhile"
    numbers = prepared.kept[torch.arange(min(_TIMED_IMAGES, len(prepared.kept)))]
    began = time.perf_counter()
    loaded = [image for _, image in readable(prepared.images, numbers.tolist())]
    reading = (time.perf_counter() - began) / len(numbers)
    size, how = prepared.method.tokenizer.img_size, prepared.augmentation
    crops = CropDataset(images=prepared.images, numbers=numbers, img_size=size, augmentation=how)
    began = time.perf_counter()
    _ = crops[numbers.tolist(), sample_keys(0, FIXED_EPOCH, numbers).tolist()]
    both = (time.perf_counter() - began) / len(numbers)
    reading = min(reading, both)  # whole images were read before
    cropping = both - reading
    first = "reading and decoding" if reading >= cropping else "cropping"
    workers = num_workers(prepared)
    pixels = max((prod(image.shape[-2:]) for image in loaded), default=0)
    return (
        f"{first} limits (an image takes {1e3 * reading:.1f} ms to read and decode, {1e3 * cropping:.1f} ms to crop; "
        f"{workers} loader process(es) share it); give more --workers (there are {num_cores()} cores), or "
        f"store images smaller than their {pixels / 1e6:.2g} megapixels"
        + ("" if how.reduced_decoding else ", or of JPEGs decode less: --reduced-decoding")
    )
