"""Silent faults in masks with the class of each pixel."""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mae.data.annotations.parts import HELD_OUT
from mae.data.annotations.pixel_classes import IGNORED, PixelClasses, packed, pixel_classes, tells_colours
from mae.data.annotations.segmentation import find_masks, read_mask
from mae.data.annotations.written import left_out
from mae.data.decode.image import HEADER_BYTES, recognise
from mae.data.inspect.labelled_images import copies, fault, in_both_parts, look_at, sizes, unreadable, without_labels
from mae.data.sources.folder import count_of
from mae.data.sources.labels import hold_out
from mae.errors import MAEError, UsageError
from mae.findings import Finding

_LONELY, _LONELY_UNLISTED = 0.005, 0.02
"""Share of pixels unlike all four neighbours: up to 0.003 in CamVid's masks, 0.005 to 0.3 in those that were JPEGs."""
_MOST_VALUES = 4096
"""Kept of a mask: the commonest."""
_Listed = Mapping[str, int | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Mask:
    """A mask that was looked at; what cannot be read has a `problem` and no values.

    `grey` ones have three channels that are alike, as one of nothing but background: numbers, or colours among others.
    """

    path: str
    problem: str = ""
    is_jpeg: bool = False
    coloured: bool = False
    grey: bool = False
    size: tuple[int, int] = (0, 0)
    values: np.ndarray
    counts: np.ndarray
    lonely: float = 0.0


def inspect_masks(folder: str | Path, *, ignore: Collection[int] = ()) -> list[Finding]:
    """Findings on the images and masks of a folder, see `open_segmentation`; every one is decoded.

    Raises:
        UsageError: no such folder.
    """
    paired, listed = find_masks(folder)
    with ThreadPoolExecutor() as pool:
        masks = [list(pool.map(_look, pairs.masks)) for pairs in paired.values()]
    seen = [look_at(pairs.images) for pairs in paired.values()]
    if held := len(masks) == 1:
        names = list(paired["train"].images.names)
        rows = [np.flatnonzero(hold_out(names, np.zeros(len(names), np.int64)) == part) for part in (False, True)]
        masks = [[masks[0][row] for row in part] for part in rows]
        seen = [[seen[0][row] for row in part] for part in rows]
    everything, images = masks[0] + masks[1], seen[0] + seen[1]
    note = f"{count_of(len(masks[0]), 'training image')} and {count_of(len(masks[1]), 'test image')} with masks"
    note = f"{note}, {HELD_OUT}" if held else note
    left = sum(pairs.left for pairs in paired.values())
    alone = left_out(sum(pairs.alone for pairs in paired.values()), "without an image", of="mask")
    return [
        Finding(name="labels", level="ok", value="; ".join([note, *alone])),
        unreadable(images),
        *_unusable(everything),
        *sizes(images, [mask.size for mask in everything], files=[mask.path for mask in everything]),
        *_classes(masks, listed, ignore=ignore, name=str(folder)),
        without_labels(left, left + len(images), what="have no mask"),
        *copies(*seen),
    ]


def _look(path: Path) -> _Mask:
    none = np.zeros(0, dtype=np.int64)
    try:
        with path.open("rb") as file:
            is_jpeg = recognise(file.read(HEADER_BYTES), name=str(path)) == "JPEG"
        mask = none.reshape(0, 0) if is_jpeg else read_mask(path)
    except (MAEError, OSError) as error:
        return _Mask(path=str(path), problem=str(error), values=none, counts=none)
    if is_jpeg:
        return _Mask(path=str(path), is_jpeg=True, values=none, counts=none)
    coloured = mask.ndim == 3 and not (mask == mask[:, :, :1]).all()
    flat = packed(mask) if coloured else mask[:, :, 0] if mask.ndim == 3 else mask
    values, counts = np.unique(flat, return_counts=True)
    commonest = np.argsort(-counts, kind="stable")[:_MOST_VALUES]
    height, width = flat.shape
    return _Mask(
        path=str(path),
        coloured=bool(coloured),
        grey=mask.ndim == 3 and not coloured,
        size=(height, width),
        values=values[commonest],
        counts=counts[commonest],
        lonely=_lonely(flat),
    )


def _as_colours(mask: _Mask) -> _Mask:
    return replace(mask, coloured=True, values=packed(np.stack([mask.values] * 3, axis=-1))) if mask.grey else mask


def _lonely(values: np.ndarray) -> float:
    """The share of pixels that differ from all four neighbours."""
    down, across = values[1:] == values[:-1], values[:, 1:] == values[:, :-1]
    alike = np.zeros(values.shape, dtype=bool)
    alike[1:] |= down
    alike[:-1] |= down
    alike[:, 1:] |= across
    alike[:, :-1] |= across
    return 1 - float(alike.mean())


def _unusable(masks: Sequence[_Mask]) -> list[Finding]:
    count = len(masks)
    jpegs = [mask.path for mask in masks if mask.is_jpeg]
    broken = [mask.problem for mask in masks if mask.problem]
    again = "make the masks anew as PNG: JPEG changes the numbers, and where it did is lost"
    return [
        fault("masks as JPEG", jpegs, of=count, what="masks are JPEG files", advice=again, level="stop"),
        fault(
            "unreadable masks",
            broken,
            of=count,
            what="masks",
            advice="repair or remove them and their images",
            level="stop",
        ),
    ]


def _classes(
    masks: Sequence[Sequence[_Mask]], listed: _Listed | None, *, ignore: Collection[int], name: str
) -> list[Finding]:
    """Whether values are those of classes; what is found makes further checks meaningless, and stands alone."""
    usable = [mask for part in masks for mask in part if len(mask.values)]
    if not usable:
        return []
    certain = [mask for mask in usable if not mask.grey]
    coloured = bool(certain) and sum(mask.coloured for mask in certain) * 2 >= len(certain)
    if coloured:
        masks = [[_as_colours(mask) for mask in part] for part in masks]
        usable = [mask for part in masks for mask in part if len(mask.values)]
    if (kinds := _kinds(usable, coloured, listed)).level != "ok":
        return [kinds]
    limit = _LONELY_UNLISTED if listed is None else _LONELY
    speckled = [mask for mask in usable if mask.lonely > limit]
    found = {value for mask in usable if mask.lonely <= limit for value in mask.values.tolist()}
    try:
        classes = pixel_classes(listed, found, coloured=coloured, ignore=ignore, name=name)
    except UsageError as error:
        advice = "see 'Labels' in the guides for what classes.txt holds"
        return [
            kinds,
            _smeared(speckled, usable),
            Finding(name="classes", level="stop", value=str(error), advice=advice),
        ]
    known = np.array([*classes.values, *classes.ignored])

    def is_smeared(mask: _Mask) -> bool:
        return mask.lonely > limit and (listed is None or not np.isin(mask.values, known).all())

    clean = [[mask for mask in part if len(mask.values) and not is_smeared(mask)] for part in masks]
    counts = [_counts(part, classes) for part in clean]
    return [
        kinds,
        _smeared([mask for mask in speckled if is_smeared(mask)], usable),
        _unknown([mask for part in clean for mask in part], classes, known),
        _one_class(np.sum(counts, axis=0), classes) or in_both_parts(classes.names, *counts),
    ]


def _kinds(masks: Sequence[_Mask], coloured: bool, listed: _Listed | None) -> Finding:
    """Numbers where colours are expected, and the reverse: masks with a palette that were saved as RGB, or without."""
    advice = "a palette was read as colours: save the masks with the palette's numbers, or all as colours"
    others = [mask.path for mask in masks if mask.coloured != coloured]
    if others:
        what = f"masks hold {'numbers, the others colours' if coloured else 'colours, the others numbers'}"
        return fault("palette", others, of=len(masks), what=what, advice=advice, level="stop")
    if coloured and (not listed or None in listed.values()):
        what = "masks hold colours, and classes.txt does not say which class each stands for"
        advice = "save the palette's numbers instead, or write the colours into classes.txt, as in 'road 128 64 128'"
        return fault("palette", [mask.path for mask in masks], of=len(masks), what=what, advice=advice, level="stop")
    if not coloured and tells_colours(listed):
        what = "masks hold numbers, and classes.txt tells colours"
        advice = "write names alone into classes.txt, in the order of the numbers, or save the masks as colours"
        return fault("palette", [mask.path for mask in masks], of=len(masks), what=what, advice=advice, level="stop")
    return Finding(name="palette", level="ok", value="colours" if coloured else "numbers")


def _smeared(smeared: Sequence[_Mask], masks: Sequence[_Mask]) -> Finding:
    return fault(
        "compressed masks",
        [f"{mask.path} ({mask.lonely:.1%} of its pixels unlike their neighbours)" for mask in smeared],
        of=len(masks),
        what="masks were compressed with loss, as JPEG, or resized with smoothing",
        advice="make them anew from the originals, without loss and by the nearest pixel",
        level="stop",
    )


def _unknown(masks: Sequence[_Mask], classes: PixelClasses, known: np.ndarray) -> Finding:
    unknown = [(mask, values) for mask in masks if len(values := mask.values[~np.isin(mask.values, known)])]
    return fault(
        "values",
        [f"{mask.path} ({classes.shown(values.tolist())})" for mask, values in unknown],
        of=len(masks),
        what="masks hold values that stand for no class",
        advice=f"expected {classes.shown(classes.values)}: name them in classes.txt, or leave them out with --ignore",
        level="stop",
    )


def _one_class(counts: np.ndarray, classes: PixelClasses) -> Finding | None:
    """Masks of nothing but one class, which teach nothing; None where there are more, or none that could be read."""
    if (counts > 0).sum() != 1:
        return None
    there = classes.names[int(counts.argmax())]
    hint = (
        "" if classes.coloured else f"; {IGNORED} marks what does not count: save masks of 0 and {IGNORED} as 0 and 1"
    )
    return Finding(
        name="classes in both parts",
        level="stop",
        value=f"of {len(classes.names)} classes the masks hold one alone: {there}",
        advice=f"check the numbers or colours in classes.txt{hint}",
    )


def _counts(masks: Sequence[_Mask], classes: PixelClasses) -> np.ndarray:
    """Pixels of each class."""
    totals = np.zeros(len(classes.values), dtype=np.int64)
    for mask in masks:
        for number, value in enumerate(classes.values):
            totals[number] += mask.counts[mask.values == value].sum()
    return totals
