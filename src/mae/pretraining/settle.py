"""Everything that is settled before the first step: what was left open is chosen, what cannot work is refused."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.config import MACHINE_FIELDS, PretrainConfig
from mae.data.augmentation import Augmentation
from mae.data.images import ImageSet, load_images
from mae.data.limits import check_workers
from mae.data.loaders import IMAGENET_MEAN, IMAGENET_STD
from mae.data.order import AllBut, Numbers
from mae.data.pack_format import MANIFEST
from mae.data.sources import absolute_source, open_source
from mae.data.units import check_units
from mae.errors import UsageError
from mae.masking.random import RandomMasking
from mae.masking.schedule import RatioSchedule
from mae.models.config import ModelConfig
from mae.models.zoo import model_config
from mae.pretraining.same_images import check_same, told_of
from mae.pretraining.start import Start, as_weights_say, fresh_part, open_start
from mae.randomness import FIXED_EPOCH
from mae.records import PixelDtype
from mae.training.device import choose_precision
from mae.training.distributed import World
from mae.training.run_folder import RunFolder, new_run_folder
from mae.training.run_records import read_image_facts

_OBJECTIVE = (
    "decoder",
    "mask_ratio",
    "predict_share",
    "norm_pix_loss",
    "low_pass",
    "loss",
    "laplacian",
    "laplacian_raw",
    "uniformity",
    "uniformity_form",
    "focal_frequency",
)
"""Fields of both configurations that say what is learned, not what learns it."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 16, 2000
"""Images: of fewer a mean loss tells nothing, of more it tells no more."""
_HELD_OUT_SEED = 0  # of any run, so that runs that differ in their seed are told by the same images
_LONGEST_STEM = 100  # bytes; a name may have 255, and more is added to this one
_SMALL_SIDE = 64  # images up to this side are trained at the size they have
DECIDING_FACTS = ("images", "channels", "fingerprint", "listing", "content", "version", "mean", "std")
"""Entries of `data.json` that a run goes on with."""
FEW_STEPS_AN_EPOCH = 50
"""With fewer each step holds more than a fiftieth of all images: smaller batches give more steps for the same work."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that is settled before the first step."""

    config: PretrainConfig
    model_config: ModelConfig
    images: ImageSet
    note: str
    found: Mapping[str, Any]
    folder: RunFolder
    device: torch.device
    world: World
    resume: bool
    start: Start | None = None

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
        """Numbers of the images that are not trained on; of images in blocks those of few blocks, as all are read."""
        count = num_held_out(self.config, len(self.images))
        return self.images.sample(_HELD_OUT_SEED, FIXED_EPOCH, count).sort().values

    def near(self, count: int) -> Numbers:
        """Images that are trained on, `count` or more: of images in blocks those of few blocks, else all of them."""
        if self.images.block_sizes is None:
            return self.kept
        found = self.images.sample(_HELD_OUT_SEED, FIXED_EPOCH, count + len(self.held_out))
        return found[~torch.isin(found, self.held_out)].sort().values

    @property
    def part_size(self) -> int:
        """Images that a process computes at once."""
        return _part_size(self.config, self.world)

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
        return Augmentation(scale=self.config.crop_scale)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Channel means and deviations `[C]` on the run's device."""
        assert self.model_config.mean is not None and self.model_config.std is not None
        mean, std = torch.tensor([self.model_config.mean, self.model_config.std], device=self.device)
        return mean, std


def prepare(
    config: PretrainConfig,
    folder: RunFolder | None,
    device: torch.device,
    world: World,
    *,
    resume: bool,
    given: Collection[str] = (),
    memory_limit: int | None = None,
) -> Prepared:
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
    check_workers(config.workers)
    start, weights = None, weights_of(folder) if resume else None
    if not resume and (start := find_start(config, world)) is not None:
        config, weights = as_weights_say(config, given, start), start.config
    if config.model is not None:  # refuse a wrong name or size before images are read, which can take minutes
        _model_config(config, config.model, weights, in_chans=config.in_chans)
    with world.main_first():  # a download goes to one folder
        source = open_source(config.source, data_root=config.data_root)
    images = load_images(
        source,
        in_chans=config.in_chans,
        channels=config.channels,
        no_data=config.no_data,
        pixel_dtype=unit_of(config, weights),
        max_unreadable=config.max_unreadable,
        memory_limit=memory_limit,
        processes=world.local_size,
    )
    config, model = settle(config, images, device, world, weights)
    assert config.model is not None
    if folder is None:
        folder = new_run_folder(*default_place(config))
    if not resume:
        _check_apart(folder.root, config.source)
    found, hint = world.from_main(partial(_found_data, config, model, images, folder, start, resume=resume))
    model = replace(model, mean=tuple(found["mean"]), std=tuple(found["std"]))
    return Prepared(
        config=config,
        model_config=model,
        images=images,
        note=f"{source.note}; {hint}" if hint else source.note,
        found=found,
        folder=folder,
        device=device,
        world=world,
        resume=resume,
        start=start,
    )


