"""Which values of a mask stand for which class."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Integer, UInt8

from mae.errors import MAEError, UsageError

IGNORED = 255
"""What stands for pixels that count neither as right nor as wrong; as a number in a file it always means that."""
_MOST = 255
_MOST_NUMBER = 65535  # of a class in a file; larger values are colours
_IGNORED_NAMES = frozenset({"unlabelled", "unlabeled", "void", "ignore", "ignored"})
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class PixelClasses:
    """The classes of a segmentation and their values in mask files.

    Attributes:
        names: the classes, in the order of their numbers here; those that are ignored are not among them.
        values: of each in files: its number there, or its colour as red * 65536 + green * 256 + blue.
        ignored: values of pixels that do not count.
        coloured: whether the files hold colours.
    """

    names: tuple[str, ...]
    values: tuple[int, ...]
    ignored: frozenset[int]
    coloured: bool

    def of(
        self, mask: Integer[np.ndarray, "H W"] | Integer[np.ndarray, "H W 3"], *, name: str
    ) -> UInt8[np.ndarray, "H W"]:
        """The number of each pixel's class here; `IGNORED` where there is none.

        Args:
            mask: as `decode_mask` gives it.
            name: the file's, for messages.

        Raises:
            MAEError: a value that stands for no class, or numbers where colours are expected and the reverse.
        """
        values = self._values(mask, name)
        found, places = np.unique(values, return_inverse=True)
        numbers = {value: number for number, value in enumerate(self.values)}
        if unknown := [value for value in found.tolist() if value not in numbers and value not in self.ignored]:
            raise MAEError(
                f"{name} holds {self.shown(unknown)}, which stands for no class; expected {self.shown(self.values)}: "
                f"name it in classes.txt, or leave such pixels out with --ignore"
            )
        table = np.array([numbers.get(value, IGNORED) for value in found.tolist()], dtype=np.uint8)
        return table[places].reshape(values.shape)

    def _values(self, mask: np.ndarray, name: str) -> np.ndarray:
        if mask.ndim == 3 and not self.coloured:
            if (mask == mask[:, :, :1]).all():  # numbers, saved as grey colours
                return mask[:, :, 0]
            raise MAEError(f"{name} holds colours, other masks numbers of classes; expected one kind")
        if mask.ndim == 2 and self.coloured:
            raise MAEError(f"{name} holds numbers of classes, other masks colours; expected one kind")
        return packed(mask) if self.coloured else mask

    def shown(self, values: Collection[int]) -> str:
        """Some values as a user knows them."""
        some = sorted(values)[:_SHOWN]
        texts = [_text_of(value, coloured=self.coloured) for value in some]
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        kind = "colour" if self.coloured else "number"
        return f"the {kind}{'s' if len(values) > 1 else ''} {', '.join(texts)}{more}"


def _text_of(value: int, *, coloured: bool) -> str:
    """A number, or a colour's red, green and blue."""
    return "{} {} {}".format(*value.to_bytes(3, "big")) if coloured else str(value)


def packed(colours: Integer[np.ndarray, "*places 3"]) -> Int32[np.ndarray, "*places"]:
    """Each colour as one number; of colours of 16 bits the upper 8 count."""
    if colours.max(initial=0) > 255:
        colours = colours >> 8
    return colours.astype(np.int32) @ np.array([1 << 16, 1 << 8, 1], dtype=np.int32)


