"""Sections on the training of a model: layers, attention, errors by wavelength, weights, colours of patches."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mae.evaluation.common.patch_colours import ENDS, fit_colours
from mae.exploration.dynamics import Dynamics, Snapshot
from mae.exploration.explored import ExploreRun
from mae.exploration.thumbnails import crops_of
from mae.report.figures.canvas import readable
from mae.report.figures.curves import Line, draw_lines
from mae.report.figures.grids import Grid, draw_grids
from mae.report.figures.sheet import Column, write_sheet
from mae.report.figures.tones import choose_tones, rgb_channels
from mae.report.html.page import Section

_SPECTRUM = 64
"""Singular values that are drawn: those that follow are of the smallest."""


def layers_over_time(run: ExploreRun) -> Section:
    """k-NN, linear probe and effective rank of each block at each checkpoint."""
    found, paths = run.dynamics, [run.pictures / "layers.png", run.pictures / "singular_values.png"]
    grids = [_by_block(found, "effective rank", lambda layer: layer.effective_rank, readable)]
    text = (
        f"Features of {found.num_images:,} images: the mean patch token that leaves each block, the last one after the "
        "final norm. The effective rank (RankMe) is the number of directions that features fill: near 1 they have "
        f"collapsed, and it is {min(found.num_images, run.model.encoder.embed_dim):,} at most."
    )
    if found.majority is not None:
        grids = [
            _by_block(found, "k-NN (k = 20)", lambda layer: layer.knn, _percent),
            _by_block(found, "linear probe", lambda layer: layer.probe, _percent),
            *grids,
        ]
        text += (
            " k-NN and a linear probe by least squares learn from half of these images and are tested on the other; "
            f"always saying the commonest class is right for {found.majority:.1%}. So few images compare layers and "
            "checkpoints, and no published figure; the best block is chosen on the tested half, which flatters it "
            "a little."
        )
    draw_grids(grids, title="Layers over training", caption=_moments(found), path=paths[0])
    draw_lines(
        [_spectrum_line(each) for each in found.snapshots],
        levels={},
        names=("singular value, by size", "log10 of its share of the largest"),
        show=readable,
        path=paths[1],
        title="Singular values of the features of the last block",
        from_zero=False,
    )
    labelled = found.majority is not None
    return Section(
        title="What layers know over training",
        text=text,
        header=("moment", "best block by k-NN", "best block by probe") if labelled else (),
        rows=[
            (each.name, _best([layer.knn for layer in each.layers]), _best([layer.probe for layer in each.layers]))
            for each in found.snapshots
        ]
        if labelled
        else (),
        pictures=paths,
    )


def attention_over_time(run: ExploreRun) -> Section | None:
    """Distance and entropy of attention by block and checkpoint, and by head of the newest."""
    found = run.dynamics
    last = found.snapshots[-1].attention
    if last is None:
        return None
    paths = [run.pictures / "attention_over_training.png", run.pictures / "attention_by_head.png"]
    over_time = [
        _attention_by_block(found, "distance in patches, mean of heads", "distance"),
        _attention_by_block(found, "entropy in nats, mean of heads", "entropy"),
    ]
    blocks, heads = ([str(number) for number in range(count)] for count in last.entropy.shape)
    by_head = [
        Grid(name=name, values=values, rows=[f"block {block}" for block in blocks], columns=heads, show=show)
        for name, values, show in (
            ("distance in patches", last.distance, _two_digits),
            ("distance in pixels", last.pixels, readable),
            ("entropy in nats", last.entropy, _two_digits),
            ("entropy of the class token", last.cls_entropy, _two_digits),
            ("class token's share for itself", last.cls_self, _percent),
        )
        if values is not None
    ]
    draw_grids(over_time, title="Attention over training", caption=_moments(found), path=paths[0])
    caption = f"Columns: heads, numbered. {found.snapshots[-1].name}."
    draw_grids(by_head, title="Attention by block and head", caption=caption, path=paths[1])
    text = (
        f"Means over the patches of {found.num_few:,} images. Attention that is the same everywhere has an entropy of "
        f"{last.uniform_entropy:.2f} nats and a distance of {last.uniform_distance:.2f} patches: a head near both "
        "mixes the whole image and chooses nothing; a head of a short distance looks around each patch."
    )
    if last.cls_self is not None and last.cls_entropy is not None:
        text += (
            f" In the last block the class token gives {float(last.cls_self[-1].mean()):.0%} of its attention to "
            f"itself and has an entropy of {float(last.cls_entropy[-1].mean()):.2f} nats. Nothing in the loss of a "
            "masked autoencoder asks it to gather anything."
        )
    return Section(title="How far attention reaches", text=text, pictures=paths)


def errors_by_wavelength(run: ExploreRun) -> Section | None:
    """The error of masked pixels by spatial frequency over training."""
    measured = [(each, each.error) for each in run.dynamics.trained if each.error is not None]
    if not measured:
        return None
    last, path = measured[-1][1], run.pictures / "errors_by_wavelength.png"
    if len(measured) > 1:
        lines = [
            Line(label=band, x=[each.step or 0 for each, _ in measured], y=[error.left[place] for _, error in measured])
            for place, band in enumerate(last.bands)
        ]
        levels, names = {"mean_colour": 1.0}, ("step", "error over the power of the band")
        title = "What is left of each wavelength"
        draw_lines(lines, levels=levels, names=names, show=_percent, path=path, title=title)
    shares = zip(last.bands, last.power, last.error, last.shares, last.left, strict=True)
    return Section(
        title="Errors by wavelength",
        text=f"Masked pixels of {run.dynamics.num_few:,} images, in units of the channels' variance; "
        f"{measured[-1][0].name}. The power is what the mean colour of the visible pixels leaves to be predicted under "
        "the same masks. Of what is left, 0 % is perfect and 100 % no better than that colour; above it the model adds "
        "detail that is wrong. Edges of masked patches spread both over all wavelengths.",
        header=("wavelength", "power", "error", "share of the error", "left of the power"),
        rows=[
            (band, f"{power:.4f}", f"{error:.4f}", f"{share:.1%}", f"{left:.1%}")
            for band, power, error, share, left in shares
        ],
        pictures=[path] if len(measured) > 1 else [],
    )


def weights_over_time(run: ExploreRun) -> Section | None:
    """How far groups of weights moved between checkpoints."""
    moved = [(before, each) for before, each in zip(run.dynamics.trained, run.dynamics.trained[1:], strict=False)]
    changes = [each.changes for _, each in moved if each.changes is not None]
    if not changes:
        return None
    path, groups = run.pictures / "weight_changes.png", list(changes[0])
    grid = Grid(
        name="change over length",
        values=torch.tensor([[change[group] for change in changes] for group in groups]),
        rows=groups,
        columns=[f"to {each.step:,}" for _, each in moved],
        show=lambda value: f"{value:.2%}",
    )
    intervals = ", ".join(f"{before.step:,} to {each.step:,}" for before, each in moved)
    draw_grids([grid], title="How far weights moved", caption=f"Between the steps {intervals}.", path=path)
    return Section(
        title="How far weights moved",
        text="Update-to-weight ratios between kept checkpoints: the length of the change of a group of weights over "
        "the length of these weights before. This is the net change over the steps between two checkpoints, read from "
        "their weights, not the mean length of single updates, which a run does not log. A group far below the others "
        "has all but stopped learning; one far above them may be unstable.",
        pictures=[path],
    )


def patch_colours_over_time(run: ExploreRun) -> Section:
    """Patch tokens as colours of one basis over training."""
    found, wanted = run.dynamics, run.task.extractor.preprocessing
    basis = fit_colours(found.snapshots[-1].tokens.flatten(0, 1))
    crops = crops_of(run.images, wanted, found.shown)
    tones = choose_tones(crops, wanted.mean, wanted.std, rgb_channels(run.images.channel_names))
    rows, columns = _grid_of(run)
    height, width = crops.shape[2] // rows, crops.shape[3] // columns

    def enlarged(tokens: Tensor) -> Tensor:
        colours = basis.paint(tokens).unflatten(1, (rows, columns))
        return colours.repeat_interleave(height, dim=1).repeat_interleave(width, dim=2)

    path = run.pictures / "patch_colours_over_training.png"
    low, high = (f"{share:.0%}" for share in ENDS)
    write_sheet(
        [
            Column(name="image", caption="", pictures=tones.paint(crops)),
            *(Column(name=each.name, caption="", pictures=enlarged(each.tokens)) for each in found.snapshots),
        ],
        title="Patch tokens as colours",
        caption=[
            f"Red, green and blue: the first three principal components of the patch tokens of the last column, "
            f"{sum(basis.explained):.0%} of their variance. All columns are painted in this one basis, each component "
            f"from its {low} to its {high} quantile there; tokens beyond are clipped.",
            *tones.notes,
        ],
        path=path,
        sides=(128, 192),
    )
    return Section(
        title="Patches as colours over training",
        text="Patches of one colour are alike to the model along these three components. As the basis is that of the "
        "last column, colours can be compared between columns; where the model was very unlike it, they are flat or "
        "clipped.",
        pictures=[path],
    )


def _grid_of(run: ExploreRun) -> tuple[int, int]:
    assert run.model.config is not None  # else the model would have no preprocessing
    rows, columns = run.model.config.layout.grid
    return rows, columns


def _by_block(found: Dynamics, name: str, of: Callable[..., float | None], show: Callable[[float], str]) -> Grid:
    """A number of layers: a row a block, and a column a moment."""
    values = torch.tensor([[of(layer) or 0.0 for layer in each.layers] for each in found.snapshots]).T
    return _over_time(found, name, values, show)


def _attention_by_block(found: Dynamics, name: str, number: str) -> Grid:
    values = [getattr(each.attention, number).mean(dim=1) for each in found.snapshots]
    return _over_time(found, name, torch.stack(values, dim=1), _two_digits)


def _over_time(found: Dynamics, name: str, values: Tensor, show: Callable[[float], str]) -> Grid:
    return Grid(
        name=name,
        values=values,
        rows=[f"block {number}" for number in range(len(values))],
        columns=[_short(each) for each in found.snapshots],
        show=show,
    )


def _short(each: Snapshot) -> str:
    return "random" if each.step == 0 else "now" if each.step is None else readable(each.step)


def _moments(found: Dynamics) -> str:
    """What the columns are."""
    text = "Columns: random weights (of the same encoder, not those that the run began with), then "
    if found.snapshots[-1].step is None:
        return f"{text}the model."
    left_out = f" {found.left_out:,} kept checkpoints between them are left out." if found.left_out else ""
    return f"{text}checkpoints by step.{left_out}"


def _spectrum_line(each: Snapshot) -> Line:
    spectrum = each.layers[-1].spectrum[:_SPECTRUM]
    seen = spectrum[spectrum > 0]
    return Line(label=each.name, x=list(range(1, len(seen) + 1)), y=(seen / seen[0]).log10().tolist())


def _best(scores: Sequence[float | None]) -> str:
    """The first block of the highest score."""
    score, number = max(((score or 0.0, -number) for number, score in enumerate(scores)), default=(0.0, 0))
    return f"block {-number}: {score:.1%}"


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.1%}"
