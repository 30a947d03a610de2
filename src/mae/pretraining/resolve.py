"""Resolve a run before its first step: what was left open is chosen, what cannot work is refused."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.config import RunConfig
from mae.core.method import MethodConfig, component_of, default_kind
from mae.core.types import SourceNetwork
from mae.data.dataset.images import ImageSet, load_images
from mae.data.dataset.units import check_units
from mae.data.decode.limits import check_workers
from mae.data.loading.loader import IMAGENET_MEAN, IMAGENET_STD
from mae.data.loading.sampler import AllBut, Numbers
from mae.data.sources.names import check_apart, check_exists
from mae.data.sources.open import absolute_source, open_source
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import weights_digest
from mae.masks.schedule import RatioSchedule
from mae.modalities.images.crop import Augmentation
from mae.models.presets import model_config
from mae.pretraining.consistency import check_consistent, check_read
from mae.pretraining.derived import (
    HELD_OUT_SEED,
    advised_batch,
    augmentation_of,
    held_out_of,
    micro_batch,
    num_held_out,
    ratio_schedule,
    steps_per_epoch,
    total_steps,
)
from mae.pretraining.init_weights import InitWeights, fresh_part, inherit_config, open_init_weights
from mae.pretraining.same_images import check_same, told_of
from mae.pretraining.teacher import absolute_path, check_seen, open_teacher
from mae.randomness import FIXED_EPOCH
from mae.records import PixelDtype, check_no_data
from mae.training.device import choose_precision
from mae.training.distributed import World
from mae.training.optimizer import PEAK_RATES
from mae.training.run_folder import RunFolder, new_run_folder
from mae.training.run_records import read_image_facts

_STEPS_AN_EPOCH = 4
_LONGEST_STEM = 100  # bytes; a name may have 255, and more is added to this one
_SMALL_SIDE = 64  # images up to this side are trained at the size they have
DECIDING_FACTS = ("images", "channels", "fingerprint", "listing", "content", "version", "mean", "std")
"""Entries of `data.json` that a run goes on with."""


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
        """Whole batches in an epoch, of the images that are trained on."""
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
        found = self.images.sample(HELD_OUT_SEED, FIXED_EPOCH, count + len(self.held_out))
        return found[~torch.isin(found, self.held_out)].sort().values

    @property
    def part_size(self) -> int:
        """Images that a process computes at once."""
        return micro_batch(self.config, self.world)

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
        check_read(config, given)
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
    check_consistent(config, len(images), world)
    return config


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


def default_place(config: RunConfig) -> tuple[Path, str]:
    """Where the folder of a resolved run is made where none is told, and its name but for a number."""
    assert config.model is not None
    return Path("runs"), f"{source_stem(config.source)}-{config.model.removeprefix('mae_vit_')}"


def source_stem(source: str) -> str:
    """What a folder made for this source is called after it."""
    plain = re.sub(r"[{}]", "", source.replace(":", "-"))  # a shell would expand braces
    stem = "".join(sign if sign.isprintable() else "-" for sign in Path(plain).stem)
    return stem.encode()[:_LONGEST_STEM].decode(errors="ignore") or "images"
