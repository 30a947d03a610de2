"""`MethodConfig`: the one description of a model, held by runs and by model files.

No PyTorch here; components are imported when one is made.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from mae import records
from mae.core.component import checked, make, options_of, to_json
from mae.core.describe import Option, describe
from mae.core.kinds import find, kinds, register, room_of
from mae.errors import UsageError

if TYPE_CHECKING:
    from mae.core import contracts
    from mae.core.types import Layout

SLOTS = ("tokenizer", "encoder", "mask", "decoder", "target", "loss", "teacher", "adapter")
"""Fields that hold one component; `terms` holds any number."""
OPTIONAL = frozenset({"teacher", "adapter"})
"""Those that may be empty, and are by default."""


def default_kind(slot: str) -> str | None:
    """What fills a field that nobody chose: the first kind of its room, or nothing."""
    return None if slot in OPTIONAL else kinds(room_of(slot))[0]


def _default(slot: str) -> Any:
    kind = default_kind(slot)
    return None if kind is None else find(room_of(slot), kind)()


@dataclass(frozen=True, kw_only=True)
class MethodConfig:
    """A masked autoencoder in full; the defaults are those of the official ViT-Base.

    Attributes:
        tokenizer: what samples are and how they are cut into tokens.
        encoder: sees the visible tokens.
        mask: which tokens are masked.
        decoder: predicts the masked ones.
        target: what it must predict.
        loss: distance of prediction and target.
        terms: what is added to the loss.
        teacher: a network whose outputs targets and terms may read; None: none.
        adapter: what of the encoder is trained; None: all of it.

    Raises:
        UsageError: components that do not fit each other.
    """

    tokenizer: Any = field(default_factory=lambda: _default("tokenizer"))
    encoder: Any = field(default_factory=lambda: _default("encoder"))
    mask: "contracts.Mask" = field(default_factory=lambda: _default("mask"))
    decoder: Any = field(default_factory=lambda: _default("decoder"))
    target: Any = field(default_factory=lambda: _default("target"))
    loss: "contracts.Loss" = field(default_factory=lambda: _default("loss"))
    terms: "tuple[contracts.Term, ...]" = ()
    teacher: "contracts.Teacher | None" = None
    adapter: "contracts.Adapter | None" = None

    def __post_init__(self) -> None:
        from mae.core.compatibility import check_method

        # A term that counts for nothing is none; their order is that of the room, where others come last.
        place = {kind: number for number, kind in enumerate(kinds("terms"))}
        terms = sorted((t for t in self.terms if t.weight > 0), key=lambda term: place.get(term.kind, len(place)))
        if twice := [kind for kind, count in Counter(term.kind for term in self.terms).items() if count > 1]:
            raise UsageError(f"term {twice[0]} is given twice; leave one of them out")
        object.__setattr__(self, "terms", tuple(terms))
        check_method(self)
        if self.adapter is not None:
            self.adapter.check(self.encoder)

    @property
    def layout(self) -> "Layout":
        """Sizes of the samples and of their tokens."""
        return self.tokenizer.layout

    @property
    def gives(self) -> "Mapping[str, int]":
        """Widths of the teacher's outputs, by name; empty where there is none."""
        return {} if self.teacher is None else self.teacher.gives(self.encoder)

    @property
    def outputs(self) -> dict[str, int]:
        """Values that the decoder predicts of each token for the `target`, and behind them those for terms by kind."""
        of_terms = {term.kind: term.outputs for term in self.terms}
        return {"target": self.target.width(self.layout, self.gives)} | {k: n for k, n in of_terms.items() if n}

    @property
    def target_changes(self) -> bool:
        """Whether the target of a sample changes in a run, so that losses of two steps are on two scales."""
        return self.teacher is not None and self.teacher.changes and bool(self.target.needs)

    @property
    def mask_changes(self) -> bool:
        """Whether the mask of a sample follows a teacher that changes in a run, so that other tokens are predicted."""
        return self.teacher is not None and self.teacher.changes and bool(self.mask.reads - {"x"})

    @property
    def measured(self) -> dict[str, Any]:
        """The options that the data or an opened network decides, by flat name, as they are before that."""
        described = (option for slot, part in self.components() for option in _described(slot, part.kind))
        return {option.flat: option.default for option in described if option.is_measured}

    def components(self) -> Iterator[tuple[str, Any]]:
        """Each component with the slot it fills."""
        yield from ((slot, getattr(self, slot)) for slot in SLOTS if getattr(self, slot) is not None)
        yield from (("term", term) for term in self.terms)

    def flat(self) -> dict[str, Any]:
        """Every option under its flat name, and the kind of each component under its slot's."""
        found: dict[str, Any] = {slot: None if (own := getattr(self, slot)) is None else own.kind for slot in SLOTS}
        for kind in kinds("terms"):  # those that are not there count for nothing
            found |= defaults_of("term", kind) | {kind: 0.0}
        for slot, component in self.components():
            values = options_of(component)
            found |= {option.flat: values[option.name] for option in _described(slot, component.kind)}
        return found

    def override(self, changes: Mapping[str, Any]) -> "MethodConfig":
        """The same method with some options changed.

        A component of another kind keeps what its predecessor was given and it also knows: another decoder keeps its
        depth. Options left at their default are the new kind's own.

        Args:
            changes: by flat name; a slot's name with a kind, a component, or a component as JSON has it. The name of a
                term is its weight.

        Raises:
            UsageError: an unknown name (the nearest known is named), an option of a kind that is not chosen, values of
                another type or out of range.
        """
        chosen = {slot: _chosen(getattr(self, slot), changes[slot], slot) for slot in SLOTS if slot in changes}
        method = {slot: getattr(self, slot) for slot in SLOTS} | chosen
        terms = {term.kind: term for term in self.terms}
        for term in changes.get("terms", ()):
            term = _component("term", term)
            terms[term.kind] = term
        options = {name: value for name, value in changes.items() if name not in (*SLOTS, "terms")}
        targets = _targets(method, terms, options)
        for (slot, kind), values in targets.items():
            if slot == "term":
                terms[kind] = _with(terms.get(kind) or find("terms", kind)(weight=0.0), values, f"term {kind}")
            else:
                method[slot] = _with(method[slot], values, f"{slot} {kind}")
        return replace(self, **method, terms=tuple(terms.values()))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: each component with its kind and its options."""
        found: dict[str, Any] = {slot: None if (own := getattr(self, slot)) is None else to_json(own) for slot in SLOTS}
        return {**found, "terms": [to_json(term) for term in self.terms]}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MethodConfig":
        """The inverse of `to_json`; components that are not there are the default ones.

        Raises:
            UsageError: an unknown key, kind or option (the nearest known is named), a value of another type or out of
                range.
        """
        records.check_known(values, [field.name for field in fields(cls)], what="part of a model's description")
        found: dict[str, Any] = {slot: _component(slot, values[slot]) for slot in SLOTS if slot in values}
        terms = values.get("terms", [])
        if not isinstance(terms, list | tuple):
            raise UsageError(f"terms is {records.shown(terms)}; expected a list")
        return cls(**found, terms=tuple(_component("term", term) for term in terms))


def component_of(slot: str, options: Mapping[str, Any]) -> Any:
    """The component that options by flat name say of a method that is not decided; None: they name no kind.

    Raises:
        UsageError: a value of another type or out of range.
    """
    if options.get(slot) is None:
        return None
    component = _component(slot, options[slot])
    flats = {option.flat: option.name for option in _described(slot, component.kind)}
    said = {flats[flat]: value for flat, value in options.items() if flat in flats and value is not None}
    return _with(component, said, f"{slot} {component.kind}")


def flat_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `MethodConfig.to_json` gave as options by flat name, without what the data decides; nothing is imported.

    Raises:
        UsageError: a component without a kind, or of an unknown one.
    """
    parts = [(slot, values[slot]) for slot in SLOTS if values[slot] is not None]
    parts += [("term", term) for term in values.get("terms", [])]
    found: dict[str, Any] = {}
    for slot, part in parts:
        kind, room = _kind_of(slot, part), room_of(slot)
        if kind not in kinds(room):
            find(room, kind, package=_package_of(part))  # tells what is missing
        found |= {slot: kind} if slot != "term" else {}
        found |= {
            option.flat: part[option.name]
            for option in _described(slot, kind)
            if option.name in part and not option.is_measured
        }
    return found


