"""The flags of a run, derived from its groups and from the kinds of components that are chosen.

Two passes: the first reads which recipe and which kinds are asked for, the second parses all flags with those of the
chosen kinds among them. No PyTorch here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro

from mae.config import GROUPS, Names, RunConfig, Size, Tracker, as_flag
from mae.core import component
from mae.core.describe import Option, describe, help_of
from mae.core.kinds import kinds, room_of
from mae.core.method import OPTIONAL, SLOTS, owner_of
from mae.errors import UsageError
from mae.options import shown
from mae.recipes import recipe_config

_Flag = tuple[str, Any, Any]
"""Name, type and default."""

_MODEL, _METHOD = ("tokenizer", "encoder", "decoder"), ("mask", "target", "loss", "teacher", "adapter")
_HELP = {
    "tokenizer": "What samples are.",
    "encoder": "Sees the visible patches.",
    "decoder": "Predicts the masked patches.",
    "mask": "Which patches are masked.",
    "target": "What is predicted.",
    "loss": "Distance of prediction and target.",
    "teacher": "A network whose outputs are the target.",
    "adapter": "What of the encoder is trained, with --init-from.",
}
_UNDECIDED = {"in_chans": "the data's", "channels": "all", "nodata": "none", "teacher_source": "none"}


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the run is."""

    source: Annotated[str, tyro.conf.Positional, shown("the recipe's, or that of the run to resume", "SOURCE")] = ""
    """Images: a folder, a list file, a .zip, a pack ('mae pack') or its URL, tars, hf:NAME, builtin:photos,
    builtin:digits, cifar10, stl10 or imagenet."""
    recipe: Annotated[str, tyro.conf.arg(metavar="RECIPE")] = "default"
    """Where the defaults come from: a name of 'mae list recipes', or a run's config.json."""
    model: Annotated[str | None, shown("by image size and device", "NAME")] = None
    """A name of 'mae list models'."""
    init_from: Annotated[str | None, shown("fresh weights", "MODEL")] = None
    """Weights to begin with, which say sizes, target and statistics: a run, a checkpoint, a file, others'
    folder, timm:NAME or hf:NAME."""


class RunFlags:
    """The flags of a run, for `tyro.cli`, and the run they stand for.

    Args:
        args: what was typed.
        recipe: where the defaults come from unless another is asked for.
        without: options that the command does not offer.

    Attributes:
        given: names of the options that stand in `args`; of the source once `config` was called.
        type: a dataclass of groups, to be an argument of the function that `tyro.cli` calls.

    Raises:
        UsageError: an option of a kind of component that is not chosen.
    """

    def __init__(self, args: list[str], *, recipe: str = "default", without: Collection[str] = ()) -> None:
        self._typed, self._without = _typed_names(args), without
        default = recipe_config(value_of(args, "recipe") or recipe).make_room(self._typed)
        chosen = {slot: value_of(args, slot) for slot in SLOTS}
        known = {slot: kind for slot, kind in chosen.items() if kind is not None and kind in kinds(room_of(slot))}
        self._default = default.override(known) if known else default
        groups = self._groups()
        self.given = self._typed & {option.name for group in groups.values() for option in fields(group)}
        for name in sorted(self._typed - self.given - {"help"}):
            if owner := owner_of(name):
                slot, kind = owner
                raise UsageError(f"{as_flag(name)} is an option of {slot} {kind}; give --{slot} {kind} too")
        # An empty help, since tyro would otherwise search these classes' source for one.
        made = [
            (title, Annotated[group, tyro.conf.arg(help="")], field(default_factory=group))
            for title, group in groups.items()
        ]
        self.type: Any = Annotated[make_dataclass("Flags", made, frozen=True, kw_only=True), tyro.conf.OmitArgPrefixes]

    def config(self, parsed: Any) -> RunConfig:
        """The run that the flags stand for."""
        values = {name: value for group in vars(parsed).values() for name, value in vars(group).items()}
        if values["source"] and values["source"] != self._default.source:
            self.given.add("source")
        return self._default.override({name: values[name] for name in self.given})

    def _groups(self) -> dict[str, type]:
        """A dataclass of flags for each title."""
        flat = self._default.flat()
        terms = [_flag(option, flat) for kind in kinds("terms") for option in self._term_options(kind, flat)]
        return {
            "run": self._shortened(_Run, flat),
            "data": self._shortened(GROUPS["data"], flat),
            "model": self._made("Model", _component_flags(_MODEL, flat)),
            "method": self._made("Method", [*_component_flags(_METHOD, flat), *terms]),
            "optimisation": self._shortened(GROUPS["optim"], flat),
            "evaluation": self._shortened(GROUPS["evaluation"], flat),
            "machine": self._shortened(GROUPS["machine"], flat),
        }

    def _term_options(self, kind: str, flat: Mapping[str, Any]) -> Iterator[Option]:
        """The weight of a term, and, where that is asked for, its other options."""
        wanted = flat[kind] > 0 or kind in self._typed
        for option in describe("terms", kind).options:
            if option.name == "weight" or wanted or option.flat in self._typed:
                yield option

    def _shortened(self, group: type, flat: Mapping[str, Any]) -> type:
        """A group's flags with what the recipe says as their defaults, and their help."""
        helped = help_of(group)
        return self._made(
            group.__name__.removesuffix("Config").strip("_"),
            [
                (each.name, _hint(each.type, flat[each.name], help=helped[each.name]), flat[each.name])
                for each in fields(group)
            ],
        )

    def _made(self, name: str, flags: list[_Flag]) -> type:
        kept = [(flag, hint, field(default=default)) for flag, hint, default in flags if flag not in self._without]
        return make_dataclass(name, kept, frozen=True, kw_only=True)