def settle(
    config: PretrainConfig,
    images: ImageSet,
    device: torch.device,
    world: World,
    weights: ModelConfig | None = None,
) -> tuple[PretrainConfig, ModelConfig]:
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
    if config.statistics == "model" and weights is None:
        raise UsageError("--statistics is model, which means those of --init-from; give that, or --statistics data")
    config = _choose(config, weights, images, device)
    assert config.model is not None
    model = _model_config(config, config.model, weights, in_chans=images.channels)
    model = replace(model, pixel_dtype=images.pixel_dtype)
    _check_warmups(config, len(images))
    if config.mask_schedule != "const":
        RandomMasking(ratio=config.mask_start).num_visible(model.grid)
    if config.shard and config.precision == "fp16":
        raise UsageError("--shard trains in bf16 or fp32, and --precision is fp16; give one of these")
    if config.uniformity and _part_size(config, world) * world.size < 2:
        raise UsageError(
            f"--uniformity compares the images of a batch, and --batch-size {config.batch_size} in --accumulate "
            f"{config.accumulate} parts leaves one; use larger batches or fewer parts"
        )
    if config.uniformity and config.views > 1:
        raise UsageError(
            f"--uniformity drives the images of a batch apart, and with --views {config.views} some are views of the "
            "same image; leave one of the two out"
        )
    return config, model


def unit_of(config: PretrainConfig, weights: ModelConfig | None) -> PixelDtype | None:
    """What the unit of the images is where the run takes over the statistics of its weights; None: their files' own."""
    return weights.pixel_dtype if weights is not None and config.statistics == "model" else None


def find_start(config: PretrainConfig, world: World) -> Start | None:
    """The weights that a run begins with; None: fresh ones.

    Raises:
        UsageError: see `open_start`.
        MAEError: see `open_start`.
    """
    if config.init_from is None:
        return None
    with world.main_first():  # what is wrong with a file is then said once
        return open_start(config.init_from)


