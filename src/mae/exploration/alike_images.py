"""Images, and patches of images, that are alike to the model."""

from dataclasses import replace

from mae.evaluation.protocols.neighbours_patches import NeighboursPatches
from mae.exploration.explored import ExploreRun
from mae.exploration.neighbour_rows import draw_rows_of_neighbours
from mae.randomness import FIXED_EPOCH, permutation
from mae.report.html.page import Section

_ROWS, _SHOWN = 8, 8
_PATCH_IMAGES = 200
"""Images whose patch tokens are compared: of a ViT-B they take 60 MB, and others' for comparison as much again."""


def nearest_images(run: ExploreRun) -> Section:
    """Some images, each beside those nearest to it."""
    rows = permutation(run.seed, FIXED_EPOCH, len(run.centred))[:_ROWS]
    path = run.pictures / "nearest_images.png"
    draw_rows_of_neighbours(run, rows, k=_SHOWN, title="Nearest images", path=path)
    return Section(
        title="Nearest images",
        text=f"{len(rows)} images, drawn by chance, and what the model finds most alike. The neighbours of any other "
        "image are found on the map.",
        pictures=[path],
    )


def nearest_patches(run: ExploreRun) -> Section:
    """Some patches, each beside the nearest ones of other images, for the model and for its baselines."""
    chosen = permutation(run.seed, FIXED_EPOCH, len(run.numbers))[:_PATCH_IMAGES].sort().values
    source = run.task.source.take(run.numbers[chosen].numpy(), f"{len(chosen):,} images, drawn")
    protocol = NeighboursPatches()
    result = protocol.run(replace(run.task, source=source))
    paths = {name: run.pictures / f"nearest_patches_{name}.png" for name in result.pictures}
    for name, draw in result.pictures.items():
        draw(path=paths[name])
    return Section(
        title=protocol.title,
        text=result.note,
        header=result.header,
        rows=result.rows,
        pictures=list(paths.values()),
    )
