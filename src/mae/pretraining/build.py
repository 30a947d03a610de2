"""The parts of a run, made from its settled configuration."""

import copy
import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mae import records
from mae.config import is_changeable
from mae.core.kinds import kinds
from mae.core.method import names_of
from mae.data.dataset.images import ImageSet
from mae.data.decode.limits import UnreadableImage
from mae.data.loading.device_loader import DeviceLoader
from mae.data.loading.loader import TrainingLoader, default_workers, normalise
from mae.errors import MAEError
from mae.evaluation.common.baselines import TrivialBaselines, measure_baselines
from mae.evaluation.common.capabilities import predicts_pixels
from mae.modalities.images.crop import central_crop
from mae.models.build import build_model
from mae.models.file import load_model, model_metadata
from mae.models.fingerprint import config_of_file, output_fingerprint
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.preprocess import official_crop_share
from mae.models.reconstruction import reconstruct
from mae.pretraining.capture import write_capture
from mae.pretraining.derived import peak_rate, warmup_steps
from mae.pretraining.init_weights import load_initial_weights
from mae.pretraining.resolve import RunContext
from mae.randomness import FIXED_EPOCH, sample_keys
from mae.report.figures.panels import draw_panels
from mae.report.figures.tones import rgb_channels
from mae.training.checkpoint import check_room, folder_step, state_bytes
from mae.training.engine import Trainer
from mae.training.optimizer import average_bytes, make_optimizer
from mae.training.saver import BackgroundWriter
from mae.training.schedule import WarmupCosine
from mae.training.settings import CheckpointSpec, TrainingSettings
from mae.training.sharding import autocast_if_sharded, shard
from mae.training.state import MODEL, refused

_NUM_PICTURED = 8
_KEPT, _KEPT_BYTES, _WORTH_KEEPING = 10, 10**9, 1000
"""Checkpoints that a run keeps by itself, the most they may take together, and the fewest steps of such a run."""
_SPARE = 256
_BASELINE_IMAGES, _BASELINE_BATCH = 512, 64

Loader = TrainingLoader | DeviceLoader


