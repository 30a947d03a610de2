"""Text to show: what comes from outside, such as file names, made safe, and many numbers in one line."""

from collections.abc import Sequence
from os.path import commonprefix
from unicodedata import category

_HARMLESS = "\n\t\u200c\u200d"  # lines, tabs and the joiners that some scripts need
_MAX_MARKS = 2  # combining marks in a row: more of them would climb over the lines above
_MAX_LISTED = 16


def visible(text: str) -> str:
    """The text with U+FFFD in place of each character that is not text: control, direction, half of a surrogate pair.

    File names may hold anything; such characters could reverse the text around them, clear a terminal or fail to be
    encoded. Newlines and tabs stay; of many accents on one letter the first few do.
    """
    kept, marks = [], 0
    for character in text:
        kind = category(character)[0]
        marks = marks + 1 if kind == "M" else 0
        if marks <= _MAX_MARKS:
            kept.append("\ufffd" if kind == "C" and character not in _HARMLESS else character)
    return "".join(kept)


def listed(names: Sequence[str]) -> str:
    """Names with commas between them; of more than a line holds, as of the bands of hyperspectral images, the first."""
    more = f", ... ({len(names):,} in all)" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def without_common_folders(names: Sequence[str]) -> list[str]:
    """Names of files without the folders that all of them are in: short, and as different as the names are."""
    common = commonprefix(names).rpartition("/")
    return [name.removeprefix("".join(common[:2])) for name in names]


def by_channel(values: Sequence[float], *, digits: int) -> str:
    """A number a channel; of more channels than a line holds, as of hyperspectral images, the range."""
    if len(values) > _MAX_LISTED:
        return f"{min(values):.{digits}f} to {max(values):.{digits}f} in {len(values):,} channels"
    return " ".join(f"{value:.{digits}f}" for value in values)
