"""Resolve a run before its first step: what was left open is chosen, what cannot work is refused."""

import re
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.config import RunConfig, as_flag, is_changeable
from mae.core.compatibility import check_visible
from mae.core.component import flat_name
from mae.core.contracts import Term
from mae.core.kinds import find, kinds
from mae.core.method import MethodConfig, component_of, default_kind, names_of
from mae.core.types import MaskRequest, SourceNetwork
from mae.data.dataset.images import ImageSet, load_images
from mae.data.dataset.units import check_units
from mae.data.decode.limits import check_workers
from mae.data.loading.loader import IMAGENET_MEAN, IMAGENET_STD, check_micro_batches
from mae.data.loading.sampler import AllBut, Numbers
from mae.data.sources.names import check_apart, check_exists
from mae.data.sources.open import absolute_source, open_source
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import weights_digest
from mae.masks.schedule import RatioSchedule
from mae.modalities.images.crop import Augmentation
from mae.models.presets import model_config
from mae.pretraining.init_weights import InitWeights, fresh_part, inherit_config, open_init_weights
from mae.pretraining.same_images import check_same, told_of
from mae.pretraining.teacher import absolute_path, check_seen, open_teacher
from mae.randomness import FIXED_EPOCH
from mae.records import PixelDtype, check_no_data
from mae.training.device import choose_precision
from mae.training.distributed import World
from mae.training.optimizer import PEAK_RATES
from mae.training.run_folder import RunFolder, check_resumable, new_run_folder
from mae.training.run_records import read_image_facts

_LEAST_HELD_OUT, _MOST_HELD_OUT = 16, 2000
"""Images: of fewer a mean loss tells nothing, of more it tells no more."""
_STEPS_AN_EPOCH = 4
_HELD_OUT_SEED = 0  # of any run, so that runs that differ in their seed are told by the same images
_LONGEST_STEM = 100  # bytes; a name may have 255, and more is added to this one
_SMALL_SIDE = 64  # images up to this side are trained at the size they have
DECIDING_FACTS = ("images", "channels", "fingerprint", "listing", "content", "version", "mean", "std")
"""Entries of `data.json` that a run goes on with."""
FEW_STEPS_AN_EPOCH = 50
"""With fewer each step holds more than a fiftieth of all images: smaller batches give more steps for the same work."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Everything that is settled before the first step."""

    config: RunConfig
    images: ImageSet
    note: str
    found: Mapping[str, Any]
    folder: RunFolder
    device: torch.device
    world: World
    resume: bool
    start: InitWeights | None = None
    network: SourceNetwork | None = None

    @property
    def method(self) -> MethodConfig:
        """The model in full, with the statistics of the images."""
        return self.config.resolved

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in a pass over the images that are trained on."""
        return steps_per_epoch(self.config, len(self.images))

    @property
    def trained(self) -> Int64[Tensor, " n"]:
        """Numbers of the images that are trained on, as a table of them."""
        return self.kept.table()

    @cached_property
    def kept(self) -> AllBut:
        """The same without a table, which of very many images would fill the memory."""
        return AllBut(len(self.images), self.held_out)

    @cached_property
    def held_out(self) -> Int64[Tensor, " m"]:
        """Numbers of the images that are not trained on; see `held_out_of`."""
        return held_out_of(self.config, self.images)

    def near(self, count: int) -> Numbers:
        """Images that are trained on, `count` or more: of images in blocks those of few blocks, else all of them."""
        if self.images.block_sizes is None:
            return self.kept
        found = self.images.sample(_HELD_OUT_SEED, FIXED_EPOCH, count + len(self.held_out))
        return found[~torch.isin(found, self.held_out)].sort().values

    @property
    def part_size(self) -> int:
        """Images that a process computes at once."""
        return _micro_batch(self.config, self.world)

    @property
    def compared_views(self) -> int:
        """Crops of each image that a term compares with each other; 1 where crops count as images."""
        reads_views = any(term.reads_views for term in self.method.terms)
        return self.config.data.repeated_aug if reads_views else 1

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return total_steps(self.config, len(self.images))

    @property
    def mask_schedule(self) -> RatioSchedule:
        """How much is hidden, step by step."""
        return ratio_schedule(self.config)

    @property
    def augmentation(self) -> Augmentation:
        """How training images are cropped."""
        return augmentation_of(self.config)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Channel mean and std `[C]` on the run's device."""
        tokenizer = self.method.tokenizer
        assert tokenizer.mean is not None and tokenizer.std is not None
        mean, std = torch.tensor([tokenizer.mean, tokenizer.std], device=self.device)
        return mean, std


