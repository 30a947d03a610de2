"""Rows of an image and its nearest ones, as one picture."""

from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from mae.exploration.explored import ExploreRun
from mae.exploration.thumbnails import crops_of
from mae.report.figures.neighbours import draw_neighbours
from mae.report.figures.tones import rgb_channels


def draw_rows_of_neighbours(run: ExploreRun, rows: Int64[Tensor, " q"], *, k: int, title: str, path: Path) -> None:
    """Write some images, each beside the `k` nearest of it, fewer where there are fewer, as one PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    cosines, neighbours = (values[rows, :k] for values in run.neighbours)
    shown = torch.cat([rows.unsqueeze(1), neighbours], dim=1)
    wanted = run.task.extractor.preprocessing
    distinct, places = shown.unique(return_inverse=True)
    crops = crops_of(run.images, wanted, run.numbers[distinct])
    draw_neighbours(
        crops[places[:, 0]],
        crops[places[:, 1:].flatten()].unflatten(0, neighbours.shape),
        cosines,
        query_names=[run.names[row] for row in rows.tolist()],
        neighbour_names=[[run.names[row] for row in each] for each in neighbours.tolist()],
        mean=wanted.mean,
        std=wanted.std,
        rgb=rgb_channels(run.images.channel_names),
        path=path,
        title=title,
    )
