"""A component is its own configuration: one frozen dataclass whose fields carry type, range, help and flag.

A mask, target, loss, term, decoder, encoder, teacher or tokenizer is a class like this, in a file of its own:

    @dataclass(frozen=True, kw_only=True)
    class GridMask(Mask):
        \"\"\"Every second patch of every second row stays visible.\"\"\"

        kind: ClassVar[str] = "grid"

        ratio: Share = 0.75
        \"\"\"Fraction of the patches masked.\"\"\"

Flags, help, JSON, checks and the tests of all kinds are derived from it; nothing declares an option again. No PyTorch
here: the command line reads this to print its help.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt

from mae import records
from mae.errors import UsageError


@dataclass(frozen=True)
class Metavar:
    """What stands for an option's value in help."""

    metavar: str


Share = Annotated[float, Gt(0), Lt(1), Metavar("FRACTION")]
"""A fraction, neither nothing nor all."""
ShareOfAll = Annotated[float, Gt(0), Le(1), Metavar("FRACTION")]
"""A fraction, 1 for all."""
Epsilon = Annotated[float, Gt(0), Le(1), Metavar("EPS")]
"""Added to what must not become 0."""
Weight = Annotated[float, Ge(0), Metavar("WEIGHT")]
"""How much a term counts in the loss; 0 leaves it out."""
Positive = Annotated[float, Gt(0)]
"""A finite number above 0."""
NotNegative = Annotated[float, Ge(0)]
"""A finite number, 0 or more."""
Count = Annotated[int, Gt(0)]
"""A whole number, 1 or more."""

Size = Annotated[int, Gt(0), Le(16384)] | tuple[Annotated[int, Gt(0), Le(16384)], Annotated[int, Gt(0), Le(16384)]]
"""Height and width; one number for a square."""
Channels = Annotated[int, Gt(0), Le(1024)]
"""Channels of an image."""
# Far above any model in use, so that no file's numbers make building a model hang.
Width = Annotated[int, Gt(0), Le(16384)]
"""Values of a token, or attention heads."""
Depth = Annotated[int, Gt(0), Le(256)]
"""Blocks."""
MlpRatio = Annotated[float, Gt(0), Le(64), Metavar("RATIO")]
"""Hidden width of an MLP over the token width."""


@dataclass(frozen=True)
class Alias:
    """The field's own short name of an option: its flag, and its keyword in `mae.create_model`.

    Without one, the option `ratio` of a mask is called `mask_ratio`.
    """

    name: str


@dataclass(frozen=True)
class Measured:
    """Marks an option that the data decides, as their mean: it has no flag."""


def flat_name(slot: str, kind: str, name: str, hint: Any) -> str:
    """An option's name beside all others': its flag, with dashes for underscores, and its keyword.

    Args:
        slot: the field of `MethodConfig` that its component fills.
        kind: of the component.
        name: of the dataclass's field.
        hint: its annotation, which may hold an `Alias`.
    """
    for mark in getattr(hint, "__metadata__", ()):
        if isinstance(mark, Alias):
            return mark.name
    if slot != "term":
        return f"{slot}_{name}"
    return kind if name == "weight" else f"{kind}_{name}"


@dataclass(frozen=True)
class Component:
    """What every component inherits: its options are checked when it is made.

    Attributes:
        kind: what files and flags call it.
        slot: the field of `MethodConfig` it fills.

    Raises:
        UsageError: an option of another type, or out of range.
    """

    kind: ClassVar[str]
    slot: ClassVar[str]

    def __post_init__(self) -> None:
        hints = _hints(type(self))  # type: ignore[arg-type]
        check_options(self, name=lambda option: flat_name(self.slot, self.kind, option, hints[option]))


def check_options(options: Any, *, name: Callable[[str], str]) -> None:
    """Refuse values of another type or out of range; numbers of NumPy become Python's own, lists tuples.

    Args:
        options: a frozen dataclass, which is changed in place.
        name: what one of its fields is called in messages.

    Raises:
        UsageError: see above.
    """
    for field, hint in _hints(type(options)).items():  # type: ignore[arg-type]
        object.__setattr__(options, field, checked(getattr(options, field), hint, name=name(field)))


def options_of(component: object) -> dict[str, Any]:
    """The options of a component by name, as they are."""
    assert is_dataclass(component)
    return {field.name: getattr(component, field.name) for field in fields(component)}


def to_json(component: Any) -> dict[str, Any]:
    """A component as plain JSON values: its kind, its options, and the package it comes from, if not this one."""
    package = type(component).__module__.partition(".")[0]
    origin = {} if package == __package__.partition(".")[0] else {"package": package}
    return {"kind": component.kind, **origin, **records.to_json(component)}


def make(cls: type[Any], options: Mapping[str, Any], *, what: str) -> Any:
    """A component from its options, given as in JSON.

    Args:
        cls: its class.
        options: by name; those left out keep their default.
        what: what it is called in messages, such as `mask block`.

    Raises:
        UsageError: an unknown option (the nearest known is named), one of another type, or out of range.
    """
    records.check_known(options, [field.name for field in fields(cls)], what=f"option of {what}")
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in options.items()})


@lru_cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def checked(value: Any, hint: Any, *, name: str) -> Any:
    """The value as its type wants it: numbers of NumPy as Python's own, lists as tuples.

    Raises:
        UsageError: a value of another type or out of range; it is called `name`.
    """
    if isinstance(value, float) and not isfinite(value):
        raise UsageError(f"{name} is {value}; expected a finite number")
    if (plain := _plain(value, hint)) is not _UNSURE:
        return plain
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_json(records.json_text(value))
    except ValidationError as error:
        # Of one number or a pair: what is said of the pair's own numbers tells more than that a pair is no number.
        faults = error.errors(include_url=False)
        expected = max(faults, key=lambda fault: len(fault["loc"]))["msg"].removeprefix("Input should be ")
        raise UsageError(f"{name} is {records.shown(value)}; expected {expected}") from error


@lru_cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


_UNSURE = object()


def _plain(value: Any, hint: Any) -> Any:
    """The value where it is plainly right, without pydantic: importing that takes longer than printing help may.

    Returns:
        The value, a whole number as a float where one is wanted; `_UNSURE` for what pydantic must decide and word.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        plain = _plain(value, inner[0])
        return plain if plain is not _UNSURE and all(_within(plain, mark) for mark in inner[1:]) else _UNSURE
    if origin in (Union, UnionType):
        return next((plain for each in inner if (plain := _plain(value, each)) is not _UNSURE), _UNSURE)
    if origin is Literal:
        return value if type(value) is str and value in inner else _UNSURE
    if origin is tuple and isinstance(value, tuple | list):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        plains = tuple(map(_plain, value, kinds)) if len(value) == len(kinds) else (_UNSURE,)
        return _UNSURE if _UNSURE in plains else plains
    if hint is float and type(value) is int and abs(value) < 1 << 53:
        return float(value)
    if hint is Path and isinstance(value, Path) or type(value) is hint and (hint is not str or value.isascii()):
        return value
    return _UNSURE


def _within(value: Any, mark: Any) -> bool:
    match mark:
        case Gt(gt=bound):
            return value > bound
        case Ge(ge=bound):
            return value >= bound
        case Lt(lt=bound):
            return value < bound
        case Le(le=bound):
            return value <= bound
    return not isinstance(mark, BaseMetadata)