def prepare_run(
    config: RunConfig,
    folder: RunFolder | None,
    device: torch.device,
    world: World,
    *,
    resume: bool,
    given: Collection[str] = (),
    memory_limit: int | None = None,
) -> RunContext:
    """Read the images and settle the run; nothing is written yet.

    Args:
        config: the run, as far as it was told.
        folder: of the run; None: a new one under `runs/`.
        device: where to compute.
        world: the processes that train together.
        resume: whether the run was begun before.
        given: names of the options that the user set: where weights to begin with say another thing, these count.
        memory_limit: bytes that decoded images may take; None: a quarter of the free memory.

    Raises:
        UsageError: the request cannot be carried out as asked.
        MAEError: too many images cannot be read.
    """
    check_workers(config.machine.workers)
    if not resume and "model" in given and isinstance(config.method, MethodConfig):
        raise UsageError(f"--model is {config.model}, and --recipe is a run, which says its model; leave --model out")
    start, weights = None, weights_of(folder) if resume else None
    if not resume and (start := find_init_weights(config, world)) is not None:
        config, weights = inherit_config(config, given, start), start.config
    config, network = open_teacher(config, device, world, resume=resume)
    if config.model is not None:  # refuse a wrong name or size before images are read, which can take minutes
        _method(config, config.model, weights, in_chans=said(config, "in_chans"))
    if (nodata := said(config, "nodata")) is not None:  # the images are read with it before the model is made
        check_no_data(nodata, name="--nodata")
    if config.evaluation.monitor is not None:
        check_exists(config.evaluation.monitor, data_root=config.machine.data_root)
    with world.main_first():  # a download goes to one folder
        source = open_source(config.source, data_root=config.machine.data_root)
    images = load_images(
        source,
        in_chans=said(config, "in_chans"),
        channels=said(config, "channels"),
        nodata=said(config, "nodata"),
        pixel_dtype=unit_of(config, weights),
        max_unreadable=config.data.max_unreadable,
        # Decoded once, images would be whole.
        memory_limit=0 if config.data.reduced_decoding else memory_limit,
        processes=world.local_size,
    )
    config = resolve_config(config, images, device, world, weights)
    if not resume:
        _check_read(config, given)
    unusual = check_seen(network, images)
    assert config.model is not None
    if folder is None:
        folder = new_run_folder(*default_place(config))
    if not resume:
        check_apart(folder.root, config.source)
    found, hint = world.from_main(partial(_found_data, config, images, folder, start, resume=resume))
    return RunContext(
        config=config.override({"mean": tuple(found["mean"]), "std": tuple(found["std"])}),
        images=images,
        note="; ".join(filter(None, (source.note, hint, unusual))),
        found=found,
        folder=folder,
        device=device,
        world=world,
        resume=resume,
        start=start,
        network=network,
    )