def value_of(args: list[str], name: str) -> str | None:
    """What a flag was given, read before all others; of one that is given again the last, which counts."""
    flag, found = "--" + name.replace("_", "-"), None
    for position, arg in enumerate(args):
        if arg == flag and position + 1 < len(args):
            found = args[position + 1]
        elif arg.startswith(f"{flag}="):
            found = arg.removeprefix(f"{flag}=")
    return found


def _typed_names(args: list[str]) -> set[str]:
    """Names of the options that stand on the command line, ours and others."""
    names = {arg[2:].split("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}
    return names | {name.removeprefix("no_") for name in names}


def _component_flags(slots: Collection[str], flat: Mapping[str, Any]) -> list[_Flag]:
    """The kinds to choose among, where there are several, and the options of the chosen ones, each name once."""
    found: dict[str, _Flag] = {}
    for slot in slots:
        known, kind = kinds(room_of(slot)), flat[slot]
        if len(known) > 1 or (known and slot in OPTIONAL):
            found[slot] = slot, _hint(Literal[tuple(known)], kind, help=_HELP[slot], undecided="none"), kind
        for option in describe(room_of(slot), kind).options if kind is not None else ():
            if not option.is_measured:
                found.setdefault(option.flat, _flag(option, flat))
    return list(found.values())


def _flag(option: Option, flat: Mapping[str, Any]) -> _Flag:
    """An option as tyro takes it; one that its model decides is None until it is given."""
    default, undecided = flat.get(option.flat), _UNDECIDED.get(option.flat, "the model's")
    if default is None and isinstance(option.default, bool):  # a switch all the same; it counts only where it is given
        default = option.default
    return option.flat, _hint(option.type, default, help=option.help, undecided=undecided), default


def _hint(hint: Any, default: Any, *, help: str, undecided: str = "") -> Any:
    """The type of a flag as tyro takes it, with its help.

    Args:
        hint: of the option; it may be marked by `Metavar` or `shown`.
        default: None where it is undecided.
        help: one line.
        undecided: what an undecided one will be, where no mark says that.
    """
    plain, marks = plain_type(hint), getattr(hint, "__metadata__", ())
    told: dict[str, Any] = {"help": help}
    if (metavar := metavar_of(hint)) is not None and (default is None or plain is not bool):
        told["metavar"] = metavar
    if default in (None, "", ()):
        hints = (getattr(mark, "help_behavior_hint", None) for mark in marks)
        told["help_behavior_hint"] = next(filter(None, hints), f"(default: {undecided})")
    if default is None or NoneType in get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint):
        plain = _or_none(plain)
    kept = [mark for mark in marks if not hasattr(mark, "help_behavior_hint")]
    return Annotated[plain, *kept, tyro.conf.arg(**told)]


def plain_type(hint: Any) -> Any:
    """The type that is parsed: without ranges, for whoever holds the option checks those, and without None."""
    if hint is component.Size or (get_origin(hint) is Annotated and get_args(hint)[0] == component.Size):
        return Size
    if get_origin(hint) is Annotated:
        return plain_type(get_args(hint)[0])
    if get_origin(hint) is UnionType or get_origin(hint) is Union:
        (kind,) = [each for each in get_args(hint) if each is not NoneType]
        return Names if kind == tuple[str, ...] else plain_type(kind)
    if get_origin(hint) is tuple and {*map(plain_type, get_args(hint))} == {float}:
        return _floats(len(get_args(hint)))
    if hint in (tuple[Tracker, ...], tuple[str, ...]):
        return _parsed_by(tuple, count="*", metavar="NAME ...")
    return hint


def _floats(count: int) -> Any:
    """So many numbers."""
    return _parsed_by(lambda texts: tuple(map(float, texts)), count=count, metavar=" ".join("X" * count))


def _or_none(plain: Any) -> Any:
    """A plain type, or `None` typed as such."""
    if plain not in (int, float, str, Path):
        return Union[None, plain]  # noqa: UP007 - with another type first, tyro imports a package to compare them
    return _parsed_by(lambda texts: None if texts == ["None"] else plain(texts[0]), count=1, metavar="VALUE")


def _parsed_by(parse: Callable[[list[str]], Any], *, count: int | Literal["*"], metavar: str) -> Any:
    """A type parsed by our own function: tyro's messages on unions are long, and it imports a package for tuples."""
    return Annotated[
        object,
        tyro.constructors.PrimitiveConstructorSpec[object](
            nargs=count,
            metavar=metavar,
            instance_from_str=parse,
            is_instance=lambda value: True,
            str_from_instance=lambda value: list(map(str, value)) if isinstance(value, tuple) else [str(value)],
        ),
    ]


def metavar_of(hint: Any) -> str | None:
    """What stands for an option's value; None: what tyro puts there."""
    plain, marks = plain_type(hint), getattr(hint, "__metadata__", ())
    if marked := [found for mark in marks if (found := getattr(mark, "metavar", None))]:
        return marked[0]
    if get_origin(plain) is Literal:
        return "{" + ",".join(map(str, get_args(plain))) + "}"
    known = {bool: "{True,False}", Size: "SIDE|HxW", Names: "NAME,NAME", int: "N", float: "X", str: "VALUE"}
    return known.get(plain)
