"""Runs, reconstructions, masks and features as figures of matplotlib; public as `mae.plots`.

Each function returns a `matplotlib.figure.Figure`, which a notebook shows and `figure.savefig` writes. pyplot is not
used: nothing has to be closed, and no display is needed.
"""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import torch

from mae.core.mask_picture import ROLE_COLOURS
from mae.core.types import Grid, MaskPlan
from mae.errors import UsageError
from mae.evaluation.common.logistic import moments, standardise
from mae.evaluation.common.metrics import confusion_matrix
from mae.evaluation.common.patch_colours import ENDS, fit_colours
from mae.evaluation.pictures.reconstruct import Pictures, notes_of
from mae.modalities.images.pictures import Reconstruction
from mae.models.given_images import Images
from mae.models.inference import undisturbed
from mae.models.preprocess import preprocessing_of
from mae.models.pretrained import PretrainedEncoder
from mae.pretraining.run import PretrainResult, load
from mae.pretraining.watch.status import read_state
from mae.report.figures.canvas import readable
from mae.report.figures.confusion import confusion_figure
from mae.report.figures.curves import Line, lines_figure
from mae.report.figures.panels import rows_figure
from mae.report.figures.sheet import Column, sheet_figure
from mae.report.figures.tones import choose_tones, rgb_channels
from mae.report.html.watch import RunState, accuracy_figure, loss_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = PretrainResult | str | Path
"""What `mae.pretrain` returned, or a run's folder."""

_MOST_MASKS = 8


def loss(run: Run) -> "Figure":
    """The loss of a run over the samples seen, beside trivial predictors and the loss on held-out images.

    Raises:
        UsageError: no run there, or one that has logged nothing yet.
    """
    return loss_figure(_state(run))


def accuracy(run: Run) -> "Figure":
    """k-NN and probe accuracy over the samples seen, of a run that looked at labelled images (`monitor=LABELLED`).

    Raises:
        UsageError: no run there, or one that measured no accuracy.
    """
    return accuracy_figure(_state(run))


def compare(runs: Mapping[str, Run] | Sequence[Run]) -> "Figure":
    """The reconstruction losses of several runs over the samples seen; comparable where target and masks are the same.

    Args:
        runs: by the name that is printed; without names they are called as their folders are.

    Raises:
        UsageError: no runs, no run there, or one that has logged nothing yet.
    """
    named = runs.items() if isinstance(runs, Mapping) else ((None, run) for run in runs)
    lines = []
    for name, state in ((name, _state(run)) for name, run in named):
        if state.loss is None:
            raise UsageError(f"{state.folder} has logged no loss yet; leave it out, or wait for its first numbers")
        lines.append(Line(label=name or state.folder.resolve().name, x=state.loss.x, y=state.loss.y))
    if not lines:
        raise UsageError("there are no runs to compare; give one or more")
    names = ("samples seen", "reconstruction loss")
    return lines_figure(lines, levels={}, names=names, show=readable, title="Loss in training")


def reconstruction(pictures: Pictures) -> "Figure":
    """What `mae.reconstruct` returned: a row an image, its columns input, masked, reconstruction and error.

    Raises:
        UsageError: pictures of `inpaint=True`, which have no error; `out=` writes them.
    """
    if pictures.error is None:
        raise UsageError(
            "these pictures fill holes, whose truth is not known; mae.reconstruct(..., out=FILE) draws them"
        )
    views = Reconstruction(
        pasted=pictures.pasted,
        full=pictures.full,
        leaky=pictures.leaky,
        filled=None,
        error=pictures.error,
        hidden=pictures.hidden,
    )
    channels = pictures.input.shape[1]  # in pixel values: nothing is to be undone
    return rows_figure(
        pictures.input,
        views,
        notes=notes_of(pictures),
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
        title="Masked patches reconstructed",
    )


