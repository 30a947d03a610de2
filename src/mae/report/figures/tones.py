"""Convert normalised channels to displayable colours."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mae.errors import UsageError
from mae.text import listed

HIDDEN_COLOUR = (0.87, 0.88, 0.90)
"""Covers masked patches: a bluish grey, which photos rarely contain."""

NO_DATA_COLOUR = (0.95, 0.75, 0.85)
"""Pixels without data: pale pink, which neither photos nor scaled bands are likely to contain."""

# For values outside [0, 1], the darkest and brightest 1 % may lie outside the displayed range.
_ROBUST = (0.01, 0.99)
_ROUNDING = 1e-3  # normalising and back changes a value of 0 or 1 by less
_SMALL_SPAN = 0.25  # 14 bits in 16 span so much; as they are, such images would be all but black
_RGB = (("red", "green", "blue"), ("r", "g", "b"), ("b04", "b03", "b02"), ("b4", "b3", "b2"))
_MAX_VALUES = 1 << 20  # a quantile needs a sort; this many values are enough


@dataclass(frozen=True, kw_only=True, eq=False)
class Tones:
    """How a batch is displayed: undo normalisation, choose channels, scale to [0, 1], clip.

    Attributes:
        channels: numbers of those that are shown, one as grey or three as red, green and blue.
        mean: per channel, what was subtracted from the images.
        std: per channel, what they were divided by.
        low: per shown channel, the value drawn black.
        high: per shown channel, the value drawn white.
        notes: remarks for the caption, one sentence each; empty for ordinary images.
    """

    channels: tuple[int, ...]
    mean: Float[Tensor, "C 1 1"]
    std: Float[Tensor, "C 1 1"]
    low: Float[Tensor, "S 1 1"]
    high: Float[Tensor, "S 1 1"]
    notes: tuple[str, ...]

    def paint(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B H W 3"]:
        """Colours in [0, 1]; one shown channel becomes grey, pixels that are NaN in one `NO_DATA_COLOUR`."""
        shown = (images * self.std + self.mean)[:, list(self.channels)]
        empty = shown.isnan().any(dim=1).unsqueeze(-1)
        shown = ((shown - self.low) / (self.high - self.low)).clamp(0, 1)
        colours = shown.expand(-1, 3, -1, -1).permute(0, 2, 3, 1)
        return torch.where(empty, torch.tensor(NO_DATA_COLOUR, device=images.device), colours)


def colour_table(name: str) -> Float[Tensor, "256 3"]:
    """The colours of one of matplotlib's maps, from its lowest value to its highest."""
    from matplotlib import colormaps  # here: matplotlib takes long to import

    return torch.from_numpy(colormaps[name](range(256))[:, :3]).float()


def choose_tones(
    images: Float[Tensor, "B C H W"],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    rgb: tuple[int, ...] | None = None,
) -> Tones:
    """Show one or three channels with values all over [0, 1] as they are, and scale anything else.

    Of other numbers of channels those of `rgb` are shown, each scaled separately; values beyond [0, 1], or in a quarter
    of it, as those of 12 bits in 16, are scaled together, so that colours keep their hue.

    Args:
        images: the true normalised images; predictions never change the scaling.
        mean: one value per channel.
        std: one value per channel.
        rgb: numbers of the channels shown as red, green and blue, or of one shown as grey, see `rgb_channels`; None:
            the first three, of two the first.
    """
    centre, spread = (torch.tensor(values, device=images.device)[:, None, None] for values in (mean, std))
    channels = images.shape[1]
    chosen = tuple(range(1 if channels <= 2 else 3)) if rgb is None else rgb
    shown, num_shown = (images * spread + centre)[:, list(chosen)], len(chosen)
    low, high, notes = torch.zeros_like(centre[:num_shown]), torch.ones_like(centre[:num_shown]), []
    if channels not in (1, 3):
        ranges = [_robust_range(shown[:, channel]) for channel in range(num_shown)]
        low, high = (torch.stack(ends)[:, None, None] for ends in zip(*ranges, strict=True))
        numbers = ", ".join(str(number + 1) for number in chosen)
        which = f"channels {numbers} as red, green, blue" if num_shown == 3 else f"channel {numbers} as grey"
        notes.append(
            f"Shown: {which} of {channels}, each scaled from its 1 % to its 99 % quantile; numbers are of all channels."
        )
    elif (where := _unlike_unit_range(shown)) is not None:
        bottom, top = _robust_range(shown)
        low, high = low + bottom, low + top
        notes.append(f"Values {where}: shown from {bottom:.3g} (1 % quantile) to {top:.3g} (99 %).")
    if images.isnan().any():
        notes.append("Pink: pixels without data, which count nowhere.")
    return Tones(channels=chosen, mean=centre, std=spread, low=low, high=high, notes=tuple(notes))


def _unlike_unit_range(shown: Float[Tensor, "B S H W"]) -> str | None:
    """Where values lie that would be clipped, or make flat pictures, if they were shown as they are; else None."""
    known = shown[~shown.isnan()]
    if not len(known):
        return None
    smallest, largest = (float(end) for end in known.aminmax())
    if smallest < -_ROUNDING or largest > 1 + _ROUNDING:
        return "beyond [0, 1]"
    # What is one value all over, but for rounding, has nothing to show.
    is_narrow = 1e-5 * largest < largest - smallest <= _SMALL_SPAN
    return f"span {largest - smallest:.2%} of [0, 1]" if is_narrow else None


def rgb_channels(names: Sequence[str] | None, wanted: Sequence[str] = ()) -> tuple[int, ...] | None:
    """The numbers of the channels that are shown as red, green and blue.

    Args:
        names: of all channels; None: nothing names them.
        wanted: names of three of them, or of one that is shown as grey; none: those called red, green and blue, R, G
            and B, or as Sentinel-2's bands of these colours, whatever their case.

    Returns:
        None where no name tells: see `choose_tones`.

    Raises:
        UsageError: other than one or three names, or one that no channel has.
    """
    known = [name.casefold() for name in names or ()]
    if not wanted:
        found = [each for each in _RGB if all(name in known for name in each)]
        return tuple(known.index(name) for name in found[0]) if found else None
    if len(wanted) not in (1, 3):
        raise UsageError(
            f"--rgb names {len(wanted)} channels; expected three, for red, green and blue, or one for grey"
        )
    missing = [name for name in wanted if name.casefold() not in known]
    if missing:
        there = f"the channels are {listed(names)}" if names else "nothing names the channels of these images"
        raise UsageError(f"--rgb names {missing[0]!r}, and {there}; see channels.txt in docs/start/images.md")
    return tuple(known.index(name.casefold()) for name in wanted)


def error_scale(error: Float[Tensor, "B H W"], hidden: Bool[Tensor, "B H W"]) -> float:
    """The error drawn in the strongest colour: the 99 % quantile over the masked pixels, robust to outliers."""
    return max(float(_quantile(error[hidden], _ROBUST[1])), torch.finfo(torch.float32).tiny)


def _robust_range(values: Float[Tensor, "..."]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    low, high = (_quantile(values, share) for share in _ROBUST)
    return low, torch.maximum(high, low + 1e-6 * low.abs().clamp(min=1e-30))  # never empty


def _quantile(values: Float[Tensor, "..."], share: float) -> Float[Tensor, ""]:
    flat = values.flatten()
    return flat[:: -(-flat.numel() // _MAX_VALUES)].nanquantile(share).nan_to_num(nan=0.0)
