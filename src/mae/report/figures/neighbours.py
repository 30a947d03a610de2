"""Images beside their nearest neighbours in feature space."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from mae.errors import UsageError
from mae.report.figures.canvas import fit_text
from mae.report.figures.sheet import NOTE_SIZE, Column, write_sheet
from mae.report.figures.tones import choose_tones

_SIDES = (128, 160)  # pixels: many columns must fit on a page
_NAME_WIDTH = 146  # pixels, of the 150 that every column has


def draw_neighbours(
    queries: Float[Tensor, "Q C H W"],
    neighbours: Float[Tensor, "Q k C H W"],
    similarities: Float[Tensor, "Q k"],
    *,
    query_names: Sequence[str],
    neighbour_names: Sequence[Sequence[str]],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
    path: Path,
    title: str,
) -> None:
    """Write one PNG: a row per query with its nearest images, their likeness and file name under each.

    Args:
        queries: normalised images; 1 channel is drawn grey, 3 as colours, of others the first three.
        neighbours: likewise, the nearest first.
        similarities: cosine of the features minus their mean over all images, in [-1, 1].
        query_names: one a query; long ones lose their middle.
        neighbour_names: for each query one a neighbour.
        mean: per channel, subtracted from the images when they were normalised; zeros for plain pixel values.
        std: per channel, what they were divided by; ones for plain pixel values.
        rgb: see `choose_tones`.
        path: the PNG; its folder is made, an older file is replaced at once.
        title: printed above.

    Raises:
        UsageError: no query or no neighbour, or another number of names than of images.
        MAEError: the file cannot be written.
    """
    num_queries, k = similarities.shape
    if num_queries == 0 or k == 0:
        raise UsageError(f"{num_queries} queries with {k} neighbours each: nothing to draw; expected at least one")
    counts = [len(names) for names in neighbour_names]
    if len(query_names) != num_queries or counts != [k] * num_queries:
        raise UsageError(
            f"{len(query_names)} query names and {counts} neighbour names for {num_queries} queries of {k} "
            "neighbours each; expected one name per image"
        )
    tones = choose_tones(torch.cat([queries, neighbours.flatten(0, 1)]).float(), mean, std, rgb)
    columns = [
        Column(
            name="query",
            caption="",
            pictures=tones.paint(queries.float()),
            notes=[[_name(name)] for name in query_names],
        )
    ]
    for rank in range(k):
        cosines = similarities[:, rank].tolist()
        notes = [
            [f"centred cosine {cosine:.2f}", _name(names[rank])]
            for cosine, names in zip(cosines, neighbour_names, strict=True)
        ]
        pictures = tones.paint(neighbours[:, rank].float())
        columns.append(Column(name=f"nearest {rank + 1}", caption="", pictures=pictures, notes=notes))
    caption = [
        "Each row: an image and its nearest neighbours by the cosine of the features minus their mean over all images: "
        "0 is as alike as any two, 1 the same.",
        *tones.notes,
    ]
    write_sheet(columns, title=title, caption=caption, path=path, sides=_SIDES)


def _name(name: str) -> str:
    return fit_text(name, width=_NAME_WIDTH, size=NOTE_SIZE)
