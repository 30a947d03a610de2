"""The parts of a run, made from its settled configuration."""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from shutil import disk_usage
from typing import Any

import torch
from torch import Tensor, nn

from mae.config import MACHINE_FIELDS, PretrainConfig
from mae.data.augmentation import central_crop
from mae.data.images import ImageSet
from mae.data.limits import UnreadableImage
from mae.data.loaders import TrainingLoader, default_workers, normalise
from mae.data.resident import ResidentLoader
from mae.errors import MAEError, UsageError
from mae.evaluation.yardsticks import Yardsticks, measure_yardsticks
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.probe import probe_of
from mae.models.storage import load_model, model_metadata
from mae.models.zoo import build_model
from mae.pretraining.replay import write_capture
from mae.pretraining.settle import Prepared, warmup_steps
from mae.pretraining.start import begin_with
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.report.panels import draw_panels
from mae.training.checkpoint import folder_step, leftover_bytes
from mae.training.engine import Trainer, TrainingSettings
from mae.training.optimizer import make_optimizer
from mae.training.schedule import WarmupCosine
from mae.training.sharding import shard
from mae.training.state import MODEL, refused

_NUM_PICTURED = 8
_SPARE = 256
_YARDSTICK_IMAGES, _YARDSTICK_BATCH = 512, 64

Loader = TrainingLoader | ResidentLoader