def resolve_config(
    config: RunConfig,
    images: ImageSet,
    device: torch.device,
    world: World,
    weights: MethodConfig | None = None,
) -> RunConfig:
    """Choose what was left open for these images and this machine, and see that it can be trained.

    Args:
        config: the run, as far as it was told.
        images: to train on.
        device: where to compute.
        world: the processes that train together.
        weights: the configuration of those that the run begins with; None: fresh ones.

    Raises:
        UsageError: the request cannot be carried out as asked.
    """
    if config.init_from is not None and weights is None:
        raise UsageError("--init-from is for 'mae pretrain', 'mae plan' and 'mae doctor'; leave it out here")
    if config.data.statistics == "model" and weights is None:
        raise UsageError("--statistics is model, which means those of --init-from; give that, or --statistics data")
    config = _choose(config, weights, images, device)
    method = config.resolved
    if method.adapter is not None and weights is None:
        raise UsageError(
            f"--adapter is {method.adapter.kind}, which keeps the weights of an encoder, and this run begins with "
            "fresh ones; give --init-from too, or leave --adapter out"
        )
    _check_warmups(config, len(images))
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
            check_visible(method, config.optim.mask_start)
        except UsageError as error:
            raise UsageError(f"--mask-start, which the run begins with: {error}") from error
    if config.machine.shard and config.optim.precision == "fp16":
        raise UsageError("--shard trains in bf16 or fp32, and --precision is fp16; give one of these")
    if config.data.reduced_decoding and config.machine.cache_on_device:
        raise UsageError(
            "--reduced-decoding decodes images anew for each crop, and --cache-on-device once for all; leave one of "
            "the two out"
        )
    for term in method.terms:
        _check_compared(term, config, world)
        _check_pairs(term, config)
    return config


def _check_read(config: RunConfig, given: Collection[str]) -> None:
    """Refuse what was chosen and would change nothing, but where the user says so: --visreg 0 --visreg-dim 8."""
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


def _check_compared(term: Term, config: RunConfig, world: World) -> None:
    """Refuse a term that would have too little to compare, or compare what it must not."""
    flag, views = as_flag(term.kind), config.data.repeated_aug
    if term.reads_views and views < 2:
        raise UsageError(
            f"{flag} compares views of an image, and --repeated-aug is {views}; make two crops of each image or more, "
            "each with its own mask: --repeated-aug 2"
        )
    images = _micro_batch(config, world) * world.size // views
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


def terms_of_batch(config: RunConfig) -> list[str]:
    """The terms of a run that compare the images of a batch, which micro-batches change, as flags call them."""
    if isinstance(config.method, MethodConfig):
        terms = config.method.terms
    else:
        flat = config.flat()
        terms = tuple(find("terms", kind)() for kind in kinds("terms") if flat[kind] > 0)
    return [term.kind.replace("_", "-") for term in terms if term.reads_batch]


def said(config: RunConfig, name: str) -> Any:
    """What is said of the model so far, by flat name; None: nothing."""
    return config.flat().get(name)


def unit_of(config: RunConfig, weights: MethodConfig | None) -> PixelDtype | None:
    """What the unit of the images is where the run takes over the statistics of its weights; None: their files' own."""
    return weights.tokenizer.pixel_dtype if weights is not None and config.data.statistics == "model" else None


def find_init_weights(config: RunConfig, world: World) -> InitWeights | None:
    """The weights that a run begins with; None: fresh ones.

    Raises:
        UsageError: see `open_init_weights`.
        MAEError: see `open_init_weights`.
    """
    if config.init_from is None:
        return None
    with world.main_first():  # what is wrong with a file is then said once
        return open_init_weights(config.init_from)


def find_begun_weights(prepared: RunContext) -> InitWeights | None:
    """The weights that a run began with, for one that goes on from before its first checkpoint; None: fresh ones.

    Raises:
        UsageError: see `open_init_weights`; other weights than when the run was begun.
        MAEError: see `open_init_weights`.
    """
    start, begun = find_init_weights(prepared.config, prepared.world), prepared.found.get("start")
    if start is None or begun is None:
        return start
    digest = begun.get("digest")  # earlier versions wrote none
    if weights_of(prepared.folder) != start.config or digest not in (None, weights_digest(start.model)):
        raise UsageError(
            f"--init-from {prepared.config.init_from} holds other weights than when the run was begun; put the old "
            "ones back there, or start a new run in another folder"
        )
    return start


def total_steps(config: RunConfig, num_images: int) -> int:
    """Optimizer steps of a resolved run."""
    if config.optim.steps is not None:
        return config.optim.steps
    assert config.optim.epochs is not None
    return max(1, round(config.optim.epochs * steps_per_epoch(config, num_images)))


def num_held_out(config: RunConfig, num_images: int) -> int:
    """How many images of a source are not trained on; none where they would be too few to tell anything."""
    count = min(int(config.data.held_out * num_images), _MOST_HELD_OUT)
    return count if count >= _LEAST_HELD_OUT else 0


