"""A sheet of the images that a model finds most alike."""

import io
from collections.abc import Sequence
from csv import writer as csv_writer
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from rich.console import Console
from torch import Tensor
from torch.nn.functional import cosine_similarity

from mae.credentials import concealed
from mae.data.dataset.images import ImageSet
from mae.data.sources.open import Source
from mae.errors import UsageError
from mae.evaluation.common.neighbours import nearest_others
from mae.evaluation.common.task import UnlabelledTask, open_images
from mae.evaluation.extractors.extractor import LEARNED
from mae.models.given_images import scaled, seen_crop
from mae.models.preprocess import Preprocessing
from mae.randomness import permutation
from mae.records import check_new, check_seed, write_whole
from mae.report.figures.neighbours import draw_neighbours
from mae.report.figures.tones import rgb_channels
from mae.training.device import choose_device
from mae.training.distributed import World


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
    """Draw the images that are nearest to some by the centred cosine of their features, as one sheet.

    The features of a masked autoencoder have much in common, so all their cosines are near 1. That of the features
    minus their mean over all images tells more of how alike two are.

    Args:
        model: see `mae.evaluate`.
        source: images, see `mae.embed`.
        out: a new file: a `.png`, or a `.csv` of the same, a row a neighbour: `query`, `rank` (from 1), `neighbour`,
            `cosine` and `centred_cosine`.
        queries: ends of the names of the images to start from, or how many to draw by `seed`.
        k: neighbours of each; the image itself is not among them.
        feature: which feature is compared; `learned` is that of a pooled probe of the run, see `mae.embed`.
        data_root: where sets known by name are kept.
        device: `auto`, `cpu`, `cuda` or `mps`.
        seed: decides which images are drawn, `0 <= seed < 2**63`.
        quiet: show nothing.

    Raises:
        UsageError: `out` exists or is of another kind, an image that is not there, a feature that the model does not
            give, a seed out of range, or less than one image to start from or to find.
        MAEError: images that cannot be read, or a disk that is full.
    """
    source = concealed(str(source))
    queries = [queries] if isinstance(queries, str) else queries
    num_queries = queries if isinstance(queries, int) else len(queries)
    if num_queries < 1 or k < 1:
        raise UsageError(f"{num_queries} images to start from, {k} neighbours of each; expected 1 or more")
    check_seed(seed)
    check_new(path := Path(out))
    if path.suffix not in (".png", ".csv"):
        raise UsageError(f"--out is {out}; expected a name that ends in .png or .csv")
    where, console = choose_device(device), Console(quiet=quiet)
    task = open_images(model, source, data_root=Path(data_root), device=where, console=console, world=World())
    if feature == LEARNED and task.extractor.model is not None:
        task = task.with_learned_pooling(LEARNED)
    features, numbers = _features(task, feature)
    if isinstance(queries, int):
        rows = permutation(seed, 0, len(features))[:queries]
    else:
        rows = _rows(queries, task.source, numbers)
    centred = features - features.mean(dim=0)
    if k > len(features) - 1:
        k = len(features) - 1
        console.print(f"{len(features)} images have only {k} neighbours each", style="yellow", highlight=False)
    similarities, places = nearest_others(centred, rows, k=k, device=where)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        plain = cosine_similarity(features[rows].unsqueeze(1), features[places], dim=2)
        write_whole(path, _as_csv(task.source, numbers[rows], numbers[places], plain, similarities))
    else:
        title = f"Nearest by {feature} of {task.extractor.name}"
        _draw(task, numbers[rows], numbers[places], similarities, title=title, path=path)
    return path


def _as_csv(
    source: Source,
    queries: Int64[Tensor, " q"],
    neighbours: Int64[Tensor, "q k"],
    cosines: Float[Tensor, "q k"],
    centred: Float[Tensor, "q k"],
) -> str:
    lines = io.StringIO()
    rows = csv_writer(lines, lineterminator="\n")
    rows.writerow(["query", "rank", "neighbour", "cosine", "centred_cosine"])
    for query, *columns in zip(*(values.tolist() for values in (queries, neighbours, cosines, centred)), strict=True):
        for rank, (number, plain, without_mean) in enumerate(zip(*columns, strict=True), start=1):
            names = source.item_name(query), rank, source.item_name(number)
            rows.writerow([*names, f"{plain:.6f}", f"{without_mean:.6f}"])
    return lines.getvalue()


def _features(task: UnlabelledTask, name: str) -> tuple[Float[Tensor, "n D"], Int64[Tensor, " n"]]:
    """A feature of every readable image, and the images' numbers."""
    features = task.features()
    if name not in features.arrays:
        raise UsageError(f"the model gives no feature {name!r}; it gives {', '.join(features.arrays)}")
    if len(features.numbers) < 2:
        raise UsageError(f"{task.source.name} holds {len(features.numbers)} image; neighbours need two or more")
    return features.arrays[name], features.numbers


def _draw(
    task: UnlabelledTask,
    queries: Int64[Tensor, " q"],
    neighbours: Int64[Tensor, "q k"],
    similarities: Float[Tensor, "q k"],
    *,
    title: str,
    path: Path,
) -> None:
    images, wanted = task.images(), task.extractor.preprocessing
    shown = [*queries.tolist(), *neighbours.flatten().tolist()]
    names = dict(zip(shown, images.short_names(shown), strict=True))
    draw_neighbours(
        _pictures(images, queries, wanted),
        _pictures(images, neighbours.flatten(), wanted).unflatten(0, neighbours.shape),
        similarities,
        query_names=[names[number] for number in queries.tolist()],
        neighbour_names=[[names[number] for number in row] for row in neighbours.tolist()],
        mean=(0.0,) * images.channels,
        std=(1.0,) * images.channels,
        rgb=rgb_channels(images.channel_names),
        title=title,
        path=path,
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


def _pictures(images: ImageSet, numbers: Int64[Tensor, " n"], wanted: Preprocessing) -> Float[Tensor, "n C H W"]:
    """The crops that the model saw, whole numbers scaled to [0, 1]."""
    return torch.stack([scaled(seen_crop(images.get(number), wanted)) for number in numbers.tolist()])
