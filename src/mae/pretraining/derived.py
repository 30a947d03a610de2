"""What follows from the configuration of a run: steps, images, rates, and what a batch is compared by."""

from jaxtyping import Int64
from torch import Tensor

from mae.config import RunConfig
from mae.core.kinds import find, kinds
from mae.core.method import MethodConfig
from mae.data.dataset.images import ImageSet
from mae.masks.schedule import RatioSchedule
from mae.modalities.images.crop import Augmentation
from mae.randomness import FIXED_EPOCH
from mae.training.distributed import World

_LEAST_HELD_OUT, _MOST_HELD_OUT = 16, 2000
"""Images: of fewer a mean loss tells nothing, of more it tells no more."""
HELD_OUT_SEED = 0  # of any run, so that runs that differ in their seed are told by the same images
FEW_STEPS_AN_EPOCH = 50
"""With fewer each step holds more than a fiftieth of all images: smaller batches give more steps for the same work."""


def total_steps(config: RunConfig, num_images: int) -> int:
    """Optimizer steps of a resolved run."""
    if config.optim.steps is not None:
        return config.optim.steps
    assert config.optim.epochs is not None
    return max(1, round(config.optim.epochs * steps_per_epoch(config, num_images)))


def steps_per_epoch(config: RunConfig, num_images: int) -> int:
    """Whole batches in an epoch of a resolved run, of the images that are trained on."""
    return (num_images - num_held_out(config, num_images)) // images_per_step(config)


def images_per_step(config: RunConfig) -> int:
    """Different images in a batch of a resolved run; each is in it as often as the run has views of it."""
    assert config.optim.batch_size is not None
    return config.optim.batch_size // config.data.repeated_aug


def warmup_steps(config: RunConfig, num_images: int) -> float:
    """Steps of a resolved run in which the rate rises: a tenth of them unless it was told otherwise."""
    if config.optim.warmup_epochs is None:
        return 0.1 * total_steps(config, num_images)
    return config.optim.warmup_epochs * steps_per_epoch(config, num_images)


def peak_rate(config: RunConfig) -> float:
    """The highest learning rate of a resolved run: `lr` as it is, or `base_lr` times batch / 256."""
    if config.optim.lr is not None:
        return config.optim.lr
    assert config.optim.base_lr is not None and config.optim.batch_size is not None
    return config.optim.base_lr * config.optim.batch_size / 256


def num_held_out(config: RunConfig, num_images: int) -> int:
    """How many images of a source are not trained on; none where they would be too few to tell anything."""
    count = min(int(config.data.held_out * num_images), _MOST_HELD_OUT)
    return count if count >= _LEAST_HELD_OUT else 0


def held_out_of(config: RunConfig, images: ImageSet) -> Int64[Tensor, " m"]:
    """Numbers of the images that a run leaves out; of images in blocks those of few blocks, as all are read."""
    return images.sample(HELD_OUT_SEED, FIXED_EPOCH, num_held_out(config, len(images))).sort().values


def micro_batch(config: RunConfig, world: World) -> int:
    """Images, crops of one counted singly, that a process of a resolved run computes at once."""
    assert config.optim.batch_size is not None
    return config.optim.batch_size // (config.machine.accumulate * world.size)


def advised_batch(config: RunConfig, num_images: int) -> int:
    """A batch that makes enough steps an epoch; of very few images one that leaves two steps, if any does."""
    trained = num_images - num_held_out(config, num_images)
    return config.data.repeated_aug * min(max(2, num_images // FEW_STEPS_AN_EPOCH), max(1, trained // 2))


def augmentation_of(config: RunConfig) -> Augmentation:
    """How training images of a run are cropped and changed."""
    data = config.data
    return Augmentation(
        scale=data.crop_scale,
        color_jitter=data.color_jitter,
        grayscale=data.grayscale,
        reduced_decoding=data.reduced_decoding,
    )


def ratio_schedule(config: RunConfig) -> RatioSchedule:
    """How much a run hides, step by step."""
    return RatioSchedule(
        kind=config.optim.mask_schedule,
        start=config.optim.mask_start,
        end=config.resolved.mask.ratio,
        warmup=config.optim.mask_warmup,
        seed=config.optim.seed,
    )


def terms_of_batch(config: RunConfig) -> list[str]:
    """The terms of a run that compare the images of a batch, which micro-batches change, as flags call them."""
    if isinstance(config.method, MethodConfig):
        terms = config.method.terms
    else:
        flat = config.flat()
        terms = tuple(find("terms", kind)() for kind in kinds("terms") if flat[kind] > 0)
    return [term.kind.replace("_", "-") for term in terms if term.reads_batch]


def in_smaller_parts(config: RunConfig) -> str:
    """What to do where a step takes too much memory."""
    accumulate = 2 * config.machine.accumulate
    return f"compute the batch in micro-batches with --accumulate {accumulate} or more{effect_of_micro_batches(config)}"


def effect_of_micro_batches(config: RunConfig) -> str:
    """What else changes with the number of micro-batches; empty: nothing."""
    return "".join(f"; --{kind} then compares the images of a micro-batch alone" for kind in terms_of_batch(config))