def checked_options(options: Mapping[str, Any], *, others: Collection[str]) -> dict[str, Any]:
    """Options of a method that is not decided, as their types want them; of those alone nothing is imported.

    Args:
        options: by flat name; None for what the model decides.
        others: names that are none of a method's options, to be named where one is near.

    Raises:
        UsageError: an unknown name or kind (the nearest known is named), a value of another type or out of range.
    """
    if not options:
        return {}
    for name in (*SLOTS, "terms"):
        for own in options.get(name) or () if name == "terms" else (options.get(name),):
            _register_own("term" if name == "terms" else name, own)
    known: dict[str, Option] = {}
    for slot in (*SLOTS, "term"):
        chosen = options.get(slot)
        for kind in sorted(kinds(room_of(slot)), key=lambda kind: kind != chosen):  # whose types count before others'
            for option in _described(slot, kind):
                known.setdefault(option.flat, option)
    names = [name for name, option in known.items() if not option.is_measured]
    records.check_known(options, [*SLOTS, "terms", *names, *others], what="option")
    return {name: None if value is None else _checked(name, value, known) for name, value in options.items()}


def _checked(name: str, value: Any, known: Mapping[str, Option]) -> Any:
    if name == "terms":
        return tuple(_component("term", term) for term in value)
    if name not in SLOTS:
        return checked(value, known[name].type, name=name)
    if not isinstance(value, str):
        return _component(name, value)
    records.check_known([value], kinds(room_of(name)), what=name)
    return value


