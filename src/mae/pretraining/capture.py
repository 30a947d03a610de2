"""The step that ended a run, written down so that it can be replayed."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from mae.config import Precision
from mae.data.loading.sampler import make_shuffle
from mae.errors import MAEError, UsageError
from mae.models.file import model_metadata
from mae.models.masked_autoencoder import MaskedAutoencoder
from mae.pretraining.derived import images_per_step
from mae.pretraining.resolve import RunContext
from mae.records import shown, to_json, write_json
from mae.training.state import MODEL, TEACHER

CAPTURE = "capture.json"


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What `capture.json` holds: a step, its images by number, and how it was computed.

    Raises:
        UsageError: a value that no step has.
    """

    step: int
    epoch: int
    seed: int
    ids: tuple[int, ...]
    mask_ratio: float
    progress: float
    precision: Precision

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "seed"):
            if not 0 <= (value := getattr(self, name)) < 1 << 63:
                raise UsageError(f"{name} is {value}; expected a whole number from 0 to below 2 to the power of 63")
        if not self.ids or min(self.ids) < 0:
            raise UsageError(f"ids is {shown(self.ids)}; expected numbers of images")
        if not 0 < self.mask_ratio < 1:
            raise UsageError(f"mask_ratio is {self.mask_ratio}; expected a share between 0 and 1, both excluded")
        if not 0 <= self.progress <= 1:
            raise UsageError(f"progress is {self.progress}; expected a share from 0 to 1")


def write_capture(prepared: RunContext, model: MaskedAutoencoder, step: int) -> Path:
    """Write down the step after `step` steps: its images, and the weights as they are.

    Returns:
        The folder it is in.

    Raises:
        MAEError: it cannot be written.
    """
    config, folder = prepared.config, prepared.folder.failure(step)
    epoch, place = divmod(step, prepared.steps_per_epoch)
    sizes = prepared.images.block_sizes
    order = make_shuffle(prepared.kept, sizes, batch_size=images_per_step(config), seed=config.optim.seed).epoch(epoch)
    ids = order.ids(place, 0, images_per_step(config))
    values = Capture(
        step=step,
        epoch=epoch,
        seed=config.optim.seed,
        ids=tuple(ids.tolist()),
        mask_ratio=prepared.mask_schedule.ratio(step, steps_per_epoch=prepared.steps_per_epoch),
        progress=step / prepared.total_steps,
        precision=config.optim.precision,
    )
    aside = folder.with_name(f".writing-{folder.name}-{os.getpid()}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        save_file(_on_cpu(model), aside / MODEL, metadata=model_metadata(model))
        if model.teacher is not None and (taught := _on_cpu(model.teacher)):
            save_file(taught, aside / TEACHER)
        write_json(aside / CAPTURE, to_json(values))
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise MAEError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _on_cpu(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
