"""The step that ended a run, written down so that it can be seen again."""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors.torch import save_file
from torch import Tensor, nn

from mae.config import Precision, PretrainConfig
from mae.data.augmentation import Augmentation
from mae.data.crops import Crops
from mae.data.images import ImageSet, load_images
from mae.data.loaders import normalise
from mae.data.order import make_shuffle
from mae.data.sources import open_source
from mae.errors import MAEError, UsageError
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.models.storage import load_model, model_metadata
from mae.pretraining.same_images import check_same
from mae.pretraining.settle import DECIDING_FACTS, Prepared, images_per_step, unit_of, weights_of
from mae.randomness import sample_keys, view_keys
from mae.records import read_record, shown, to_json, write_json
from mae.training.device import autocast, choose_device
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts
from mae.training.state import MODEL
from mae.types import MaskPlan

CAPTURE = "capture.json"


@dataclass(frozen=True, kw_only=True)
class _Capture:
    """What `capture.json` holds: a step, its images by number, and how it was computed.

    Raises:
        UsageError: a value that no step has.
    """

    step: int
    epoch: int
    seed: int
    ids: tuple[int, ...]
    mask_ratio: float
    precision: Precision

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "seed"):
            if not 0 <= (value := getattr(self, name)) < 1 << 63:
                raise UsageError(f"{name} is {value}; expected a whole number from 0 to below 2 to the power of 63")
        if not self.ids or min(self.ids) < 0:
            raise UsageError(f"ids is {shown(self.ids)}; expected numbers of images")
        if not 0 < self.mask_ratio < 1:
            raise UsageError(f"mask_ratio is {self.mask_ratio}; expected a share between 0 and 1, both excluded")