def make_trainer(prepared: RunContext, model: MaskedAutoencoder) -> Trainer:
    """The engine with its optimizer, schedule and batches; with `--shard` the model is divided among the processes."""
    config, total_steps = prepared.config, prepared.total_steps
    assert config.optim.batch_size is not None
    settings = TrainingSettings(
        total_steps=total_steps,
        batch_size=config.optim.batch_size,
        accumulate=config.machine.accumulate,
        schedule=WarmupCosine(
            peak=peak_rate(config),
            floor=config.optim.min_lr,
            warmup_samples=warmup_steps(config, len(prepared.images)) * config.optim.batch_size,
            total_samples=total_steps * config.optim.batch_size,
        ),
        clip_grad=config.optim.clip_grad,
        precision=config.optim.precision,
        log_every=max(1, min(50, total_steps // 100)),
        checkpoint_every=config.machine.checkpoint_every,
        checkpoint_keep_every=_kept_every(prepared, model),
        # Blocks that are computed again ask for the state of random numbers, which cannot be recorded.
        calmer="Lower the rate (--lr), keep --clip-grad 1, or compute in --precision fp32",
        cuda_graphs=config.machine.cuda_graphs and not config.machine.activation_checkpointing,
    )
    mirror = None
    if config.machine.shard and prepared.world.size > 1:
        mirror = copy.deepcopy(model) if prepared.world.is_main else None
        shard(model, config.optim.precision)
        if model.teacher is not None:
            shard(model.teacher, config.optim.precision, trained=False)
    return Trainer(
        module=model,
        optimizer=make_optimizer(
            model, weight_decay=config.optim.weight_decay, betas=config.optim.betas, kind=config.optim.optimizer
        ),
        batches=partial(_batches, prepared, make_loader(prepared)),
        prepare=partial(_with_plan, model),
        settings=settings,
        checkpoints=CheckpointSpec(
            folder=prepared.folder.checkpoints,
            identity={"data": prepared.found["fingerprint"], "total_steps": total_steps, **_decided(prepared)},
            metadata=partial(metadata_of, prepared),
        ),
        device=prepared.device,
        world=prepared.world,
        capture=partial(write_capture, prepared, mirror or model),
        mirror=mirror,
    )


def _decided(prepared: RunContext) -> dict[str, Any]:
    """What a run was told that decides what it learns: a checkpoint of another run is refused by it."""
    flat = {name: value for name, value in prepared.config.flat().items() if not is_changeable(name)}
    flat["source"] = prepared.found.get("source", flat["source"])  # as it was begun: its images may have moved since
    # Terms that are not there have no say: a package that brings others may come or go.
    there = {term.kind for term in prepared.method.terms}
    absent = {name for kind in kinds("terms") if kind not in there for name in names_of("term", kind)}
    return json.loads(records.json_text({name: value for name, value in flat.items() if name not in absent}))


def check_model(prepared: RunContext, path: Path) -> None:
    """See that a checkpoint's weights are those of this run's model, as their own file says.

    Args:
        prepared: the run.
        path: the checkpoint.

    Raises:
        MAEError: they are not, or the file is none of a model.
    """
    try:
        config = load_model(path / MODEL, merged=False).config
    except MAEError as error:
        raise refused(path, str(error)) from error
    config, own = (None if each is None else config_of_file(each) for each in (config, prepared.method))
    if config != own:
        there, here = ({} if each is None else each.flat() for each in (config, own))
        name = next(name for name in here if there.get(name) != here[name])
        raise refused(path, f"{path / MODEL}: the model's {name} is {there.get(name)}; this run has {here[name]}")


def make_loader(prepared: RunContext) -> Loader:
    """The run's images, as this process is given them.

    Raises:
        UsageError: a batch that does not divide, or images that cannot lie on the device though they are to.
    """
    config = prepared.config
    assert config.optim.batch_size is not None
    loader = TrainingLoader(
        images=prepared.images,
        batch_size=config.optim.batch_size,
        accumulate=config.machine.accumulate,
        img_size=prepared.method.tokenizer.img_size,
        seed=config.optim.seed,
        workers=num_workers(prepared),
        augmentation=prepared.augmentation,
        numbers=prepared.kept,
        pin_memory=prepared.device.type == "cuda",
        rank=prepared.world.rank,
        world=prepared.world.size,
        views=config.data.repeated_aug,
    )
    return DeviceLoader(loader=loader, device=prepared.device) if config.machine.cache_on_device else loader


def some_images(
    prepared: RunContext, count: int, *, batch_size: int, workers: int = 0, views: int = 1
) -> TrainingLoader:
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
        img_size=prepared.method.tokenizer.img_size,
        seed=prepared.config.optim.seed,
        workers=workers,
        augmentation=prepared.augmentation,
        numbers=numbers,
        pin_memory=prepared.device.type == "cuda",
        views=views,
    )


def metadata_of(prepared: RunContext, model: nn.Module) -> dict[str, str]:
    """What a file of the run's model says of it; the probe is of the weights as they are now."""
    assert isinstance(model, MaskedAutoencoder)
    origin = {
        "recipe": prepared.config.recipe,
        "data_source": Path(prepared.config.source).name,
        "data_fingerprint": prepared.found["fingerprint"],
        "init_from": None if prepared.config.init_from is None else Path(prepared.config.init_from).name,
    }
    licence = prepared.found.get("start", {}).get("licence")  # what they come under holds for what is made of them
    return model_metadata(model, licence=licence, origin=origin, probe=output_fingerprint(model))


def fresh_model(prepared: RunContext) -> MaskedAutoencoder:
    """The model as the run begins with it, on its device; the caller's random numbers stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(prepared.config.optim.seed)
        model = build_model(prepared.method, activation_checkpointing=prepared.config.machine.activation_checkpointing)
    if prepared.start is not None:
        load_initial_weights(model, prepared.start)
    model = model.to(prepared.device)
    model.hand_in(prepared.network)
    return model


def num_workers(prepared: RunContext) -> int:
    """Processes that load images: those asked for, or what suits device and data."""
    chosen = prepared.config.machine.workers
    if chosen is not None:
        return chosen
    return default_workers(prepared.device.type, prepared.images.in_memory, processes=prepared.world.local_size)


def _batches(prepared: RunContext, loader: Loader, step: int) -> Generator[Mapping[str, Any], None, None]:
    """What `_with_plan` is given, from a step on: images, and what their masks are drawn by."""
    schedule, steps_per_epoch = prepared.mask_schedule, prepared.steps_per_epoch
    for number, (images, keys) in enumerate(_on_device(prepared, loader, step)):
        done = step + number // prepared.config.machine.accumulate
        ratio = schedule.ratio(done, steps_per_epoch=steps_per_epoch)
        yield {
            "images": images,
            "keys": keys,
            "ratio": ratio,
            "progress": done / prepared.total_steps,
            "views": prepared.config.data.repeated_aug,
        }


def _with_plan(model: MaskedAutoencoder, batch: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's forward is given: images and their masks."""
    images, keys = batch["images"], batch["keys"]
    plan = model.plan(images, keys=keys, ratio=batch["ratio"], progress=batch["progress"])
    return {"images": images, "plan": plan, "keys": keys, "views": batch["views"]}


def _on_device(prepared: RunContext, loader: Loader, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalised images and their keys on the run's device, from a step on."""
    device, (mean, std) = prepared.device, prepared.statistics()
    for raw in loader.iterate(step):
        yield normalise(raw.images.to(device, non_blocking=True), mean, std), raw.keys.to(device, non_blocking=True)


def baselines_of(prepared: RunContext, model: MaskedAutoencoder) -> TrivialBaselines:
    """What trivial predictors reach on the run's own first images, cropped as in training, masked as at its end."""
    loader = some_images(prepared, _BASELINE_IMAGES, batch_size=_BASELINE_BATCH)
    batches = islice(_on_device(prepared, loader, 0), _BASELINE_IMAGES // _BASELINE_BATCH)
    pairs = ((images, model.plan(images, keys=keys)) for images, keys in batches)
    with autocast_if_sharded(model, prepared.config.optim.precision, prepared.device):  # at its end a teacher is asked
        return measure_baselines(
            model.target,
            model.tokenizer,
            pairs,
            loss=model.loss,
            taught=model.taught,
            width=prepared.method.outputs["target"],
        )


def kept_every(asked: int | None, *, steps: int, num_bytes: int) -> int | None:
    """Steps between checkpoints that are kept for good: as asked, else a tenth of a run whose ten take little room.

    Args:
        asked: by the user; None: nothing.
        steps: of the whole run.
        num_bytes: of one checkpoint.

    Returns:
        None: none are kept.
    """
    if asked is not None or steps < _WORTH_KEEPING or _KEPT * num_bytes > _KEPT_BYTES:
        return asked
    return ceil(steps / _KEPT)


def _kept_every(prepared: RunContext, model: MaskedAutoencoder) -> int | None:
    asked = prepared.config.machine.checkpoint_keep_every
    return kept_every(asked, steps=prepared.total_steps, num_bytes=_checkpoint_bytes(prepared, model))


def _checkpoint_bytes(prepared: RunContext, model: MaskedAutoencoder) -> int:
    saved = state_bytes(model) + average_bytes(model, kind=prepared.config.optim.optimizer)
    return saved if model.teacher is None else saved + state_bytes(model.teacher)


def check_disk(prepared: RunContext, model: MaskedAutoencoder, newest: str | None) -> None:
    """Refuse to start where the next checkpoints would not fit.

    A new run needs room for three, the newest two and one that is written, and for those that are kept for good. One
    that goes on gives up the older of the two where it must (see `prune`): it needs room for one beside the newest, and
    for none where it is over.

    Args:
        prepared: the run.
        model: its model.
        newest: the checkpoint that it goes on from; None or empty: it begins.

    Raises:
        MAEError: there is too little.
    """
    every = _kept_every(prepared, model)
    kept = 0 if every is None else prepared.total_steps // every
    count = 2 if prepared.resume else 3 + kept
    if newest:
        count = int(folder_step(Path(newest)) != prepared.total_steps)
    instead = "" if prepared.resume else " or choose another --out"
    check_room(prepared.folder.checkpoints, count=count, num_bytes=_checkpoint_bytes(prepared, model), instead=instead)


def panel_drawer(prepared: RunContext, model: MaskedAutoencoder, writer: BackgroundWriter) -> Callable[[int], None]:
    """A function that draws the same images under the same masks each time it is called; nothing where it cannot.

    The model predicts at once; `writer` makes a picture of it while the training goes on.
    """
    if not predicts_pixels(model):
        return lambda step: None  # a task all the same: every process has as many
    config = prepared.method
    rgb = rgb_channels(config.tokenizer.channels, prepared.config.machine.rgb)
    crops, keys = pictured(prepared.images, config.tokenizer.img_size, seed=prepared.config.optim.seed)
    on_device = normalise(crops.to(prepared.device), *prepared.statistics())
    plan = model.plan(on_device, keys=keys)
    images = on_device.cpu()  # and so are the views of them: the thread that draws must not wait for a GPU

    def draw(step: int) -> None:
        title = f"{prepared.config.model}, step {step} of {prepared.total_steps}"
        path = prepared.folder.panel(step)
        assert config.tokenizer.mean is not None and config.tokenizer.std is not None
        views = reconstruct(model, images, plan)
        statistics = {"mean": config.tokenizer.mean, "std": config.tokenizer.std}
        writer.begin(partial(draw_panels, images, views, **statistics, rgb=rgb, path=path, title=title))

    return draw


def evaluated_crop(image: Tensor, size: tuple[int, int]) -> Tensor:
    """What evaluations see of an image `[C, h, w]`, which numbers and pictures of a run therefore show too."""
    return central_crop(image, size, official_crop_share(size))


def pictured(images: ImageSet, img_size: tuple[int, int], *, seed: int) -> tuple[Tensor, Tensor]:
    """Crops `[8, C, H, W]` of the images that pictures show, the same ones each time, and the keys of their masks."""
    shown = list(islice(readable(images, candidates(images, seed, _NUM_PICTURED)), _NUM_PICTURED))
    crops = torch.stack([evaluated_crop(image, img_size) for _, image in shown])
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