def masks(plan: MaskPlan, *, grid: Grid | None = None) -> "Figure":
    """The masks of the first eight samples: which patches are visible, which are predicted.

    Args:
        plan: as `model.plan(images)` gives it.
        grid: of the patches, for a plan that does not say it.

    Raises:
        UsageError: no grid, or one of another number of patches.
    """
    from matplotlib.colors import to_rgb  # here: matplotlib takes long to import

    grid, num_tokens = grid or plan.grid, plan.hidden.shape[1]
    if grid is None or prod(grid) != num_tokens:
        raise UsageError(
            f"grid is {grid}; expected the lengths of a grid of {num_tokens} patches, such as grid=(14, 14)"
        )
    legend = {role: torch.tensor(to_rgb(code)) for role, code in ROLE_COLOURS.items()}
    columns = []
    for number, roles in enumerate(plan.take(slice(0, _MOST_MASKS)).roles(), 1):
        picture = torch.stack([legend[role] for role in roles]).unflatten(0, (-1, grid[-1]))
        caption = f"{roles.count('visible')} of {num_tokens} visible"
        columns.append(Column(name=f"sample {number}", caption=caption, pictures=picture.unsqueeze(0)))
    told = [f"The encoder sees visible patches alone; {float(plan.hidden.float().mean()):.0%} are masked."]
    return sheet_figure(columns, title="Masks", caption=told, legend=legend)


def patch_colours(model: PretrainedEncoder | str | Path, images: Images) -> "Figure":
    """Images beside their patch tokens as colours: patches that the model takes for alike are coloured alike.

    Red, green and blue are the first three principal components of the tokens of all images given, standardised.

    Args:
        model: or the run folder or file of one.
        images: see `PretrainedEncoder.preprocess`.

    Raises:
        UsageError: see `mae.load` and `PretrainedEncoder.preprocess`.
        MAEError: a damaged file.
    """
    model = model if isinstance(model, PretrainedEncoder) else load(model)
    wanted, crops = preprocessing_of(model.config), model.preprocess(images)
    with undisturbed(model):
        features = model.encode(crops)
    tokens = features.patches.float().cpu().flatten(0, 1)
    tokens = standardise(tokens, *moments(tokens))
    basis = fit_colours(tokens)
    painted = basis.paint(tokens).unflatten(0, (len(crops), *features.grid))
    height, width = (side // cells for side, cells in zip(wanted.img_size, features.grid, strict=True))
    shown = crops.float().cpu()
    tones = choose_tones(shown, wanted.mean, wanted.std, rgb_channels(wanted.channels))
    columns = [
        Column(name="image", caption="", pictures=tones.paint(shown)),
        Column(
            name="patch tokens",
            caption=f"{sum(basis.explained):.0%} of the variance",
            pictures=painted.repeat_interleave(height, dim=1).repeat_interleave(width, dim=2),
        ),
    ]
    low, high = (f"{share:.0%}" for share in ENDS)
    caption = [
        "Alike colours: tokens that are alike.",
        "Red, green and blue: the first three principal components of the patch tokens of all images shown, each "
        f"scaled from its {low} to its {high} quantile.",
        *tones.notes,
    ]
    return sheet_figure(columns, title="Patch tokens as colours", caption=caption)


def confusion(true: Sequence[str], predicted: Sequence[str], *, title: str = "Confusions") -> "Figure":
    """How often each class was predicted as each class.

    Args:
        true: the class of each image, by name.
        predicted: what a classifier says of it, such as `mae.predict(...).classes`.
        title: printed above.

    Raises:
        UsageError: nothing to count, or another number of predictions than of classes.
    """
    if len(true) != len(predicted) or not true:
        raise UsageError(f"{len(true)} true and {len(predicted)} predicted classes; expected one of each for an image")
    names = sorted({*true, *predicted})
    numbers = {name: number for number, name in enumerate(names)}
    found, labels = (torch.tensor([numbers[name] for name in each]) for each in (predicted, true))
    return confusion_figure(confusion_matrix(found, labels, len(names)), class_names=names, title=title)


def _state(run: Run) -> RunState:
    return read_state(run.folder if isinstance(run, PretrainResult) else Path(run), now=time())
