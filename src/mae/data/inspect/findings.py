"""Findings about an inspected set of images, one line a check."""

from collections.abc import Sequence
from math import isfinite
from typing import Literal

from mae.data.inspect.near_duplicates import Copies
from mae.data.inspect.report import ELONGATED, Channel, DataReport
from mae.findings import Finding
from mae.text import by_channel, listed

MEAN_BOUND = 0.3
"""How far from 0 a channel's mean may be after normalising, in stds; wrong statistics are off by more."""

STD_BOUND = 0.3
"""How far from 1 its std may be: resizing crops of photographs took up to 0.08 of it."""

STANDARD_ERRORS = 3
"""Standard errors that both may be further off: few images say little about the whole set."""

SATURATED = 0.2
"""Share of a channel's values at the type's ends; of 200 photographs 0.034 in the blue one."""

ALL_SATURATED = 0.98
"""Share at one end from which next to nothing is left, as of 16-bit data cut off at 255; of handwriting it is 0.95."""

SMALL_RANGE = 0.25
"""Largest value, as a share of the type's, up to which some bits are never used; 14 bits in 16 give 0.25."""

FEW_LEVELS = 1 / 8
"""The same for 8 bits, of which at most 32 levels are left."""

PLAIN = 0.01
"""Share of images without content: a stray dark frame is harmless, a hundredth of the set is a fault of its making."""

COPIED = 0.1
"""Share of images that are copies: an epoch is shorter than it says by so much."""

SMALL = 0.1
"""Share of images smaller than a crop: enlarged ones have no detail to learn."""

MOSTLY_SMALL = 0.5
"""Share from which the run's size does not suit the set."""

EXTREME = 0.05
"""Share of very long images of which a crop shows a small part."""

MOSTLY_MISSING = 0.5
"""Share of values without data from which more of a batch is empty than not."""

MIXED = 0.1
"""Share of images with other than the usual number of channels: photographs hold a few grey ones."""

_SHOWN = 3
_Level = Literal["ok", "note", "warn", "stop"]


def data_findings(report: DataReport, *, own_statistics: bool = True, note: str = "") -> list[Finding]:
    """Findings about a set of images.

    Args:
        report: of `inspect_images`.
        own_statistics: whether mean and std were measured on these images; else they were chosen, or are a model's.
        note: what the source holds and leaves out, as `RunContext.note`.

    Returns:
        A finding for each check, in the order of reading: the files, their values, what a run makes of them, copies.
    """
    found = [_images(report, note), _unreadable(report), _finite(report), _gaps(report), _kinds(report)]
    found += [*_sizes(report), _saturation(report), _range(report), _statistics(report, own_statistics)]
    found += [_empty_channels(report), _plain(report)]
    found += [_copies(report, report.duplicates, "duplicates", "hold the same pixels as another")]
    found += [_copies(report, report.near_duplicates, "near duplicates", "show nearly what another shows")]
    return found


def _images(report: DataReport, note: str) -> Finding:
    looked_at = f"{report.looked_at:,} of {report.total:,} looked at"
    return Finding(name="images", level="ok", value="; ".join(filter(None, (looked_at, note))))


def _unreadable(report: DataReport) -> Finding:
    if not report.unreadable:
        return Finding(name="unreadable images", level="ok", value="none")
    shown = "; ".join(report.messages)
    return Finding(
        name="unreadable images",
        level="note",
        value=f"{_share(report.unreadable, report.looked_at)}: {shown}",
        advice="a run uses another image in place of each: repair or remove these files",
    )


def _finite(report: DataReport) -> Finding:
    advice = "if NaN means nodata, give --nodata nan; else repair or remove these images"
    if report.not_finite:
        value = f"NaN or infinite values in {_share(report.not_finite, report.looked_at)}, which are skipped"
        return Finding(name="finite values", level="warn", value=value, advice=advice)
    return Finding(name="finite values", level="ok", value="all")


