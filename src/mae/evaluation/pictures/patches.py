"""Patches beside the nearest ones of other images, and patch tokens as colours."""

from collections.abc import Mapping
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from mae.data.dataset.images import ImageSet
from mae.evaluation.common.patch_colours import ENDS
from mae.evaluation.extractors.batches import normalised_batches
from mae.models.preprocess import Preprocessing
from mae.report.figures.sheet import SIDES, Column, write_sheet
from mae.report.figures.tones import Tones, choose_tones, rgb_channels

_FRAME, _EDGE = (1.0, 0.85, 0.0), (0.0, 0.0, 0.0)  # yellow and black: one of the two shows on any photo
_THICKNESS = 100  # of an image's longer side to a line of a frame
_ENLARGED = 0.3  # of an image's side, for the enlarged patch


def draw_nearest_patches(
    images: ImageSet,
    wanted: Preprocessing,
    queries: tuple[Int64[Tensor, " q"], Int64[Tensor, " q"]],
    found: Mapping[str, tuple[Float[Tensor, "q k"], Int64[Tensor, "q k"]]],
    *,
    grid: tuple[int, int],
    title: str,
    path: Path,
) -> None:
    """Write query patches and the nearest ones of other images as one PNG, a row for each query and model.

    Args:
        images: the images.
        wanted: how they are resized and normalised.
        queries: which of the readable images they are on, and their places there.
        found: by model the cosines of the nearest and their numbers, counted over the readable images one after the
            other.
        grid: rows and columns of patches.
        title: printed above.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    per_image = grid[0] * grid[1]
    asked = (queries[0] * per_image + queries[1]).unsqueeze(1)
    # Query after query, and for each the models one after the other: [q * models, k], and with the query itself 1 + k.
    cosines = torch.stack([cosines for cosines, _ in found.values()], dim=1).flatten(0, 1)
    patches = torch.stack([torch.cat([asked, nearest], dim=1) for _, nearest in found.values()], dim=1).flatten(0, 1)
    shown = patches // per_image
    distinct, positions = shown.unique(return_inverse=True)
    crops, tones = _crops(images, wanted, distinct)
    painted = tones.paint(crops)
    short = images.short_names(images.readable[distinct].tolist())
    columns = []
    for rank in range(patches.shape[1]):
        pictures = [
            _framed(painted[position], patch % per_image, grid)
            for position, patch in zip(positions[:, rank].tolist(), patches[:, rank].tolist(), strict=True)
        ]
        names = [short[position] for position in positions[:, rank].tolist()]
        if rank:
            said = [f"cosine {cosine:.2f}" for cosine in cosines[:, rank - 1].tolist()]
        else:
            said = [f"by {who}" for _ in asked for who in found]
        columns.append(
            Column(
                name=f"nearest {rank}" if rank else "query",
                caption="",
                pictures=torch.stack(pictures),
                notes=[list(lines) for lines in zip(said, names, strict=True)],
            )
        )
    caption = [
        "Each row: a patch, framed and enlarged, and the nearest patches of other images, at most one an image.",
        "By the cosine of patch tokens. Each dimension has its mean and std over all patches taken off; place removed: "
        "this model's, over those at the same place. Queries come from the half of an image's patches with the most "
        "contrast.",
        *tones.notes,
    ]
    write_sheet(columns, title=title, caption=caption, path=path)


def draw_patch_colours(
    images: ImageSet,
    wanted: Preprocessing,
    rows: Int64[Tensor, " n"],
    colours: Mapping[str, Float[Tensor, "n rows columns 3"]],
    *,
    explained: Mapping[str, float],
    path: Path,
) -> None:
    """Write images and the colours that each model gives their patches as one PNG; see `PatchColours`.

    Args:
        images: the images.
        wanted: how they are resized and normalised.
        rows: which of the readable ones.
        colours: of their patches, by model.
        explained: by model the share of variance that is shown.
        path: the PNG.

    Raises:
        MAEError: an image cannot be read, or the file not be written.
    """
    crops, tones = _crops(images, wanted, rows)
    notes = [[name] for name in images.short_names(images.readable[rows].tolist())]
    columns = [Column(name="image", caption="resized whole", pictures=tones.paint(crops), notes=notes)]
    for who, of_patches in colours.items():
        height, width = (side // cells for side, cells in zip(wanted.img_size, of_patches.shape[1:3], strict=True))
        pictures = of_patches.repeat_interleave(height, dim=1).repeat_interleave(width, dim=2)
        columns.append(Column(name=who, caption=f"{explained[who]:.0%} of the variance", pictures=pictures))
    low, high = (f"{share:.0%}" for share in ENDS)
    caption = [
        "Red, green and blue: the first three principal components of the patch tokens of all images shown.",
        "Tokens are standardised as for their neighbours. Each component is scaled from its "
        f"{low} to its {high} quantile and clipped; its largest loading is positive. Compare colours within a column.",
        *tones.notes,
    ]
    write_sheet(columns, title="Patch tokens as colours", caption=caption, path=path)


def _crops(
    images: ImageSet, wanted: Preprocessing, rows: Int64[Tensor, " n"]
) -> tuple[Float[Tensor, "n C H W"], Tones]:
    """Some of the readable images as models see them, and how they are shown."""
    crops = torch.cat(
        list(normalised_batches(images, wanted, device=torch.device("cpu"), numbers=images.readable[rows]))
    )
    return crops, choose_tones(crops, wanted.mean, wanted.std, rgb_channels(images.channel_names))


def _framed(picture: Float[Tensor, "H W 3"], place: int, grid: tuple[int, int]) -> Float[Tensor, "h w 3"]:
    """An image with a frame around one of its patches, and the patch enlarged in the corner farthest from it."""
    times = max(1, round(SIDES[0] / max(picture.shape[:2])))
    picture = picture.repeat_interleave(times, dim=0).repeat_interleave(times, dim=1)
    (height, width), (row, column) = picture.shape[:2], divmod(place, grid[1])
    inner = height // grid[0], width // grid[1]
    top, left = row * inner[0], column * inner[1]
    patch = picture[top : top + inner[0], left : left + inner[1]].clone()
    line = max(1, round(max(height, width) / _THICKNESS))
    _paste(picture, patch, (top, left), line)
    times = int(_ENLARGED * min(height / inner[0], width / inner[1]))
    if times > 1:
        patch = patch.repeat_interleave(times, dim=0).repeat_interleave(times, dim=1)
        corner = [
            2 * line if 2 * at + 1 >= cells else side - size - 2 * line
            for at, cells, side, size in zip((row, column), grid, (height, width), patch.shape[:2], strict=True)
        ]
        _paste(picture, patch, (corner[0], corner[1]), line)
    return picture


def _paste(picture: Float[Tensor, "H W 3"], patch: Float[Tensor, "h w 3"], place: tuple[int, int], line: int) -> None:
    """Put a patch into a picture, with a frame around it, which is cut off at the picture's edges."""
    (top, left), (height, width) = place, patch.shape[:2]
    for reach, colour in ((2 * line, _EDGE), (line, _FRAME)):
        above, before = max(0, top - reach), max(0, left - reach)
        picture[above : top + height + reach, before : left + width + reach] = torch.tensor(colour)
    picture[top : top + height, left : left + width] = patch