def total_steps(config: PretrainConfig, num_images: int) -> int:
    """Optimizer steps of a settled run."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None
    return max(1, round(config.epochs * steps_per_epoch(config, num_images)))


def num_held_out(config: PretrainConfig, num_images: int) -> int:
    """How many images of a source are not trained on; none where they would be too few to tell anything."""
    count = min(int(config.held_out * num_images), _MOST_HELD_OUT)
    return count if count >= _LEAST_HELD_OUT else 0


def warmup_steps(config: PretrainConfig, num_images: int) -> float:
    """Steps of a settled run in which the rate rises: a tenth of them unless it was told otherwise."""
    if config.warmup_epochs is None:
        return 0.1 * total_steps(config, num_images)
    return config.warmup_epochs * steps_per_epoch(config, num_images)


def steps_per_epoch(config: PretrainConfig, num_images: int) -> int:
    """Whole batches in a pass over the images of a settled run that are trained on."""
    return (num_images - num_held_out(config, num_images)) // images_per_step(config)


def images_per_step(config: PretrainConfig) -> int:
    """Different images in a batch of a settled run; each is in it as often as the run has views of it."""
    assert config.batch_size is not None
    return config.batch_size // config.views


def ratio_schedule(config: PretrainConfig) -> RatioSchedule:
    """How much a run hides, step by step."""
    return RatioSchedule(
        kind=config.mask_schedule,
        start=config.mask_start,
        end=config.mask_ratio,
        warmup=config.mask_warmup,
        seed=config.seed,
    )


def in_smaller_parts(config: PretrainConfig) -> str:
    """What to do where a step takes too much memory."""
    return f"compute the batch in parts with --accumulate {2 * config.accumulate} or more{told_of_parts(config)}"


def told_of_parts(config: PretrainConfig) -> str:
    """What else changes with the number of parts of a batch; empty: nothing."""
    return "; --uniformity then compares the images of a part alone" if config.uniformity else ""


def advised_batch(config: PretrainConfig, num_images: int) -> int:
    """A batch that makes enough steps an epoch; of very few images one that leaves two steps, if any does."""
    trained = num_images - num_held_out(config, num_images)
    return config.views * min(max(2, num_images // FEW_STEPS_AN_EPOCH), max(1, trained // 2))


def _part_size(config: PretrainConfig, world: World) -> int:
    assert config.batch_size is not None
    return config.batch_size // (config.accumulate * world.size)


def _model_config(
    config: PretrainConfig, name: str, weights: ModelConfig | None, *, in_chans: int | None
) -> ModelConfig:
    """The model of a name, or that of the weights to begin with, with what the run says otherwise."""
    if in_chans is None and config.channels is not None:
        in_chans = len(config.channels)
    values = {
        "img_size": config.img_size,
        "patch_size": config.patch_size,
        "in_chans": in_chans,
        "channels": config.channels,
        "no_data": config.no_data,
        "mlp_ratio": config.mlp_ratio,
        "decoder_depth": config.decoder_depth,
        "cls_token": config.cls_token,
        "pos_embed": config.pos_embed,
        **{name: getattr(config, name) for name in _OBJECTIVE},
    }
    told = {key: value for key, value in values.items() if value is not None}
    return model_config(name, **told) if weights is None else replace(weights, **told)


def _choose(
    config: PretrainConfig, weights: ModelConfig | None, images: ImageSet, device: torch.device
) -> PretrainConfig:
    """The configuration with everything chosen that was left to the source and the machine."""
    smallest, largest = images.size_range()
    tiny = max(largest) <= _SMALL_SIDE
    big_model = "mae_vit_compact_patch16" if device.type == "cpu" else "mae_vit_base_patch16_dec512d8b"
    name = config.model or ("mae_vit_lesson_patch4" if tiny else big_model)
    img_size, patch_size = config.img_size, config.patch_size
    if config.model is None and tiny and img_size is None and smallest == largest:
        img_size = smallest
        patch_size = patch_size or (_small_patch(img_size[0]), _small_patch(img_size[1]))
    sized = replace(config, img_size=img_size, patch_size=patch_size)
    model = _model_config(sized, name, weights, in_chans=images.channels)
    usual_batch = 64 if device.type == "cpu" else 256
    trained = len(images) - num_held_out(config, len(images))
    batch_size = config.batch_size or config.views * max(1, min(usual_batch // config.views, trained))
    if batch_size % config.views:
        raise UsageError(
            f"--batch-size is {batch_size}, --views {config.views}; expected a batch of as many views of every image: "
            f"a multiple of {config.views}"
        )
    if batch_size // config.views > trained:
        held_out = "" if trained == len(images) else f", {len(images) - trained} of them held out"
        raise UsageError(
            f"--batch-size is {batch_size}, but {config.source} holds {len(images)} images{held_out}; "
            f"use --batch-size {advised_batch(config, len(images))}"
        )
    return replace(
        config,
        source=absolute_source(config.source),
        monitor=None if config.monitor is None else absolute_source(config.monitor),
        data_root=config.data_root.resolve(),
        precision=choose_precision(config.precision, device),  # type: ignore[arg-type]
        model=name,
        init_from=None if config.init_from is None else _absolute(config.init_from),
        img_size=model.img_size,
        patch_size=model.patch_size,
        in_chans=images.channels,
        channels=images.channel_names,
        mlp_ratio=model.mlp_ratio,
        decoder_depth=model.decoder_depth,
        cls_token=model.cls_token,
        pos_embed=model.pos_embed,  # type: ignore[arg-type]
        epochs=100.0 if config.epochs is None and config.steps is None else config.epochs,
        batch_size=batch_size,
    )


def _small_patch(side: int) -> int:
    """For tiny images: the largest patch that divides the side and leaves seven or more of them along it."""
    return max((patch for patch in range(2, side // 7 + 1) if side % patch == 0), default=2)


def _check_warmups(config: PretrainConfig, num_images: int) -> None:
    epochs = total_steps(config, num_images) / steps_per_epoch(config, num_images)
    rate, ratio = config.warmup_epochs, config.mask_warmup
    # The rate must come down again; the mask ratio may take the whole run to get where it ends.
    if rate is not None and rate >= epochs:
        flag, warmup = "--warmup-epochs", rate
    elif config.mask_schedule in ("linear", "cosine") and ratio > epochs:
        flag, warmup = "--mask-warmup", ratio
    else:
        return
    raise UsageError(
        f"the warm-up ({flag}) is {warmup:g} epochs, but the whole run has {epochs:.3g} epochs; give a shorter one"
    )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if Path(path).exists() else path


def weights_of(folder: RunFolder | None) -> ModelConfig | None:
    """The configuration of the weights that a run began with, for its own need not be any named model's."""
    begun = None if folder is None else read_image_facts(folder.data, needed=DECIDING_FACTS).get("start")
    if folder is None or begun is None:
        return None
    try:
        return ModelConfig.from_json(begun["model"])
    except UsageError as error:
        raise UsageError(f"{folder.data}: start: {error}; put back what was edited by hand") from error