def held_out_of(config: RunConfig, images: ImageSet) -> Int64[Tensor, " m"]:
    """Numbers of the images that a run leaves out; of images in blocks those of few blocks, as all are read."""
    return images.sample(_HELD_OUT_SEED, FIXED_EPOCH, num_held_out(config, len(images))).sort().values


def warmup_steps(config: RunConfig, num_images: int) -> float:
    """Steps of a resolved run in which the rate rises: a tenth of them unless it was told otherwise."""
    if config.optim.warmup_epochs is None:
        return 0.1 * total_steps(config, num_images)
    return config.optim.warmup_epochs * steps_per_epoch(config, num_images)


def steps_per_epoch(config: RunConfig, num_images: int) -> int:
    """Whole batches in a pass over the images of a resolved run that are trained on."""
    return (num_images - num_held_out(config, num_images)) // images_per_step(config)


def images_per_step(config: RunConfig) -> int:
    """Different images in a batch of a resolved run; each is in it as often as the run has views of it."""
    assert config.optim.batch_size is not None
    return config.optim.batch_size // config.data.repeated_aug


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


def in_smaller_parts(config: RunConfig) -> str:
    """What to do where a step takes too much memory."""
    accumulate = 2 * config.machine.accumulate
    return f"compute the batch in micro-batches with --accumulate {accumulate} or more{effect_of_micro_batches(config)}"


def effect_of_micro_batches(config: RunConfig) -> str:
    """What else changes with the number of micro-batches; empty: nothing."""
    return "".join(f"; --{kind} then compares the images of a micro-batch alone" for kind in terms_of_batch(config))