def defaults_of(slot: str, kind: str) -> dict[str, Any]:
    """The options of a kind by flat name, as they are when nothing is said of them."""
    return {option.flat: option.default for option in _described(slot, kind)}


def flat_defaults(changes: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of a method of which only `changes` were said: None for what its model decides."""
    found: dict[str, Any] = {}
    for slot in SLOTS:
        given = changes.get(slot)
        kind = given if isinstance(given, str) else getattr(given, "kind", None) or default_kind(slot)
        found[slot] = kind
        decided = slot in ("mask", "target", "loss")  # what no model's name says
        if kind is not None:
            found |= defaults_of(slot, kind) if decided else dict.fromkeys(names_of(slot, kind))
    for kind in kinds("terms"):
        found |= defaults_of("term", kind) | {kind: 0.0}
    return found | {name: value for name, value in changes.items() if name not in SLOTS}


def names_of(slot: str, kind: str) -> set[str]:
    """The flat names of a kind's options."""
    return {option.flat for option in _described(slot, kind)}


def _described(slot: str, kind: str) -> tuple[Option, ...]:
    return describe(room_of(slot), kind).options


def _component(slot: str, given: Any) -> Any:
    """A component from what stands for it: itself, its kind, or JSON; None where it may be empty."""
    room = room_of(slot)
    if given is None and slot in OPTIONAL:
        return None
    if isinstance(given, str):
        return find(room, given)()
    kind = given.get("kind") if isinstance(given, Mapping) else getattr(given, "kind", None)
    if not isinstance(kind, str):
        raise UsageError(f"{slot} is {records.shown(given)}; expected its kind and its options")
    if not isinstance(given, Mapping):
        _register_own(slot, given)
        return given
    cls = find(room, kind, package=_package_of(given))
    options = {name: value for name, value in given.items() if name not in ("kind", "package")}
    return make(cls, options, what=f"{slot} {kind}")


def _register_own(slot: str, given: Any) -> None:
    """A component that was handed over as an object is known by its kind from then on."""
    if given is not None and not isinstance(given, str | Mapping):
        if not hasattr(given, "kind"):
            raise UsageError(
                f"{slot} is {records.shown(given)}; expected a kind, or a component such as an object of "
                f"{', '.join(kinds(room_of(slot)))}"
            )
        # A class that was written anew, as in a notebook's cell, takes the place of the one before.
        if given.kind not in kinds(room_of(slot)) or find(room_of(slot), given.kind) is not type(given):
            register(room_of(slot), type(given))


def _package_of(given: Mapping[str, Any]) -> str | None:
    """Where JSON says that a component comes from; None: from here."""
    package = given.get("package")
    return package if isinstance(package, str) else None


def _kind_of(slot: str, part: Any) -> str:
    """The kind of a component as JSON has it."""
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("kind"), str):
        raise UsageError(f"{slot} is {records.shown(part)}; expected its kind and its options")
    return kind


def _chosen(current: Any, given: Any, slot: str) -> Any:
    """The component that takes a slot, with what the one before was given."""
    if not isinstance(given, str) or current is None:
        return _component(slot, given)
    if given == current.kind:
        return current
    cls = find(room_of(slot), given)
    known, defaults = {field.name for field in fields(cls)}, {field.name: field.default for field in fields(current)}
    kept = {name: value for name, value in options_of(current).items() if name in known and value != defaults[name]}
    return make(cls, kept, what=f"{slot} {given}")


def _with(component: Any, values: Mapping[str, Any], what: str) -> Any:
    return make(type(component), {**options_of(component), **values}, what=what)


def _targets(
    method: Mapping[str, Any], terms: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The options of each component, by slot and kind, from their flat names; one name may set several components."""
    known: dict[str, list[Option]] = {}
    kind_of = {slot: own.kind for slot, own in method.items() if own is not None}
    for slot, kind in [*kind_of.items(), *(("term", kind) for kind in kinds("terms"))]:
        for option in _described(slot, kind):
            known.setdefault(option.flat, []).append(option)
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for flat, value in options.items():
        if flat not in known:
            if owner := owner_of(flat):
                slot, kind = owner
                raise UsageError(f"{flat} is an option of {slot} {kind}, which is not chosen; give {slot}={kind!r} too")
            records.check_known([flat], [*known, *SLOTS, "terms"], what="option")
        for option in known[flat]:
            kind = kind_of.get(option.slot) or next(k for k in kinds("terms") if flat in names_of("term", k))
            found.setdefault((option.slot, kind), {})[option.name] = value
    return found


def owner_of(flat: str) -> tuple[str, str] | None:
    """The slot and the first kind that have an option of this flat name, terms aside; None: no such option."""
    owners = ((slot, kind) for slot in SLOTS for kind in kinds(room_of(slot)) if flat in names_of(slot, kind))
    return next(owners, None)
