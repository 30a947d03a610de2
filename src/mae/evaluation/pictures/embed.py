"""A model's features of images as a file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from mae.credentials import concealed
from mae.data.dataset import sampled
from mae.data.dataset.images import ImageSet
from mae.errors import UsageError
from mae.evaluation.common.task import UnlabelledTask, open_images
from mae.evaluation.extractors.batches import normalised_batches
from mae.evaluation.extractors.export import check_target, write_features
from mae.evaluation.extractors.extractor import LEARNED, PATCHES
from mae.evaluation.extractors.feature_store import FeatureSet
from mae.text import visible
from mae.training.distributed import joined_world

_SHOWN = 5


def embed(
    model: Any,
    source: str | Path,
    *,
    out: str | Path,
    features: Sequence[str] = (),
    pool: str | Path | None = None,
    data_root: str | Path = "data",
    device: str = "auto",
    quiet: bool = False,
) -> Path:
    """Write a model's features of every readable image; like the command `mae embed`.

    Rows come in the order of the source: files sorted by path, list files line by line. Each has the file's name and
    the image's height and width. `patches` are float16, all other features float32.

    Args:
        model: see `mae.evaluate`.
        source: images, see `RunConfig.source`: all of them, below `train/` or not, but of a set known by name, such as
            `cifar10`, the part to pre-train on.
        out: a new file that ends in `.parquet`, `.csv`, `.npz` or `.safetensors`.
        features: which ones: `cls`, `mean`, `pooled`, `patches`, as the model has them; none: all but `patches`,
            or `learned` alone where there is a `pool`.
        pool: adds the feature `learned`: the patch tokens as a pooled probe of the model learned to weigh them
            (`mae evaluate pooled_probe`). `learned`: that of the run; else the probe's file. None: no such feature.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        quiet: show nothing.

    Raises:
        UsageError: the file is there already or of another kind, or a feature that the model does not give, or no
            pooled probe of this very model.
        MAEError: images that cannot be read, or a disk that is full.
    """
    source = concealed(str(source))
    with joined_world(device) as (world, chosen):
        asked = [features] if isinstance(features, str) else list(features)
        world.from_main(lambda: check_target(Path(out), tokens=PATCHES if PATCHES in asked else None))
        console = Console(quiet=quiet)
        task = open_images(model, source, data_root=Path(data_root), device=chosen, console=console, world=world)
        if pool is not None:
            task = task.with_learned_pooling(pool)
            asked = list(dict.fromkeys([*asked, LEARNED]))
        wanted = _wanted(task, asked)
        sets = [task.patches()] if PATCHES in wanted else []
        sets += [task.features()] if set(wanted) - {PATCHES} else []
        images = task.images()  # here, since all processes must ask for them
        world.from_main(lambda: _write(task, images, sets, wanted, Path(out), source))
        if world.is_main and (told := _told_of_missing(task, sets[0].numbers.tolist())):
            console.print(visible(told), style="yellow", highlight=False, soft_wrap=True, markup=False)
    return Path(out)


def _told_of_missing(task: UnlabelledTask, numbers: Sequence[int]) -> str:
    """Which images have no row; empty: all have one."""
    missing = sorted(set(range(len(task.source))) - set(numbers))
    if not missing:
        return ""
    shown = ", ".join(task.source.item_name(number) for number in missing[:_SHOWN])
    more = ", ..." if len(missing) > _SHOWN else ""
    return f"{len(missing):,} of {len(task.source):,} images cannot be read and have no row: {shown}{more}"


def _write(
    task: UnlabelledTask, images: ImageSet, sets: Sequence[FeatureSet], wanted: Sequence[str], out: Path, source: str
) -> None:
    arrays = {name: array for part in sets for name, array in part.arrays.items()}
    opened, numbers = task.source, sets[0].numbers.tolist()
    infos = [images.probe(number) for number in numbers]
    write_features(
        out,
        names=[opened.item_name(number) for number in numbers],
        sizes=torch.tensor([(info.height, info.width) for info in infos]),
        arrays={name: arrays[name].numpy() for name in wanted},
        about={"model": task.extractor.name, "source": source, "source_version": sampled.version(opened)},
    )


def _wanted(task: UnlabelledTask, features: Sequence[str]) -> list[str]:
    """The features that are asked for, or all but the patch tokens; tried on one image before all are computed."""
    batches = normalised_batches(
        task.images(), task.extractor.preprocessing, device=task.device, numbers=task.images().readable[:1]
    )
    given = list(task.extractor.named(next(batches)))
    for name in features:
        if name not in given:
            raise UsageError(f"the model gives no feature {name!r}; it gives {', '.join(given)}")
    return list(features) or [name for name in given if name != PATCHES]