def advised_batch(config: RunConfig, num_images: int) -> int:
    """A batch that makes enough steps an epoch; of very few images one that leaves two steps, if any does."""
    trained = num_images - num_held_out(config, num_images)
    return config.data.repeated_aug * min(max(2, num_images // FEW_STEPS_AN_EPOCH), max(1, trained // 2))


def _micro_batch(config: RunConfig, world: World) -> int:
    assert config.optim.batch_size is not None
    return config.optim.batch_size // (config.machine.accumulate * world.size)


def _method(config: RunConfig, name: str, weights: MethodConfig | None, *, in_chans: int | None) -> MethodConfig:
    """The model of a name, or that of the weights to begin with, with what the run says otherwise."""
    if isinstance(config.method, MethodConfig):
        return config.method
    said = {name: value for name, value in config.method.items() if value is not None}
    channels = said.get("channels")
    if channels is not None and said.get("in_chans") not in (None, len(channels)):
        raise UsageError(
            f"--in-chans is {said['in_chans']}, and --channels names {len(channels)}; leave the former out"
        )
    in_chans = len(channels) if in_chans is None and channels is not None else in_chans
    if in_chans is not None:
        said["in_chans"] = in_chans
    if weights is None:
        return model_config(name, **said)
    # Weights say nothing of the mask: that of another size is none of this run's.
    return weights.override({**said, "mask": component_of("mask", {"mask": default_kind("mask"), **said})})


def _choose(config: RunConfig, weights: MethodConfig | None, images: ImageSet, device: torch.device) -> RunConfig:
    """The configuration with everything chosen that was left to the source and the machine."""
    smallest, largest = images.size_range()
    tiny = max(largest) <= _SMALL_SIDE
    big_model = "mae_vit_compact_patch16" if device.type == "cpu" else "mae_vit_base_patch16_dec512d8b"
    name = config.model or ("mae_vit_lesson_patch4" if tiny else big_model)
    sized = config
    if config.model is None and tiny and said(config, "img_size") is None and smallest == largest:
        patch_size = said(config, "patch_size") or (_small_patch(smallest[0]), _small_patch(smallest[1]))
        sized = config.override({"img_size": smallest, "patch_size": patch_size})
    method = _method(sized, name, weights, in_chans=images.channels)
    optim, machine, monitor = config.optim, config.machine, config.evaluation.monitor
    return replace(
        config,
        source=absolute_source(config.source),
        model=name,
        init_from=None if config.init_from is None else absolute_path(config.init_from),
        method=method.override(
            {"in_chans": images.channels, "channels": images.channel_names, "pixel_dtype": images.pixel_dtype}
        ),
        optim=replace(
            optim,
            lr=PEAK_RATES[optim.optimizer] if optim.lr is None and optim.base_lr is None else optim.lr,
            precision=choose_precision(optim.precision, device),  # type: ignore[arg-type]
            epochs=100.0 if optim.epochs is None and optim.steps is None else optim.epochs,
            batch_size=_batch_size(config, len(images), device),
        ),
        evaluation=replace(config.evaluation, monitor=None if monitor is None else absolute_source(monitor)),
        machine=replace(machine, data_root=machine.data_root.resolve()),
    )


def _usual_batch(usual: int, trained: int) -> int:
    """The usual number of images, halved until an epoch has some steps."""
    while usual > 1 and trained // usual < _STEPS_AN_EPOCH:
        usual //= 2
    return max(usual, 1)


def _batch_size(config: RunConfig, num_images: int, device: torch.device) -> int:
    views, usual = config.data.repeated_aug, 64 if device.type == "cpu" else 256
    trained = num_images - num_held_out(config, num_images)
    batch_size = config.optim.batch_size or views * _usual_batch(usual // views, trained)
    if batch_size % views:
        raise UsageError(
            f"--batch-size is {batch_size}, --repeated-aug {views}; expected a batch of as many views of every image: "
            f"a multiple of {views}"
        )
    if batch_size // views > trained:
        held_out = "" if trained == num_images else f", {num_images - trained} of them held out"
        raise UsageError(
            f"--batch-size is {batch_size}, but {config.source} holds {num_images} images{held_out}; "
            f"give at most --batch-size {views * trained}; {advised_batch(config, num_images)} makes more steps of them"
        )
    return batch_size


def _small_patch(side: int) -> int:
    """For tiny images: the largest patch that divides the side and leaves seven or more of them along it."""
    return max((patch for patch in range(2, side // 7 + 1) if side % patch == 0), default=2)


def peak_rate(config: RunConfig) -> float:
    """The highest learning rate of a resolved run: `lr` as it is, or `base_lr` times batch / 256."""
    if config.optim.lr is not None:
        return config.optim.lr
    assert config.optim.base_lr is not None and config.optim.batch_size is not None
    return config.optim.base_lr * config.optim.batch_size / 256


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


def weights_of(folder: RunFolder | None) -> MethodConfig | None:
    """The configuration of the weights that a run began with, for its own need not be any named model's."""
    begun = None if folder is None else read_image_facts(folder.data, needed=DECIDING_FACTS).get("start")
    if folder is None or begun is None:
        return None
    try:
        return MethodConfig.from_json(begun["model"])
    except UsageError as error:
        raise UsageError(f"{folder.data}: start: {error}; put back what was edited by hand") from error


def _found_start(start: InitWeights, model: MethodConfig) -> dict[str, Any]:
    words = {
        "decoder.": "a fresh decoder",
        "decoder.pred.": "a fresh last layer of the decoder",
        "encoder.norm.": "a fresh last norm of the encoder",
        "encoder.cls_token": "a fresh class token",
    }
    return {
        "model": start.config.to_json(),
        "digest": weights_digest(start.model),
        "loaded": start.line,
        "fresh": " and ".join(words[name] for name in fresh_part(start, model)) or None,
        "licence": start.licence,
    }


def _found_data(
    config: RunConfig,
    images: ImageSet,
    folder: RunFolder,
    start: InitWeights | None,
    *,
    resume: bool,
) -> tuple[dict[str, Any], str]:
    """What the source holds, and what is unusual: of a resumed run, which must find what it found before."""
    if resume:
        found = read_image_facts(folder.data, needed=DECIDING_FACTS)
        if found["channels"] != images.channels:
            raise UsageError(
                f"{folder.data}: channels is {found['channels']}; expected {images.channels}, as the images have; put "
                "back what was edited by hand"
            )
        return found, check_same(images, found, source=config.source, begun=str(folder.root))
    if config.data.statistics == "imagenet" and images.channels != 3:
        raise UsageError(
            f"--statistics imagenet is for 3 channels, these images have {images.channels}; use --statistics data"
        )
    unusual: str | None = None
    if config.data.statistics == "model":
        assert start is not None and start.config.tokenizer.mean is not None and start.config.tokenizer.std is not None
        mean, std = start.config.tokenizer.mean, start.config.tokenizer.std
        unusual = check_units(images, mean=mean, std=std, pixel_dtype=start.config.tokenizer.pixel_dtype)
    else:
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if config.data.statistics == "imagenet" else images.statistics()
    told = {
        "source": config.source,
        **told_of(images),
        "channels": images.channels,
        "channel_names": images.channel_names,
        # Six digits are plenty, and hide that sums round differently on other machines.
        "mean": [float(f"{value:.6g}") for value in mean],
        "std": [float(f"{value:.6g}") for value in std],
        "unreadable": list(images.unreadable),
        **({} if start is None else {"start": _found_start(start, config.resolved)}),
    }
    return told, unusual or ""


def stored_config(config: RunConfig, folder: RunFolder | None, given: Collection[str]) -> tuple[RunConfig, RunFolder]:
    """The configuration of the run to go on with; only machine options and the place of the images may change."""
    folder = check_resumable(folder)
    stored = RunConfig.read(folder.config)
    asked = {**config.flat(), "source": absolute_source(config.source)}
    asked |= {name: absolute_path(asked[name]) for name in ("init_from", "teacher_source") if asked.get(name)}
    # Images may be in another place by now: they are known again by their names and content.
    changes = {name: asked[name] for name in given if not is_changeable(name) and name != "source"}
    begun = stored.flat()
    if differing := [name for name, value in changes.items() if stored.override({name: value}) != stored]:
        if set(differing) <= {"epochs", "steps"}:
            raise UsageError(_why_not_longer(stored, folder, {name: asked[name] for name in differing}))
        told = "; ".join(f"{name} was {begun.get(name)!r}, is now {asked[name]!r}" for name in differing)
        raise UsageError(
            f"the run in {folder.root} was begun with other options: {told}. Leave those options out to resume it, "
            "or start a new run in another folder"
        )
    changed = {name: asked[name] for name in given if is_changeable(name) or name == "source"}
    before = stored.machine.accumulate
    for kind in terms_of_batch(stored) if changed.get("accumulate", before) != before else []:
        raise UsageError(
            f"--accumulate was {before}, is now {changed['accumulate']}: --{kind} compares the images of a "
            "micro-batch, so this would be another objective. Leave the option out, or start a new run"
        )
    return stored.override(changed), folder


def _why_not_longer(stored: RunConfig, folder: RunFolder, asked: Mapping[str, Any]) -> str:
    """Why a run keeps its length: its rate falls along a cosine of that length, which cannot be gone on with."""
    lengths = {
        name: value for name, value in stored.flat().items() if name in ("epochs", "steps") and value is not None
    }
    was, now = (
        ", ".join(f"{value:g} {name}" for name, value in length.items() if value is not None)
        for length in (lengths, asked)
    )
    begin = f"mae pretrain {shlex.quote(stored.source)} --init-from {shlex.quote(str(folder.root))} --out NEW"
    return (
        f"the run in {folder.root} is one of {was}, and {now} are asked for: its learning rate falls along a cosine of "
        f"that length, and raising it again would make another run of it. Leave --{next(iter(asked))} out to "
        f"resume it; to train its weights for longer, with a schedule of their own, begin a new run: {begin} with "
        "--epochs or --steps"
    )


def default_place(config: RunConfig) -> tuple[Path, str]:
    """Where the folder of a resolved run is made where none is told, and its name but for a number."""
    assert config.model is not None
    return Path("runs"), f"{source_stem(config.source)}-{config.model.removeprefix('mae_vit_')}"


def source_stem(source: str) -> str:
    """What a folder made for this source is called after it."""
    plain = re.sub(r"[{}]", "", source.replace(":", "-"))  # a shell would expand braces
    stem = "".join(sign if sign.isprintable() else "-" for sign in Path(plain).stem)
    return stem.encode()[:_LONGEST_STEM].decode(errors="ignore") or "images"
