"""What a patch is like to a model: the nearest patches of other images, and patch tokens as colours."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mae.errors import UsageError
from mae.evaluation.protocol import THIS_MODEL, EvaluationProtocol, ProtocolResult

if TYPE_CHECKING:
    from torch import Tensor

    from mae.evaluation.common.patch_colours import PatchColours
    from mae.evaluation.common.patch_neighbours import StandardImages
    from mae.evaluation.common.task import UnlabelledTask
    from mae.evaluation.extractors.extractor import Extractor

_QUERIES = 256
"""Patches whose neighbours are counted, each on another image; the picture shows the first of them."""
_COLOURED = 8
"""Images that are shown in colours."""
_PLACE_REMOVED = "place removed"
"""What tables call this model without what its tokens share at each place."""


@dataclass(frozen=True, kw_only=True)
class NeighboursPatches(EvaluationProtocol):
    """The nearest patches of other images to some query patches, and principal components of patch tokens as colours.

    Patches of the query's own image are left out, and of each other image at most one is taken, so that a row shows
    variety. Models see whole images. Beside the model stand random weights and raw pixels, since neighbours that these
    find too took no learning, and the model itself with the mean and std of its tokens at each place taken off: what
    masked autoencoders have most in common is often where a patch lies.

    Raises:
        UsageError: values out of range.
    """

    name = "neighbours_patches"
    title = "Nearest patches of other images"
    summary = "which patches are alike to the model, as pictures"
    labels = "none"
    own_page = True

    rows: int = 3
    """Query patches that are drawn."""
    k: int = 5
    """Neighbours of each."""

    def __post_init__(self) -> None:
        if self.rows < 1 or self.k < 1:
            raise UsageError(f"rows is {self.rows} and k is {self.k}; expected 1 or more of each")

    def run(self, task: "UnlabelledTask") -> ProtocolResult:
        """Evaluate; see `EvaluationProtocol`."""
        from mae.evaluation.common.patch_colours import fit_colours
        from mae.evaluation.common.patch_neighbours import drawn_images, drawn_places, nearest_in_other_images
        from mae.evaluation.common.task import of_whole_images
        from mae.evaluation.pictures.patches import draw_nearest_patches, draw_patch_colours

        extractor = of_whole_images(task.extractor)
        banks, numbers, grid = _banks(task, extractor)
        images = drawn_images(task.seed, len(numbers), _QUERIES)
        *_, pixels = banks.values()
        of_channels = pixels.tokens[images].unflatten(2, (extractor.preprocessing.in_chans, -1))
        places = drawn_places(of_channels, numbers[images], task.seed)
        k = min(self.k, len(numbers) - 1)
        found = {
            who: nearest_in_other_images(bank, images, places, k=k, device=task.device) for who, bank in banks.items()
        }
        coloured = images[:_COLOURED]
        tokens = {who: bank[coloured] for who, bank in banks.items()}
        bases = {who: fit_colours(of.flatten(0, 1)) for who, of in tokens.items()}
        shown = task.images()  # all processes ask together, and only the main one draws
        return ProtocolResult(
            **_measured(images, places, found, bases, grid=grid, num_images=len(numbers)),
            pictures={
                "pictures": partial(
                    draw_nearest_patches,
                    shown,
                    extractor.preprocessing,
                    (images[: self.rows], places[: self.rows]),
                    {who: (cosines[: self.rows], patches[: self.rows]) for who, (cosines, patches) in found.items()},
                    grid=grid,
                    title=self.title,
                ),
                "colours": partial(
                    draw_patch_colours,
                    shown,
                    extractor.preprocessing,
                    coloured,
                    {who: basis.paint(tokens[who]).unflatten(1, grid) for who, basis in bases.items()},
                    explained={who: sum(basis.explained) for who, basis in bases.items()},
                ),
            },
        )


def _banks(
    task: "UnlabelledTask", extractor: "Extractor"
) -> "tuple[dict[str, StandardImages], Tensor, tuple[int, int]]":
    """Patch tokens by what they are of, raw pixels last; the numbers of their images; rows and columns of patches."""
    from mae.evaluation.common.dense_baselines import dense_baselines
    from mae.evaluation.common.patch_neighbours import standard_images
    from mae.evaluation.common.task import patch_grid
    from mae.evaluation.extractors.extractor import PATCHES

    features = task.patches(extractor)
    tokens, numbers = features.arrays[PATCHES], features.numbers
    if len(numbers) < 2:
        raise UsageError(f"{task.source.name} holds {len(numbers)} image; neighbours need two or more")
    grid = patch_grid(extractor, tokens)
    banks = {
        THIS_MODEL: standard_images(tokens, by_place=False),
        _PLACE_REMOVED: standard_images(tokens, by_place=True),
    }
    for other in dense_baselines(extractor, grid):
        banks[other.name] = standard_images(task.patches(other).arrays[PATCHES], by_place=False)
    return banks, numbers, grid


def _measured(
    images: "Tensor",
    places: "Tensor",
    found: "Mapping[str, tuple[Tensor, Tensor]]",
    bases: "Mapping[str, PatchColours]",
    *,
    grid: tuple[int, int],
    num_images: int,
) -> dict[str, Any]:
    """Numbers, table and note of the `ProtocolResult`."""
    from torch import arange

    from mae.evaluation.common.patch_neighbours import same_place, share_in_common

    per_image, k = grid[0] * grid[1], found[THIS_MODEL][1].shape[1]
    chance = float(same_place(places.unsqueeze(1), arange(per_image).unsqueeze(0), grid).double().mean())
    baselines = [who for who in found if who not in (THIS_MODEL, _PLACE_REMOVED)]
    of_each: dict[str, dict[str, Any]] = {
        who: {
            "mean_cosine": float(cosines.double().mean()),
            "same_place": float(same_place(places.unsqueeze(1), patches % per_image, grid).double().mean()),
            "in_common": {other: share_in_common(patches, found[other][1]) for other in baselines if other != who},
            "explained": list(bases[who].explained),
        }
        for who, (cosines, patches) in found.items()
    }
    return {
        "numbers": {"images": num_images, "queries": len(images), "k": k, "same_place_by_chance": chance, **of_each},
        "header": ("patch tokens", "cosine", "same place", *(f"also by {who}" for who in baselines), "in colours"),
        "rows": tuple(
            (
                who,
                f"{of['mean_cosine']:.2f}",
                f"{of['same_place']:.1%}",
                *(f"{of['in_common'][other]:.1%}" if other in of["in_common"] else "" for other in baselines),
                f"{sum(of['explained']):.0%}",
            )
            for who, of in of_each.items()
        ),
        "note": f"{len(images):,} patches, each on another image, and the {k} nearest of each on other images, at most "
        "one an image. Same place: how many of these lie where the query lies in its image, or touch that "
        f"place; by chance {chance:.1%}. Place removed: this model, without what all images share at a place. Also by: "
        "how many the baselines find too, which have learned nothing. In colours: the share of variance in three "
        "principal components.",
    }