def pixel_classes(
    listed: Mapping[str, int | None] | None,
    found: Collection[int],
    *,
    coloured: bool,
    ignore: Collection[int],
    name: str,
) -> PixelClasses:
    """The classes of masks, by the list beside them or else by the values that are found.

    Args:
        listed: the names in `classes.txt` with the values told there, None where none is; None: there is no such file.
        found: values in the masks, where there is no list.
        coloured: whether the masks hold colours.
        ignore: further numbers that do not count.
        name: what the user called the data, for messages.

    Raises:
        UsageError: colours that no list names, fewer than two classes, or too many.
    """
    ignored = {*ignore, *([] if coloured else [IGNORED])}
    if coloured and (listed is None or None in listed.values()):
        raise UsageError(
            f"{name}: the masks hold colours, and nothing says which class each stands for; write classes.txt beside "
            "the images' folder, a line a class: its name, then red, green and blue, as in 'road 128 64 128'"
        )
    if listed is None:
        values = {f"class {value}": value for value in sorted(found)}
    else:
        values = {label: number if value is None else value for number, (label, value) in enumerate(listed.items())}
    _check_different(values, coloured=coloured, name=name)
    ignored |= {value for label, value in values.items() if label.lower() in _IGNORED_NAMES}
    counted = {label: value for label, value in values.items() if value not in ignored}
    if not 2 <= len(counted) <= _MOST:
        binary = not coloured and len(counted) < 2 and IGNORED in values.values()
        hint = f"; {IGNORED} marks what does not count, so save masks of 0 and 255 as 0 and 1" if binary else ""
        raise UsageError(f"{name} has {len(counted)} classes that count; expected 2 to {_MOST}{hint}")
    return PixelClasses(
        names=tuple(counted), values=tuple(counted.values()), ignored=frozenset(ignored), coloured=coloured
    )


def _check_different(values: Mapping[str, int], *, coloured: bool, name: str) -> None:
    labels: dict[int, str] = {}
    for label, value in values.items():
        if (other := labels.setdefault(value, label)) != label:
            raise UsageError(
                f"{name}: classes.txt gives {_text_of(value, coloured=coloured)} to {other!r} and to {label!r}; give "
                f"each class {'a colour' if coloured else 'a number'} of its own"
            )


def read_classes(path: Path) -> dict[str, int | None]:
    """The names in a list of classes, one a line, with their colours or numbers where they are told.

    A line is `road`, `3 road`, `road 128 64 128` or `128 64 128 road`; `#` begins a comment. Where each line ends in
    one number and none begins with one it is that of the class: `road 3`.

    Raises:
        UsageError: a name twice, a colour out of range, or a file that is no such text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text: {error}") from error
    classes: dict[str, int | None] = {}
    lines = text.splitlines()
    rows = [line.replace(",", " ").split() for line in lines]
    behind = _end_in_numbers([words for words in rows if words and not words[0].startswith("#")])
    for number, (line, words) in enumerate(zip(lines, rows, strict=True), start=1):
        if not words or words[0].startswith("#"):
            continue
        label, value = _parsed([words[-1], *words[:-1]] if behind else words)
        if not label or label in classes:
            what = "names no class" if not label else f"names {label!r} again"
            raise UsageError(f"{path}, line {number} {what}; expected a new name, perhaps with its colour or number")
        if value is not None and value < 0:
            raise UsageError(f"{path}, line {number}: {line.strip()!r}; expected red, green and blue from 0 to 255")
        classes[label] = value
    return classes


def tells_colours(listed: Mapping[str, int | None] | None) -> bool:
    """Whether a list of classes, as `read_classes` gives it, says which colours stand for them; None: there is none."""
    return any(value is not None and value > _MOST_NUMBER for value in (listed or {}).values())


def _end_in_numbers(rows: list[list[str]]) -> bool:
    """Whether each line is a name and one number, and not the names are `zone 1`, `zone 2`."""
    for words in rows:
        numbers = [word.isdecimal() for word in words]
        if len(words) < 2 or not numbers[-1] or numbers[-2] or words[0].rstrip(":").isdecimal():
            return False
    return len({tuple(words[:-1]) for words in rows}) == len(rows)


def _parsed(words: list[str]) -> tuple[str, int | None]:
    """A name and its colour or number; -1 for a colour out of range."""
    for colour, rest in ((words[-3:], words[:-3]), (words[:3], words[3:])):
        if rest and all(word.isdecimal() for word in colour):
            parts = [int(word) for word in colour]
            return " ".join(rest), int.from_bytes(bytes(parts), "big") if max(parts) < 256 else -1
    if len(words) > 1 and words[0].rstrip(":").isdecimal():
        return " ".join(words[1:]), int(words[0].rstrip(":"))
    return " ".join(words), None