def write_capture(prepared: Prepared, model: MaskedAutoencoder, step: int) -> Path:
    """Write down the step after `step` steps: its images, and the weights as they are.

    Returns:
        The folder it is in.

    Raises:
        MAEError: it cannot be written.
    """
    config, folder = prepared.config, prepared.folder.failure(step)
    epoch, place = divmod(step, prepared.steps_per_epoch)
    sizes = prepared.images.block_sizes
    order = make_shuffle(prepared.kept, sizes, batch_size=images_per_step(config), seed=config.seed).epoch(epoch)
    ids = order.ids(place, 0, images_per_step(config))
    values = _Capture(
        step=step,
        epoch=epoch,
        seed=config.seed,
        ids=tuple(ids.tolist()),
        mask_ratio=prepared.mask_schedule.ratio(step, steps_per_epoch=prepared.steps_per_epoch),
        precision=config.precision,
    )
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_file(weights, aside / MODEL, metadata=model_metadata(model))
        write_json(aside / CAPTURE, to_json(values))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise MAEError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A captured step, computed again.

    Attributes:
        step: optimizer steps before it.
        loss: the loss of the whole batch; may be nan or inf.
        grad_norm: the norm of its gradient; likewise.
        broken_images: names of the images whose own loss is not finite.
        broken_at: name of the first part of the model whose output is not finite, empty where there is none.
        broken_gradients: names of the parameters whose gradient is not finite.
    """

    step: int
    loss: float
    grad_norm: float
    broken_images: tuple[str, ...]
    broken_at: str
    broken_gradients: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """Whether it broke again."""
        return not (isfinite(self.loss) and isfinite(self.grad_norm))


def replay(path: Path, *, device: str = "auto") -> Replayed:
    """Compute a captured step again: same images, crops, masks, weights and precision.

    Args:
        path: the folder of a capture, or of a run, whose newest capture is taken.
        device: where to compute; another device may round otherwise.

    Raises:
        UsageError: there is no capture, or the images are not those of the run.
        MAEError: something of it cannot be read.
    """
    capture = _find(path)
    values, run = read_record(_Capture, capture / CAPTURE, what="entry"), RunFolder(capture.parent.parent)
    config, found = PretrainConfig.read(run.config), read_image_facts(run.data, needed=DECIDING_FACTS)
    images = load_images(
        open_source(config.source, data_root=config.data_root),
        in_chans=config.in_chans,
        channels=config.channels,
        no_data=config.no_data,
        pixel_dtype=unit_of(config, weights_of(run)),
        max_unreadable=config.max_unreadable,
        memory_limit=0,  # only one batch is needed
    )
    check_same(images, found, source=config.source, begun=str(run.root))
    _check_fit(capture / CAPTURE, values, config, len(images))
    chosen = choose_device(device)
    model = load_model(capture / MODEL).to(chosen).train()
    return _compute(model, _parts(config, images, found, model, values, chosen), images, values)


def _check_fit(file: Path, values: _Capture, config: PretrainConfig, num_images: int) -> None:
    batch = images_per_step(config)
    if max(values.ids) >= num_images or len(values.ids) != batch:
        raise UsageError(
            f"{file}: ids holds {len(values.ids)} numbers up to {max(values.ids)}; expected the {batch} images of a "
            f"step, of {num_images}"
        )


def _find(path: Path) -> Path:
    """The capture that is meant."""
    if (path / CAPTURE).is_file():
        return path
    captures = sorted(folder for folder in (path / "failures").glob("step-*") if (folder / CAPTURE).is_file())
    if not captures:
        raise UsageError(
            f"{path} holds no captured step; expected the folder of a run that ended because its loss was not finite, "
            "or a folder under its failures/"
        )
    return captures[-1]


_Part = tuple[Tensor, MaskPlan, Int64[Tensor, " b"]]


def _parts(
    config: PretrainConfig,
    images: ImageSet,
    found: Mapping[str, Any],
    model: MaskedAutoencoder,
    values: _Capture,
    device: torch.device,
) -> list[_Part]:
    """Normalised crops of each part of the batch, their masks, and the numbers of the images shown."""
    assert model.config is not None and config.img_size is not None
    ids = torch.tensor(values.ids)
    keys = view_keys(sample_keys(values.seed, values.epoch, ids), config.views)
    crops = Crops(
        images=images, numbers=ids, img_size=config.img_size, augmentation=Augmentation(scale=config.crop_scale)
    )
    mean, std = torch.tensor([found["mean"], found["std"]], device=device)
    parts = []
    shown = ids.repeat_interleave(config.views)
    for some, their_keys in zip(shown.chunk(config.accumulate), keys.chunk(config.accumulate), strict=True):
        piece = crops[some.tolist(), their_keys.tolist()]
        if piece.images is None:
            raise MAEError(f"{images.name}: images of the step cannot be read any more: {piece.unreadable[0]}")
        plan = model.masking.plan(model.config.grid, their_keys.to(device), values.mask_ratio)
        parts.append((normalise(piece.images.to(device), mean, std), plan, piece.shown))
    return parts


def _compute(model: MaskedAutoencoder, parts: Sequence[_Part], images: ImageSet, values: _Capture) -> Replayed:
    device = parts[0][0].device
    losses: list[float] = []
    broken: list[str] = []
    with _first_broken(model) as broken_at:
        for crops, plan, numbers in parts:
            with autocast(values.precision, device):
                loss = model(crops, plan=plan).loss
            (loss / len(parts)).backward()
            losses.append(float(loss.detach()))
            broken += [images.item_name(int(numbers[place])) for place in _broken_images(model, crops, plan, values)]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Replayed(
        step=values.step,
        loss=sum(losses) / len(losses),
        grad_norm=float(nn.utils.get_total_norm(list(gradients.values()))),
        broken_images=tuple(dict.fromkeys(broken)),
        broken_at=broken_at[0] if broken_at else "",
        broken_gradients=tuple(name for name, grad in gradients.items() if not bool(grad.isfinite().all())),
    )


def _broken_images(model: MaskedAutoencoder, crops: Tensor, plan: MaskPlan, values: _Capture) -> Iterator[int]:
    """Places in the batch of images whose own reconstruction is not finite."""
    for place in range(len(crops)):
        one = slice(place, place + 1)
        alone = replace(plan, visible=plan.visible[one], predicted=plan.predicted[one], hidden=plan.hidden[one])
        with torch.no_grad(), autocast(values.precision, crops.device):
            loss = model(crops[one], plan=alone).terms["reconstruction"]
        if not bool(loss.isfinite()):
            yield place


@contextmanager
def _first_broken(model: nn.Module) -> Iterator[list[str]]:
    """Names of the parts of a model whose outputs are not finite, in the order in which they are computed."""
    found: list[str] = []

    def look(module: nn.Module, inputs: object, output: object, *, name: str) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and not bool(output.isfinite().all()):
            found.append(name)

    hooks = [module.register_forward_hook(partial(look, name=name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