def _found_start(start: Start, model: ModelConfig) -> dict[str, Any]:
    words = {
        "decoder.": "a fresh decoder",
        "decoder.pred.": "a fresh last layer of the decoder",
        "encoder.norm.": "a fresh last norm of the encoder",
    }
    return {
        "model": start.config.to_json(),
        "loaded": start.line,
        "fresh": " and ".join(words[name] for name in fresh_part(start, model)) or None,
        "licence": start.licence,
    }


def _found_data(
    config: PretrainConfig,
    model: ModelConfig,
    images: ImageSet,
    folder: RunFolder,
    start: Start | None,
    *,
    resume: bool,
) -> tuple[dict[str, Any], str]:
    """What the source holds, and what `check_same` says: a resumed run must find what it found before."""
    if resume:
        found = read_image_facts(folder.data, needed=DECIDING_FACTS)
        if found["channels"] != images.channels:
            raise UsageError(
                f"{folder.data}: channels is {found['channels']}; expected {images.channels}, as the images have; put "
                "back what was edited by hand"
            )
        return found, check_same(images, found, source=config.source, begun=str(folder.root))
    if config.statistics == "imagenet" and images.channels != 3:
        raise UsageError(
            f"--statistics imagenet is for 3 channels, these images have {images.channels}; use --statistics data"
        )
    if config.statistics == "model":
        assert start is not None and start.config.mean is not None and start.config.std is not None
        mean, std = start.config.mean, start.config.std
        check_units(images, mean=mean, std=std, pixel_dtype=start.config.pixel_dtype)
    else:
        mean, std = (IMAGENET_MEAN, IMAGENET_STD) if config.statistics == "imagenet" else images.statistics()
    told = {
        "source": config.source,
        **told_of(images),
        "channels": images.channels,
        "channel_names": images.channel_names,
        # Six digits are plenty, and hide that sums round differently on other machines.
        "mean": [float(f"{value:.6g}") for value in mean],
        "std": [float(f"{value:.6g}") for value in std],
        "unreadable": list(images.unreadable),
        **({} if start is None else {"start": _found_start(start, model)}),
    }
    return told, ""


def stored_config(
    config: PretrainConfig, folder: RunFolder | None, given: Collection[str]
) -> tuple[PretrainConfig, RunFolder]:
    """The configuration of the run to go on with; only what belongs to the machine may be changed."""
    if folder is None:
        raise UsageError("--resume needs --out: the folder of the run to go on with")
    if not folder.holds_run:
        raise UsageError(f"{folder.root} holds no run to go on with (no {folder.config.name} there)")
    stored = PretrainConfig.read(folder.config)
    asked, begun = config.to_json(), stored.to_json()
    asked["source"] = absolute_source(config.source)
    asked["init_from"] = None if config.init_from is None else _absolute(config.init_from)
    differing = [name for name in given if name not in MACHINE_FIELDS and asked[name] != begun[name]]
    if differing:
        changes = "; ".join(f"{name} was {begun[name]!r}, is now {asked[name]!r}" for name in differing)
        raise UsageError(
            f"the run in {folder.root} was begun otherwise: {changes}. Leave those options out to go on with it, "
            "or start a new run in another folder"
        )
    machine = {name: asked[name] for name in given if name in MACHINE_FIELDS}
    if stored.uniformity and machine.get("accumulate", stored.accumulate) != stored.accumulate:
        raise UsageError(
            f"--accumulate was {stored.accumulate}, is now {machine['accumulate']}: --uniformity compares the images "
            "of a part, so this would be another objective. Leave the option out, or start a new run"
        )
    return stored.override(machine), folder


def _check_apart(folder: Path, source: str) -> None:
    """Refuse a run inside the images: what it draws would be taken for images, and a resume would find others."""
    images = Path(source)
    if (images / "train").is_dir():  # the other parts are not trained on
        images = images / "train"
    if images.is_dir() and not (images / MANIFEST).is_file() and folder.resolve().is_relative_to(images.resolve()):
        raise UsageError(
            f"{folder} is inside {images}, where the pictures of the run would be taken for images; choose an --out "
            "that is not"
        )


def default_place(config: PretrainConfig) -> tuple[Path, str]:
    """Where the folder of a settled run is made where none is told, and its name but for a number."""
    assert config.model is not None
    return Path("runs"), f"{source_stem(config.source)}-{config.model.removeprefix('mae_vit_')}"


def source_stem(source: str) -> str:
    """What a folder made for this source is called after it."""
    plain = re.sub(r"[{}]", "", source.replace(":", "-"))  # a shell would expand braces
    stem = "".join(sign if sign.isprintable() else "-" for sign in Path(plain).stem)
    return stem.encode()[:_LONGEST_STEM].decode(errors="ignore") or "images"
