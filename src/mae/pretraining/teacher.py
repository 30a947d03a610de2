"""The network of a teacher that names one: opened once, measured, and the same again when a run goes on."""

from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from mae.config import RunConfig
from mae.core.method import MethodConfig, component_of
from mae.core.types import SourceNetwork
from mae.data.dataset.images import ImageSet
from mae.data.dataset.units import check_units
from mae.errors import UsageError
from mae.evaluation.extractors.extractor import model_extractor, preprocessing_text
from mae.evaluation.extractors.open import open_extractor
from mae.interop.imports.open import open_model
from mae.teachers import NO_SOURCE
from mae.training.distributed import World

_PREFIXES = ("timm:local-dir:", "hf:")
"""Behind which a folder may be named."""


def open_teacher(
    config: RunConfig, device: torch.device, world: World, *, resume: bool
) -> tuple[RunConfig, SourceNetwork | None]:
    """Open the network that the teacher of a run names.

    Args:
        config: the run, as far as it was told.
        device: where the network computes.
        world: the processes that train together; each opens it.
        resume: whether the run was begun before, with a network that must be the same now.

    Returns:
        The run with what was measured of the network, and the network; None where the teacher names none.

    Raises:
        UsageError: nothing of that name, a network that does not fit the teacher's options, or another than the run was
            begun with.
        MAEError: a damaged file.
    """
    method = config.method
    teacher = method.teacher if isinstance(method, MethodConfig) else component_of("teacher", method)
    if teacher is None or not teacher.opens:
        return config, None
    teacher = replace(teacher, source=absolute_path(teacher.source))  # a run may go on from another folder
    place = Path(_parted(teacher.source)[1])
    if resume and place.is_absolute() and not place.exists():
        raise UsageError(f"{place}, the teacher that the run learns from, is gone; put it back there, or a link to it")
    with world.main_first():  # a download goes to one folder
        network = open_network(teacher.source, device=device)
    measured = teacher.measured(network)
    if resume and measured != teacher:
        raise UsageError(
            f"--teacher-source {teacher.source} is another network than when the run was begun; put the old one back "
            "there, or start a new run in another folder"
        )
    # The source too: what was said of the teacher counts over the teacher itself.
    return config.override({"teacher": measured, "teacher_source": measured.source}), network


def open_network(spec: str, *, device: torch.device) -> SourceNetwork:
    """The network that a user means: a run, a checkpoint, a file, public weights, `timm:NAME` or `hf:NAME`.

    Raises:
        UsageError: nothing of that name, or a model without patch tokens or without mean and std of its images.
        MAEError: a damaged file.
    """
    if not spec:
        raise UsageError(NO_SOURCE)
    if spec.partition(":")[0] in ("timm", "hf"):
        extractor = open_extractor(spec, device=device)
    else:
        extractor = model_extractor(open_model(Path(spec))[0].to(device), name=spec)
    if extractor.blocks is None:
        raise UsageError(f"--teacher-source {spec} gives no patch tokens; give a model that does, such as a ViT")
    wanted = extractor.preprocessing
    told = f"{extractor.identity} {preprocessing_text(wanted)}"
    return SourceNetwork(
        name=spec,
        maps=torch.no_grad()(extractor.blocks.maps),
        depth=extractor.blocks.depth,
        size=wanted.img_size,
        channels=wanted.in_chans,
        channel_names=wanted.channels,
        mean=wanted.mean,
        std=wanted.std,
        pixel_dtype=wanted.pixel_dtype,
        fingerprint=sha256(told.encode()).hexdigest()[:16],
    )


def absolute_path(spec: str) -> str:
    """A path that is there, behind a library's prefix too, as one that holds in every folder; a name as it is."""
    prefix, path = _parted(spec)
    return f"{prefix}{Path(path).absolute()}" if path and Path(path).exists() else spec


def _parted(spec: str) -> tuple[str, str]:
    prefix = next((each for each in _PREFIXES if spec.startswith(each)), "")
    return prefix, spec.removeprefix(prefix)


def check_seen(network: SourceNetwork | None, images: ImageSet) -> str | None:
    """What is unusual about the values of the images for a teacher's network; None: nothing, or there is none.

    Raises:
        UsageError: they are in another unit than the network's.
    """
    if network is None or network.channels != images.channels:  # the latter is refused with the model
        return None
    return check_units(images, mean=network.mean, std=network.std, pixel_dtype=network.pixel_dtype)
