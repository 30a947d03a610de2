"""What masks leave to guess, and how patches compare with how far pixels of the data are correlated."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from mae.evaluation.common.masked_guesses import MaskedGuesses, measure_guesses
from mae.evaluation.common.spectrum import Correlation, measure_correlation
from mae.evaluation.extractors.batches import normalised_batches
from mae.exploration.explored import ExploreRun
from mae.randomness import FIXED_EPOCH, permutation, sample_keys
from mae.report.figures.canvas import readable
from mae.report.figures.curves import Line, draw_lines
from mae.report.html.page import Section

_IMAGES, _BATCH = 48, 16
_RATIOS = (0.25, 0.5, 0.6, 0.75, 0.9)
_USUAL = 0.75
_EASY = 0.5
"""Share of what the mean colour leaves that interpolation explains, from which a mask is called easy."""
_HARD = 0.1


def masks_against_data(run: ExploreRun) -> Section | None:
    """Simple guesses beside the model's by mask ratio, the correlation length, and what follows from them."""
    config = run.model.config
    if config is None:
        return None
    numbers = run.numbers[permutation(run.seed, FIXED_EPOCH, len(run.numbers))[:_IMAGES]]
    parts = _crops(run, numbers)
    correlation = measure_correlation(part.float().cpu() for part in parts)
    keys = sample_keys(run.seed, FIXED_EPOCH, numbers).to(run.device).split(_BATCH)
    trained = run.task.extractor.autoencoder is not None  # else no mask tells how it was trained
    own, tokens = config.mask.ratio if trained else _USUAL, config.layout.num_tokens
    ratios = sorted({ratio for ratio in (*_RATIOS, own) if 1 <= int(tokens * (1 - ratio) + 1e-6) < tokens})
    guesses = measure_guesses(run.model, list(zip(parts, keys, strict=True)), tokenizer=config.tokenizer, ratios=ratios)
    paths = [run.pictures / "mask_ratios.png", run.pictures / "correlation.png"]
    _draw_guesses(guesses, paths[0])
    _draw_correlation(correlation, paths[1])
    sides = config.layout.patch
    text = [
        f"{len(numbers)} images under random masks. Errors are in units of the channels' variance. Interpolation is a "
        "smooth surface through the visible pixels; the other two guesses copy the nearest visible patch and the mean "
        "visible colour.",
        _of_length(correlation, sides),
        "Advice, from these numbers alone: " + advise(guesses, own, correlation.length, min(sides)),
    ]
    return Section(
        title="What masks leave to guess",
        text="\n\n".join(text),
        header=("mask ratio", "mean colour", "nearest patch", "interpolation", "this model"),
        rows=[
            (
                f"{each.ratio:.0%}{' (its own)' if trained and each.ratio == own else ''}",
                *(
                    "" if value is None else f"{value:.4f}"
                    for value in (each.mean_colour, each.nearest_patch, each.interpolation, each.model)
                ),
            )
            for each in guesses
        ],
        pictures=paths,
    )


def advise(guesses: Sequence[MaskedGuesses], own: float, length: float | None, side: int) -> str:
    """One or two sentences on the mask ratio and the patches.

    Args:
        guesses: by ratio, one of them at `own`, or none.
        own: the ratio that is asked about.
        length: how far pixels are correlated; None: not known.
        side: of a patch, the shorter one, in pixels.
    """
    at_own = min(guesses, key=lambda each: abs(each.ratio - own))
    gain = 1 - at_own.interpolation / at_own.mean_colour if at_own.mean_colour else 0.0
    said = f"at a ratio of {at_own.ratio:.0%} interpolation explains {max(gain, 0):.0%} of what the mean colour leaves"
    if gain > _EASY:
        near = length is not None and side < length
        change = "larger patches or a higher ratio" if near else "a higher ratio"
        text = f"{said}, so much can be guessed without knowing what is shown; try {change}."
    elif gain < _HARD:
        change = "smaller patches or a lower ratio" if length is not None and side > length else "a lower ratio"
        text = f"{said}, so nearby pixels tell little; if training stalls, try {change}."
    else:
        text = f"{said}: neither trivial nor hopeless, and nothing here asks for another ratio or patch size."
    if at_own.model is not None and at_own.model >= at_own.interpolation:
        text += (
            f" The model's error, {at_own.model:.4f}, is not below interpolation's, {at_own.interpolation:.4f}: it has "
            "not yet learned more than smoothness; train longer, or look at its checks."
        )
    return text


def _of_length(correlation: Correlation, sides: tuple[int, ...]) -> str:
    if correlation.length is None:
        return (
            f"The correlation of pixels does not fall to 1 / e within {len(correlation.values) - 1} pixels, half of "
            f"the shorter side; a patch is {' x '.join(map(str, sides))}. (Each image's own mean is taken off.)"
        )
    return (
        f"The correlation of pixels falls to 1 / e at {correlation.length:.1f} pixels; a patch is "
        f"{' x '.join(map(str, sides))} pixels, {min(sides) / correlation.length:.1f} times that. (Each image's own "
        "mean is taken off.) Below about 1, whole patches are alike to their neighbours; far above it, the inside of "
        "a masked patch is out of reach of visible pixels."
    )


def _crops(run: ExploreRun, numbers: Tensor) -> list[Tensor]:
    wanted, weights = run.task.extractor.preprocessing, next(run.model.parameters())
    batches = normalised_batches(run.images, wanted, device=run.device, numbers=numbers)
    return [part.to(weights) for batch in batches for part in batch.split(_BATCH)]


def _draw_guesses(guesses: Sequence[MaskedGuesses], path: Path) -> None:
    by_name: dict[str, list[float | None]] = {
        "mean colour": [each.mean_colour for each in guesses],
        "nearest patch": [each.nearest_patch for each in guesses],
        "interpolation": [each.interpolation for each in guesses],
        "this model": [each.model for each in guesses],
    }
    lines = [
        Line(label=name, x=[each.ratio for each in guesses], y=[value for value in values if value is not None])
        for name, values in by_name.items()
        if values[0] is not None
    ]
    names = ("mask ratio", "mean squared error")
    draw_lines(lines, levels={}, names=names, show=readable, path=path, title="What each mask ratio leaves to guess")


def _draw_correlation(correlation: Correlation, path: Path) -> None:
    line = Line(label="pixels", x=list(range(len(correlation.values))), y=list(correlation.values))
    draw_lines(
        [line],
        levels={"1 / e": 0.3679},
        names=("pixels apart", "correlation"),
        show=readable,
        path=path,
        title="How alike pixels are by their distance",
        from_zero=False,
    )
