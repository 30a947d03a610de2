"""Mistakes that are told before PyTorch is loaded, which takes seconds, by the checks that are made later anyway."""

import os
from pathlib import Path

from mae.config import RunConfig
from mae.core.sizes import check_multiple
from mae.data.sources.names import check_apart, check_exists
from mae.errors import UsageError
from mae.interop.imports.catalogue import find_public
from mae.models.presets import find_model
from mae.teachers import NO_SOURCE
from mae.training.run_folder import RunFolder, check_model, check_resumable
from mae.training.trackers.installed import check_trackers


def check_run(config: RunConfig, *, resume: bool) -> None:
    """Refuse a run that cannot begin; see `run_pretraining`.

    A process among several checks nothing: another one may have made the folder already.

    Raises:
        UsageError: that.
    """
    if "RANK" in os.environ:
        return
    check_trackers(config.machine.log_to)
    folder = None if config.machine.out is None else RunFolder(config.machine.out)
    if resume and not (folder is not None and config.source and not folder.holds_run):
        check_resumable(folder)
        return
    if folder is not None:
        folder.check_new()
    if not config.source:
        raise UsageError("no images are named; give a folder, a list file, a .zip or a name such as builtin:photos")
    check_images(config)
    if folder is not None:
        check_apart(folder.root, config.source)


def check_images(config: RunConfig) -> None:
    """Refuse images that are not there, a model that cannot be made for them, and a teacher that is not there.

    Raises:
        UsageError: that.
    """
    check_exists(config.source, data_root=config.machine.data_root)
    if config.model is not None:
        find_model(config.model)
    said = config.flat()
    size, patch = (said.get(name) for name in ("img_size", "patch_size"))
    if size is not None and patch is not None:
        check_multiple(*(side if isinstance(side, tuple) else (side, side) for side in (size, patch)))
    if "teacher_source" in said:  # an option of teachers that are opened
        if not (source := said["teacher_source"]):
            raise UsageError(NO_SOURCE)
        if find_public(source) is None:
            _check_model(source)


def check_use(model: str, *sources: str, data_root: Path = Path("data")) -> None:
    """Refuse a model or images that are not there, and images where the model should stand.

    Raises:
        UsageError: that.
    """
    _check_model(model)
    for source in sources:
        check_exists(source, data_root=data_root)


def _check_model(model: str) -> None:
    kind, _, name = model.partition(":")
    if not (kind in ("timm", "hf") and name):
        check_model(Path(model))