def _gaps(report: DataReport) -> Finding:
    """Values that stand for no measurement: told to the run, or marked in files and trained on as they are."""
    if report.nodata is None:
        if not report.marked and report.apart is not None:
            apart, share = report.apart
            value = f"{share:.1%} of the values are {apart:g}, far from all others"
            advice = f"if it means that nothing was measured: --nodata {apart:.9g}"
            return Finding(name="nodata", level="warn", value=value, advice=advice)
        if not report.marked:
            return Finding(name="nodata", level="ok", value="no file marks values as such, and none stands apart")
        value = f"files mark {', '.join(report.marked[:_SHOWN])} as nodata; here it counts as a measurement"
        advice = f"leave such values out of statistics and loss: --nodata {report.marked[0]}"
        return Finding(name="nodata", level="warn", value=value, advice=advice)
    value = f"{report.missing:.1%} of the values are {report.nodata}, and left out of statistics and loss"
    if report.missing == 0:
        advice = "check --nodata: a value that never occurs marks nothing"
        return Finding(name="nodata", level="warn", value=value, advice=advice)
    if report.missing > MOSTLY_MISSING:
        advice = "little is left to learn from: remove the emptiest images"
        return Finding(name="nodata", level="warn", value=value, advice=advice)
    return Finding(name="nodata", level="ok", value=value)


def _kinds(report: DataReport) -> Finding:
    told = ", ".join(f"{kind.images:,} {kind.dtype} with C = {kind.channels}" for kind in report.kinds)
    types = {kind.dtype for kind in report.kinds}
    rare = sum(kind.images for kind in report.kinds[1:])
    if report.left_out:
        parted = [text.partition("; ") for text in report.left_out]
        value, remedy = "; ".join([told, *(what for what, _, _ in parted)]), "; ".join(how for _, _, how in parted)
        return Finding(name="kinds", level="note", value=value, advice=remedy)
    if len(types) < 2 and rare <= MIXED * report.looked_at:
        return Finding(name="kinds", level="ok", value=told or "not told by the headers")
    advice = f"all are brought to {report.dtype} and one C: check that they belong together, or train on one kind"
    return Finding(name="kinds", level="note", value=told, advice=advice)


def _sizes(report: DataReport) -> list[Finding]:
    sizes, crop = report.sizes, _size(report.img_size)
    level: _Level = "warn" if sizes.smaller > MOSTLY_SMALL else "note" if sizes.smaller > SMALL else "ok"
    told = f"{_size(sizes.smallest)} to {_size(sizes.largest)} pixels, {_size(sizes.median)} in the middle"
    long = f"{sizes.elongated:.1%} have sides of more than {ELONGATED:g} to 1"
    return [
        Finding(
            name="sizes",
            level=level,
            value=f"{told}; {sizes.smaller:.1%} smaller than a crop of {crop}",
            advice="" if level == "ok" else "lower --img-size: enlarged images hold no more detail than before",
        ),
        Finding(name="shapes", level="note", value=long, advice="cut them into pieces: a crop shows a part of each")
        if sizes.elongated > EXTREME
        else Finding(name="shapes", level="ok", value=long),
    ]


def _saturation(report: DataReport) -> Finding:
    shares = [channel.low + channel.high for channel in report.channels]
    worst = report.channels[shares.index(max(shares))]
    fullest = max(max(channel.low, channel.high) for channel in report.channels)  # drawings hold both ends
    level: _Level = "stop" if fullest >= ALL_SATURATED else "warn" if max(shares) > SATURATED else "ok"
    value = f"{worst.low:.1%} of the values at the type's smallest and {worst.high:.1%} at its largest"
    if len(shares) > 1:
        value += f" in channel {shares.index(max(shares))}"
    advice = (
        "look at some images: values cut off at the type's end, as of 16-bit data saved as 8-bit ones, are lost, and "
        "need saving anew; an empty background teaches little"
    )
    return Finding(name="saturation", level=level, value=value, advice="" if level == "ok" else advice)


