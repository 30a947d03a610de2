"""Odd images and images that are there twice: on the page, and as a list."""

import io
from csv import writer as csv_writer
from pathlib import Path

from torch.nn.functional import cosine_similarity

from mae.data.inspect.near_duplicates import NEAR
from mae.errors import MAEError
from mae.exploration.explored import FEATURE, NUM_NEIGHBOURS, ExploreRun
from mae.exploration.neighbour_rows import draw_rows_of_neighbours
from mae.exploration.outliers import NearDuplicates, find_near_duplicates, find_odd
from mae.exploration.thumbnails import crops_of
from mae.records import write_whole
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import choose_tones, rgb_channels
from mae.report.html.page import Section

_ROWS, _SHOWN = 8, 6
_NAMED = 40
_SIDES = (128, 192)  # pixels of pictures in the sheet of duplicates
_ROUNDING = 1e-5
"""Of the largest feature: what features of equal images may differ by."""
SAME_PIXELS, SAVED_ANEW, ALIKE = "same pixels", "saved anew", "alike to the model"
"""What a pair of near duplicates is: equal when decoded; one picture by its slow waves, too (see `outline`); or found
by the model alone, as a flipped or shifted copy, or two frames of a video, is."""


def odd_images(run: ExploreRun) -> Section:
    """The images that are farthest from their neighbours."""
    odd = find_odd(run.neighbours[0])
    far_out, rows = len(odd.far_out), odd.order[:_ROWS]
    path = run.pictures / "odd_images.png"
    draw_rows_of_neighbours(run, rows, k=_SHOWN, title="The oddest images, and what is nearest to them", path=path)
    listed = odd.order[: min(max(far_out, _ROWS), _NAMED)]
    return Section(
        title="Odd images",
        text=f"{far_out:,} of {len(odd.order):,} images are far out: the mean distance to their ten nearest is above "
        f"{odd.threshold:.2f}, three interquartile ranges above the upper quartile. Distances are those of centred "
        "features of length 1: 0 for copies, 1.41 for any two. Odd is not wrong: look whether an image belongs to the "
        f"set, is broken, or shows something rare.{_rest(far_out)}",
        header=("image", "distance", ""),
        rows=[
            (run.names[row], f"{float(odd.scores[row]):.2f}", "far out" if odd.scores[row] > odd.threshold else "")
            for row in listed.tolist()
        ],
        pictures=[path],
    )


def duplicates(run: ExploreRun) -> Section:
    """Pairs of images that are nearly the same."""
    found = find_near_duplicates(*run.neighbours, run.task.contents()[0])
    kinds, meaning = _kinds(run, found), _meaning(run, found)
    if not kinds:
        return Section(title="Near duplicates", text=f"No two images are nearly the same: {meaning}")
    path = run.pictures / "near_duplicates.png"
    _draw_pairs(run, found, kinds, path)
    counts = ", ".join(f"{kinds.count(kind):,} {kind}" for kind in (SAME_PIXELS, SAVED_ANEW, ALIKE) if kind in kinds)
    names = run.names
    return Section(
        title="Near duplicates",
        text=f"{len(kinds):,} pairs of images are nearly the same ({counts}): {meaning} Each image is compared "
        f"with its {NUM_NEIGHBOURS} nearest, so that of larger groups of copies not every pair counts. Copies make "
        "scores too high where one is trained on and the other is tested on, and weigh twice in training."
        f"{_rest(len(kinds))}",
        header=("image", "is nearly", "cosine", "kind"),
        rows=[
            (names[first], names[second], f"{cosine:.4f}", kind)
            for (first, second), cosine, kind in zip(
                found.pairs[:_NAMED].tolist(), found.cosines.tolist(), kinds, strict=False
            )
        ],
        pictures=[path],
    )


def _rest(count: int) -> str:
    """Where the table does not hold everything, what does."""
    return f" The first {_NAMED} are listed; --list FILE.csv lists all." if count > _NAMED else ""


def write_list(run: ExploreRun, path: Path) -> None:
    """Write odd images and pairs of near duplicates as CSV: `kind`, `name`, `other`, `score`.

    A row of kind `odd` is an image that is far out: its nearest image and its mean distance to its ten nearest. Any
    other kind is that of a pair: the other image and the cosine of their centred features.

    Raises:
        MAEError: the file cannot be written.
    """
    odd, names = find_odd(run.neighbours[0]), run.full_names
    found = find_near_duplicates(*run.neighbours, run.task.contents()[0])
    nearest = run.neighbours[1][:, 0]
    text = io.StringIO()
    rows = csv_writer(text, lineterminator="\n")
    rows.writerow(["kind", "name", "other", "score"])
    for row in odd.far_out.tolist():
        rows.writerow(["odd", names[row], names[int(nearest[row])], f"{float(odd.scores[row]):.6f}"])
    pairs = zip(found.pairs.tolist(), found.cosines.tolist(), _kinds(run, found), strict=True)
    for (first, second), cosine, kind in pairs:
        rows.writerow([kind, names[first], names[second], f"{cosine:.6f}"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.getvalue())
    except (OSError, UnicodeEncodeError) as error:
        raise MAEError(f"cannot write the list {path}: {error}") from error


def _meaning(run: ExploreRun, found: NearDuplicates) -> str:
    features = run.task.features().arrays[FEATURE]
    if run.centred.abs().max() <= _ROUNDING * features.abs().max():
        return (
            "the features of all images are the same, so that their cosines tell nothing, and images with the same "
            "pixels count."
        )
    return (
        f"a pair counts from a centred cosine of {found.threshold:.4f}, a tenth as far apart as an image usually is "
        "from its tenth neighbour."
    )


def _kinds(run: ExploreRun, found: NearDuplicates) -> list[str]:
    """What each pair is."""
    digests, outlines = run.task.contents()
    first, second = found.pairs.unbind(dim=1)
    same = digests[first] == digests[second]
    anew = cosine_similarity(outlines[first].double(), outlines[second].double(), dim=1) > NEAR
    return [
        SAME_PIXELS if is_same else SAVED_ANEW if is_anew else ALIKE
        for is_same, is_anew in zip(same.tolist(), anew.tolist(), strict=True)
    ]


def _draw_pairs(run: ExploreRun, found: NearDuplicates, kinds: list[str], path: Path) -> None:
    pairs, wanted = found.pairs[:_ROWS], run.task.extractor.preprocessing
    crops = crops_of(run.images, wanted, run.numbers[pairs.flatten()])
    tones = choose_tones(crops, wanted.mean, wanted.std, rgb_channels(run.images.channel_names))
    pictures = tones.paint(crops).unflatten(0, (-1, 2))
    said = [[f"cosine {cosine:.4f}", kind] for cosine, kind in zip(found.cosines.tolist(), kinds, strict=True)]
    columns = [
        Column(
            name=name,
            caption="",
            pictures=pictures[:, side],
            notes=[
                [run.names[row], *(said[place] if side == 0 else ("", ""))]
                for place, row in enumerate(pairs[:, side].tolist())
            ],
        )
        for side, name in enumerate(("image", "nearly the same"))
    ]
    caption = ["Each row: two images that are nearly the same to the model, the most alike first.", *tones.notes]
    write_sheet(columns, title="Near duplicates", caption=caption, path=path, sides=_SIDES)