def make_trainer(prepared: Prepared, model: MaskedAutoencoder) -> Trainer:
    """The engine with its optimizer, schedule and batches; with `--shard` the model is divided among the processes."""
    config, total_steps = prepared.config, prepared.total_steps
    assert config.batch_size is not None
    settings = TrainingSettings(
        total_steps=total_steps,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        schedule=WarmupCosine(
            peak=peak_rate(config),
            floor=config.min_lr,
            warmup_samples=warmup_steps(config, len(prepared.images)) * config.batch_size,
            total_samples=total_steps * config.batch_size,
        ),
        clip_grad=config.clip_grad,
        precision=config.precision,
        log_every=max(1, min(50, total_steps // 100)),
        save_every=config.save_every,
        keep_every=config.keep_every,
    )
    mirror = None
    if config.shard and prepared.world.size > 1:
        mirror = copy.deepcopy(model) if prepared.world.is_main else None
        shard(model, config.precision)
    trainer = Trainer(
        module=model,
        optimizer=make_optimizer(model, weight_decay=config.weight_decay, betas=config.betas, kind=config.optimizer),
        batches=partial(_batches, prepared, model, make_loader(prepared)),
        settings=settings,
        folder=prepared.folder.checkpoints,
        identity={"data": prepared.found["fingerprint"], "total_steps": total_steps, **_decided(prepared)},
        metadata=partial(metadata_of, prepared),
        device=prepared.device,
        world=prepared.world,
        capture=partial(write_capture, prepared, mirror or model),
    )
    trainer.mirror = mirror
    return trainer


def _decided(prepared: Prepared) -> dict[str, Any]:
    """What a run was told that decides what it learns: a checkpoint of another run is refused by it."""
    told = {name: value for name, value in prepared.config.to_json().items() if name not in MACHINE_FIELDS}
    return {**told, **{f"model's {name}": value for name, value in prepared.model_config.to_json().items()}}


def check_model(prepared: Prepared, path: Path) -> None:
    """See that a checkpoint's weights are those of this run's model, as their own file says.

    Args:
        prepared: the run.
        path: the checkpoint.

    Raises:
        MAEError: they are not, or the file is none of a model.
    """
    try:
        config = load_model(path / MODEL).config
    except MAEError as error:
        raise refused(path, str(error)) from error
    own = prepared.model_config
    if config != own:
        there, here = ({} if each is None else each.to_json() for each in (config, own))
        name = next(name for name in here if there.get(name) != here[name])
        raise refused(path, f"{path / MODEL}: the model's {name} is {there.get(name)}; this run has {here[name]}")


def make_loader(prepared: Prepared) -> Loader:
    """The run's images, as this process is given them.

    Raises:
        UsageError: a batch that does not divide, or images that cannot lie on the device though they are to.
    """
    config = prepared.config
    assert config.batch_size is not None
    loader = TrainingLoader(
        images=prepared.images,
        batch_size=config.batch_size,
        accumulate=config.accumulate,
        img_size=prepared.model_config.img_size,
        seed=config.seed,
        workers=num_workers(prepared),
        augmentation=prepared.augmentation,
        numbers=prepared.kept,
        pin_memory=prepared.device.type == "cuda",
        rank=prepared.world.rank,
        world=prepared.world.size,
        views=config.views,
    )
    return ResidentLoader(loader=loader, device=prepared.device) if config.resident else loader


def some_images(prepared: Prepared, count: int, *, batch_size: int, workers: int = 0, views: int = 1) -> TrainingLoader:
    """Those of the run's images that are quickest to read, cropped as in training, over and over.

    Args:
        prepared: the run.
        count: images to choose among, or more.
        batch_size: crops a batch at most; fewer where there are too few images.
        workers: processes that load.
        views: crops of an image, `batch_size` being a multiple.
    """
    numbers = prepared.near(count)
    return TrainingLoader(
        images=prepared.images,
        batch_size=min(batch_size, views * len(numbers)),
        accumulate=1,
        img_size=prepared.model_config.img_size,
        seed=prepared.config.seed,
        workers=workers,
        augmentation=prepared.augmentation,
        numbers=numbers,
        pin_memory=prepared.device.type == "cuda",
        views=views,
    )


def metadata_of(prepared: Prepared, model: nn.Module) -> dict[str, str]:
    """What a file of the run's model says of it; the probe is of the weights as they are now."""
    assert isinstance(model, MaskedAutoencoder)
    origin = {
        "recipe": prepared.config.recipe,
        "data_source": Path(prepared.config.source).name,
        "data_fingerprint": prepared.found["fingerprint"],
        "init_from": None if prepared.config.init_from is None else Path(prepared.config.init_from).name,
    }
    licence = prepared.found.get("start", {}).get("licence")  # what they come under holds for what is made of them
    return model_metadata(model, licence=licence, origin=origin, probe=probe_of(model))


def fresh_model(prepared: Prepared) -> MaskedAutoencoder:
    """The model as the run begins with it, on its device; the caller's random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(prepared.config.seed)
        model = build_model(prepared.model_config)
    if prepared.start is not None:
        begin_with(model, prepared.start)
    return as_told(model, prepared.config).to(prepared.device)


def as_told(model: MaskedAutoencoder, config: PretrainConfig) -> MaskedAutoencoder:
    """The model itself, its blocks computed again in the backward pass if the run is to do so."""
    for part in (model.encoder, model.decoder):
        part.blocks.recompute = config.recompute
    return model


def peak_rate(config: PretrainConfig) -> float:
    """The highest learning rate: `lr` as it is, or `base_lr` times batch / 256.

    Raises:
        UsageError: neither is set.
    """
    if config.lr is not None:
        return config.lr
    if config.base_lr is None or config.batch_size is None:
        raise UsageError("neither --lr nor --base-lr is set; give one")
    return config.base_lr * config.batch_size / 256


def num_workers(prepared: Prepared) -> int:
    """Processes that load images: those asked for, or what suits device and data."""
    chosen = prepared.config.workers
    if chosen is not None:
        return chosen
    return default_workers(prepared.device.type, prepared.images.in_memory, processes=prepared.world.local_size)


def _batches(
    prepared: Prepared, model: MaskedAutoencoder, loader: Loader, step: int
) -> Generator[Mapping[str, Any], None, None]:
    """What the model's forward is given, from a step on: images and their masks."""
    schedule, steps_per_epoch = prepared.mask_schedule, prepared.steps_per_epoch
    for number, (images, keys) in enumerate(_on_device(prepared, loader, step)):
        ratio = schedule.ratio(step + number // prepared.config.accumulate, steps_per_epoch=steps_per_epoch)
        yield {"images": images, "plan": model.masking.plan(prepared.model_config.grid, keys, ratio)}


def _on_device(prepared: Prepared, loader: Loader, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images and their keys on the run's device, from a step on."""
    device, (mean, std) = prepared.device, prepared.statistics()
    for raw in loader.iterate(step):
        yield normalise(raw.images.to(device, non_blocking=True), mean, std), raw.keys.to(device, non_blocking=True)


def yardsticks_of(prepared: Prepared, model: MaskedAutoencoder) -> Yardsticks:
    """What trivial predictors reach on the run's own first images, cropped as in training, masked as at its end."""
    loader = some_images(prepared, _YARDSTICK_IMAGES, batch_size=_YARDSTICK_BATCH)
    batches = islice(_on_device(prepared, loader, 0), _YARDSTICK_IMAGES // _YARDSTICK_BATCH)
    pairs = ((images, model.masking.plan(prepared.model_config.grid, keys)) for images, keys in batches)
    return measure_yardsticks(model.target, pairs, prepared.model_config.patch_size, loss=model.loss)


def check_disk(prepared: Prepared, model: MaskedAutoencoder, newest: str | None) -> None:
    """Refuse to start where the next checkpoints would not fit.

    A new run needs room for three: two that are kept and one that is written. One that goes on gives up the older of
    the two where it must (see `prune`): it needs room for one beside the newest, and for none where it is over.

    Args:
        prepared: the run.
        model: its model.
        newest: the checkpoint that it goes on from; None or empty: it begins.

    Raises:
        MAEError: there is too little.
    """
    one = 3 * sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())  # and two averages
    folder = prepared.folder
    root = folder.root.absolute()
    there = next(path for path in (root, *root.parents) if path.exists())
    count = 2 if prepared.resume else 3
    if newest:
        count = int(folder_step(Path(newest)) != prepared.total_steps)
    free = disk_usage(there).free + leftover_bytes(folder.checkpoints)
    if free < count * one:
        what = "its next checkpoint needs" if count == 1 else f"{count} checkpoints of this model need"
        raise MAEError(
            f"{folder.root} is on a disk with {free / 1e9:.2f} GB free; {what} {count * one / 1e9:.2f} GB; free space "
            f"there{'' if prepared.resume else ' or choose another --out'}"
        )


def panel_drawer(prepared: Prepared, model: MaskedAutoencoder) -> Callable[[int], None]:
    """A function that draws the same images under the same masks each time it is called."""
    config = prepared.model_config
    crops, keys = pictured(prepared.images, config.img_size, seed=prepared.config.seed)
    images = normalise(crops.to(prepared.device), *prepared.statistics())
    plan = model.masking.plan(config.grid, keys.to(prepared.device))

    def draw(step: int) -> None:
        title = f"{prepared.config.model}, step {step} of {prepared.total_steps}"
        path = prepared.folder.panel(step)
        assert config.mean is not None and config.std is not None
        draw_panels(model, images, plan, mean=config.mean, std=config.std, path=path, title=title)

    return draw


def pictured(images: ImageSet, img_size: tuple[int, int], *, seed: int) -> tuple[Tensor, Tensor]:
    """Crops `[8, C, H, W]` of the images that pictures show, the same ones each time, and the keys of their masks."""
    shown = list(islice(readable(images, candidates(images, seed, _NUM_PICTURED)), _NUM_PICTURED))
    crops = torch.stack([central_crop(image, img_size) for _, image in shown])
    return crops, sample_keys(seed, FIXED_EPOCH, torch.tensor([number for number, _ in shown]))


def candidates(images: ImageSet, seed: int, count: int) -> list[int]:
    """Numbers of `count` images that are looked at again and again, and of others in case some cannot be read."""
    return images.sample(seed, FIXED_EPOCH, count + max(count, _SPARE)).tolist()


def readable(images: ImageSet, order: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Numbers and pixels of the images that can be read, in an order."""
    for number in order:
        try:
            yield number, images.get(number)
        except UnreadableImage as error:
            images.report_unreadable([str(error)])
