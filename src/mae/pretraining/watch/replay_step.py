"""The step that ended a run, written down so that it can be seen again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from mae.config import RunConfig
from mae.core.types import MaskPlan
from mae.data.dataset.images import ImageSet, load_images
from mae.data.loading.loader import normalise
from mae.data.loading.sampler import AllBut
from mae.data.loading.worker import CropDataset
from mae.data.sources.open import open_source
from mae.errors import MAEError, UsageError
from mae.models.file import load_model
from mae.models.inference import undisturbed
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.capture import CAPTURE, Capture
from mae.pretraining.derived import augmentation_of, held_out_of, images_per_step
from mae.pretraining.resolve import DECIDING_FACTS, unit_of, weights_of
from mae.pretraining.same_images import check_same
from mae.pretraining.teacher import open_teacher
from mae.randomness import sample_keys, view_keys
from mae.records import read_record
from mae.training.device import autocast, choose_device
from mae.training.distributed import World
from mae.training.run_folder import RunFolder
from mae.training.run_records import read_image_facts
from mae.training.state import MODEL, TEACHER


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
    values, run = read_record(Capture, capture / CAPTURE, what="entry"), RunFolder(capture.parent.parent)
    config, found = RunConfig.read(run.config), read_image_facts(run.data, needed=DECIDING_FACTS)
    images = load_images(
        open_source(config.source, data_root=config.machine.data_root),
        in_chans=config.resolved.layout.channels,
        channels=config.resolved.tokenizer.channels,
        nodata=config.resolved.tokenizer.nodata,
        pixel_dtype=unit_of(config, weights_of(run)),
        max_unreadable=config.data.max_unreadable,
        memory_limit=0,  # only one batch is needed
    )
    check_same(images, found, source=config.source, begun=str(run.root))
    _check_fit(capture / CAPTURE, values, config, len(images))
    chosen = choose_device(device)
    model = load_model(capture / MODEL, merged=False).to(chosen).train()
    model.hand_in(open_teacher(config, chosen, World(), resume=True)[1])
    if model.teacher is not None and model.teacher.state_dict():
        _load_teacher(model.teacher, capture / TEACHER)
    parts = _parts(config, images, found, model, values, chosen)
    return _compute(model, parts, images, values, views=config.data.repeated_aug)


def _load_teacher(teacher: nn.Module, file: Path) -> None:
    try:
        teacher.load_state_dict(load_file(file))
    except (OSError, SafetensorError, RuntimeError) as error:  # the latter for other names or shapes
        raise MAEError(f"{file} does not hold this model's teacher: {error}; get the whole folder anew") from error


def _check_fit(file: Path, values: Capture, config: RunConfig, num_images: int) -> None:
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


_Part = tuple[Tensor, MaskPlan, Int64[Tensor, " b"], Int64[Tensor, " b"]]


def _parts(
    config: RunConfig,
    images: ImageSet,
    found: Mapping[str, Any],
    model: MaskedAutoencoder,
    values: Capture,
    device: torch.device,
) -> list[_Part]:
    """Normalised crops of each part of the batch, their masks, their keys, and the numbers of the images shown."""
    ids = torch.tensor(values.ids)
    keys = view_keys(sample_keys(values.seed, values.epoch, ids), config.data.repeated_aug)
    crops = CropDataset(
        images=images,
        numbers=AllBut(len(images), held_out_of(config, images)),  # another image is shown for one that is unreadable
        img_size=config.resolved.tokenizer.img_size,
        augmentation=augmentation_of(config),
    )
    mean, std = torch.tensor([found["mean"], found["std"]], device=device)
    parts = []
    shown = ids.repeat_interleave(config.data.repeated_aug)
    for some, their_keys in zip(
        shown.chunk(config.machine.accumulate), keys.chunk(config.machine.accumulate), strict=True
    ):
        piece = crops[some.tolist(), their_keys.tolist()]
        if piece.images is None:
            raise MAEError(f"{images.name}: images of the step cannot be read any more: {piece.unreadable[0]}")
        normalised = normalise(piece.images.to(device), mean, std)
        their_keys = their_keys.to(device)
        plan = model.plan(normalised, keys=their_keys, ratio=values.mask_ratio, progress=values.progress)
        parts.append((normalised, plan, their_keys, piece.shown))
    return parts


def _compute(
    model: MaskedAutoencoder, parts: Sequence[_Part], images: ImageSet, values: Capture, *, views: int
) -> Replayed:
    device = parts[0][0].device
    losses: list[float] = []
    broken: list[str] = []
    with _first_broken(model) as broken_at:
        for crops, plan, keys, numbers in parts:
            with autocast(values.precision, device):
                loss = model(crops, plan=plan, keys=keys, views=views).loss
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


def _broken_images(model: MaskedAutoencoder, crops: Tensor, plan: MaskPlan, values: Capture) -> Iterator[int]:
    """Places in the batch of images whose own reconstruction is not finite."""
    with undisturbed(model), autocast(values.precision, crops.device):
        for place in range(len(crops)):
            one = slice(place, place + 1)
            if not bool(model(crops[one], plan=plan.take(one)).terms["reconstruction"].isfinite()):
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
