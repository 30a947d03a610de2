"""A model's features as a file, and pictures of which images it finds alike."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from rich.console import Console
from torch import Tensor

from mae.credentials import concealed
from mae.data import sampled
from mae.data.augmentation import central_crop
from mae.data.images import ImageSet
from mae.data.sources import Source, open_source
from mae.errors import UsageError
from mae.evaluation.bench import Gallery
from mae.evaluation.extractors import PATCHES, open_extractor, show_loaded
from mae.evaluation.feature_files import check_target, write_features
from mae.evaluation.features import FeatureSet, normalised_batches
from mae.evaluation.knn import nearest
from mae.evaluation.run import usual_folder
from mae.randomness import permutation
from mae.report.neighbours import draw_neighbours
from mae.training.device import choose_device
from mae.training.distributed import World, joined_world


def embed(
    model: Any,
    source: str | Path,
    *,
    out: str | Path,
    features: Sequence[str] = (),
    data_root: str | Path = "data",
    device: str = "auto",
    quiet: bool = False,
) -> Path:
    """Write a model's features of every readable image; does what the command `mae embed` does.

    Rows come in the order of the source: files sorted by path, list files line by line. Each has the file's name and
    the image's height and width.

    Args:
        model: see `mae.evaluate`.
        source: images, see `PretrainConfig.source`.
        out: a new file that ends in `.parquet`, `.npz` or `.safetensors`.
        features: which ones: `cls`, `mean`, `pooled`, `patches`, as the model has them; none: all but `patches`.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        quiet: show nothing.

    Raises:
        UsageError: the file is there already or of another kind, or a feature that the model does not give.
        MAEError: images that cannot be read, or a disk that is full.
    """
    source = concealed(str(source))
    with joined_world(device) as (world, chosen):
        world.from_main(lambda: check_target(Path(out)))
        gallery = _gallery(model, source, Path(data_root), chosen, Console(quiet=quiet), world)
        wanted = _wanted(gallery, [features] if isinstance(features, str) else features)
        found = [gallery.patches()] if PATCHES in wanted else []
        found += [gallery.features()] if set(wanted) - {PATCHES} else []
        world.from_main(lambda: _write(gallery, found, wanted, Path(out), source))
    return Path(out)


def _write(gallery: Gallery, found: Sequence[FeatureSet], wanted: Sequence[str], out: Path, source: str) -> None:
    arrays = {name: array for part in found for name, array in part.arrays.items()}
    opened, numbers = gallery.source, found[0].numbers.tolist()
    infos = [opened.probe(number) for number in numbers]
    write_features(
        out,
        names=[opened.item_name(number) for number in numbers],
        sizes=torch.tensor([(info.height, info.width) for info in infos]),
        arrays={name: arrays[name].numpy() for name in wanted},
        about={"model": gallery.extractor.name, "source": source, "source_version": sampled.version(opened)},
    )


def neighbours(
    model: Any,
    source: str | Path,
    *,
    out: str | Path,
    queries: int | Sequence[str] = 8,
    k: int = 8,
    feature: str = "mean",
    data_root: str | Path = "data",
    device: str = "auto",
    seed: int = 0,
    quiet: bool = False,
) -> Path:
    """Draw the images that are nearest to some by the cosine of their features, as one sheet.

    Args:
        model: see `mae.evaluate`.
        source: images, see `PretrainConfig.source`.
        out: the PNG.
        queries: ends of the names of the images to start from, or how many to draw by `seed`.
        k: neighbours of each; the image itself is not among them.
        feature: which feature is compared.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: decides which images are drawn.
        quiet: show nothing.

    Raises:
        UsageError: an image that is not there, a feature that the model does not give, or less than one image to
            start from or to find.
        MAEError: images that cannot be read, or a disk that is full.
    """
    source = concealed(str(source))
    queries = [queries] if isinstance(queries, str) else queries
    asked = queries if isinstance(queries, int) else len(queries)
    if asked < 1 or k < 1:
        raise UsageError(f"{asked} images to start from, {k} neighbours of each; expected 1 or more")
    chosen = choose_device(device)
    gallery = _gallery(model, source, Path(data_root), chosen, Console(quiet=quiet), World())
    found = gallery.features()
    if feature not in found.arrays:
        raise UsageError(f"the model gives no feature {feature!r}; it gives {', '.join(found.arrays)}")
    features = found.arrays[feature]
    if len(features) < 2:
        raise UsageError(f"{source} holds {len(features)} image; neighbours need two or more")
    if isinstance(queries, int):
        rows = permutation(seed, 0, len(features))[:queries]
    else:
        rows = _rows(queries, gallery.source, found.numbers)
    k = min(k, len(features) - 1)
    similarities, places = nearest(features, features[rows], k=k + 1, device=chosen)
    kept = _without_itself(places, rows)
    similarities, places = (values.gather(1, kept) for values in (similarities, places))
    images, names = gallery.images(), gallery.source.item_name
    size = gallery.extractor.preprocessing.img_size
    channels = images.channels
    draw_neighbours(
        _pictures(images, found.numbers[rows], size),
        _pictures(images, found.numbers[places.flatten()], size).unflatten(0, (len(rows), k)),
        similarities,
        query_names=[names(number) for number in found.numbers[rows].tolist()],
        neighbour_names=[[names(number) for number in found.numbers[row].tolist()] for row in places],
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        title=f"Nearest by {feature} of {gallery.extractor.name}",
        path=Path(out),
    )
    return Path(out)


def _wanted(gallery: Gallery, features: Sequence[str]) -> list[str]:
    """The features that are asked for, or all but the patch tokens; tried on one image before all are computed."""
    batches = normalised_batches(
        gallery.images(), gallery.extractor.preprocessing, device=gallery.device, numbers=gallery.images().readable[:1]
    )
    given = list(gallery.extractor.named(next(batches)))
    for name in features:
        if name not in given:
            raise UsageError(f"the model gives no feature {name!r}; it gives {', '.join(given)}")
    return list(features) or [name for name in given if name != PATCHES]


def _gallery(model: Any, source: str, data_root: Path, device: torch.device, console: Console, world: World) -> Gallery:
    if not world.is_main:
        console = Console(quiet=True)
    with world.main_first():  # a download goes to one folder
        extractor, opened = open_extractor(model, device=device), open_source(source, data_root=data_root)
    show_loaded(console, extractor.loaded)
    return Gallery(
        extractor=extractor,
        source=opened,
        folder=usual_folder(model, extractor),
        device=device,
        seed=0,
        console=console,
        world=world,
    )


def _rows(queries: Sequence[str], source: Source, numbers: Int64[Tensor, " n"]) -> Int64[Tensor, " q"]:
    """The rows of the images that are named."""
    names = [source.item_name(number) for number in numbers.tolist()]
    rows = []
    for query in queries:
        matching = [row for row, name in enumerate(names) if name == query or name.endswith(f"/{query}")]
        if len(matching) != 1:
            found = f"{len(matching)} images of that name" if matching else "no readable image of that name"
            raise UsageError(f"query {query!r}: {source.name} holds {found}; give the end of one image's path")
        rows += matching
    return torch.tensor(rows)


def _without_itself(places: Int64[Tensor, "q found"], rows: Int64[Tensor, " q"]) -> Int64[Tensor, "q kept"]:
    """Positions of the neighbours that are not the query; where it is not among them the last one goes."""
    other = places != rows.unsqueeze(1)
    other[other.all(dim=1), -1] = False
    return other.nonzero()[:, 1].reshape(len(rows), -1)


def _pictures(images: ImageSet, numbers: Int64[Tensor, " n"], size: tuple[int, int]) -> Float[Tensor, "n C H W"]:
    """Central crops, whole numbers scaled to [0, 1]."""
    crops = torch.stack([central_crop(images.get(number), size) for number in numbers.tolist()])
    return crops.float() / 255 if crops.dtype == torch.uint8 else crops