def _range(report: DataReport) -> Finding:
    used = [channel.largest for channel in report.channels if channel.largest is not None]
    if not used:
        return Finding(name="range", level="ok", value="raw float values have no range of their own")
    value = f"the largest value is {max(used):.1%} of what {report.pixel_dtype} holds"
    if report.pixel_dtype == "uint8" and max(used) <= FEW_LEVELS:
        advice = "few levels are left: save the images scaled to the whole range, or as 16-bit TIFF"
        return Finding(name="range", level="warn", value=value, advice=advice)
    if report.pixel_dtype == "uint16" and max(used) <= SMALL_RANGE:
        advice = "normal for data of 10 to 14 bits; use the data's own --statistics, not ImageNet's"
        return Finding(name="range", level="note", value=value, advice=advice)
    return Finding(name="range", level="ok", value=value)


def _statistics(report: DataReport, own: bool) -> Finding:
    varying = [channel for channel in report.channels if channel.varies] or report.channels
    means, stds = (by_channel([getattr(channel, of) for channel in varying], digits=2) for of in ("mean", "std"))
    value = f"after the run's own transforms mean {means}, std {stds}"
    level, advice = _judged_statistics([channel for channel in varying if _is_off(channel)], own)
    return Finding(name="channel statistics", level=level, value=value, advice=advice)


def _judged_statistics(off: Sequence[Channel], own: bool) -> tuple[_Level, str]:
    """The level, and what to do about the channels that are off."""
    if not off:
        return "ok", ""
    expected = f"expected 0 to within {MEAN_BOUND} and 1 to within {STD_BOUND}"
    if not all(isfinite(channel.mean) and isfinite(channel.std) for channel in off):
        return "stop", f"{expected}: find the values that are not finite"
    if not own:
        return "warn", f"{expected}: right for weights that were trained with them, else use --statistics data"
    if all(abs(channel.whole_mean) <= MEAN_BOUND and abs(channel.whole_std - 1) <= STD_BOUND for channel in off):
        why = "resizing takes fine grain out of crops, and large images count for more in the statistics than in crops"
        return "note", f"{expected}: harmless, the statistics are these images' own; {why}"
    return "stop", f"{expected}: use --statistics data, or the statistics of these images"


def _is_off(channel: Channel) -> bool:
    near_mean = abs(channel.mean) <= MEAN_BOUND + STANDARD_ERRORS * channel.mean_error
    # What is not a number is near nothing.
    return not (near_mean and abs(channel.std - 1) <= STD_BOUND + STANDARD_ERRORS * channel.std_error)


def _empty_channels(report: DataReport) -> Finding:
    empty = [str(number) for number, channel in enumerate(report.channels) if not channel.varies]
    if not empty:
        return Finding(name="empty channels", level="ok", value="none")
    advice = "they hold nothing to learn: leave these channels out, or find out where they were lost"
    value = f"one value all over in channel {listed(empty)}, counted from 0"
    return Finding(name="empty channels", level="warn", value=value, advice=advice)


def _plain(report: DataReport) -> Finding:
    plain = report.constant + report.nearly_constant
    value = f"{_share(plain, report.looked_at)}, {report.constant:,} of them of one value"
    level: _Level = "warn" if plain > PLAIN * report.looked_at else "ok"
    advice = "remove images without content, such as black frames and failed downloads"
    return Finding(name="constant images", level=level, value=value, advice="" if level == "ok" else advice)


def _copies(report: DataReport, found: Copies, name: str, what: str) -> Finding:
    if not found.pairs:
        return Finding(name=name, level="ok", value="none")
    groups = "; ".join(" = ".join(group) for group in found.groups)
    value = f"{found.extra:,} of {report.looked_at:,} images {what}"
    if report.looked_at < report.total:
        value += f", {found.share:.1%} of the whole set by estimate"
    level: _Level = "warn" if found.share > COPIED else "note"
    advice = "keep one of each: copies count twice in training, and may lie in a test set too"
    return Finding(name=name, level=level, value=f"{value}: {groups}", advice=advice)


def _share(some: int, of: int) -> str:
    return f"{some:,} of {of:,} images ({some / of:.1%})"


def _size(size: Sequence[int]) -> str:
    return f"{size[1]} x {size[0]}"
