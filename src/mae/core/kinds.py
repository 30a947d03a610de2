"""Which kinds of each component there are, by name: ours, registered ones, and those of installed packages.

The table of a room stands in its `__init__`; a kind is imported when it is used, so that help and lists need no
PyTorch.
"""

import sys
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mae import records
from mae.errors import UsageError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ROOMS = {
    "modalities": "tokenizer",
    "encoders": "encoder",
    "masks": "mask",
    "decoders": "decoder",
    "targets": "target",
    "losses": "loss",
    "terms": "term",
    "teachers": "teacher",
    "adapters": "adapter",
}
"""Each room of components, and the field of `MethodConfig` they fill."""

_PROGRAMS = ("__main__", "__mp_main__", "builtins")
"""What Python calls the module of a class that stands in no file of a package."""


class MissingPackage(UsageError):
    """A component of a package or program that is not here."""


_registered: dict[str, dict[str, type[Any]]] = {room: {} for room in ROOMS}


def register(room: str, cls: type[Any]) -> type[Any]:
    """Give a component of your own a name, in this process: its `kind`.

    An installed package does the same for every process by an entry point of the group `openmae.ROOM`, whose name is
    the kind.

    Args:
        room: `masks`, `targets`, `losses`, `terms`, `decoders`, `encoders`, `teachers`,
            `adapters` or `modalities`.
        cls: a frozen dataclass that keeps the room's contract (see `mae.core.contracts`).

    Returns:
        The class, so that this can be used as a decorator's body.

    Raises:
        UsageError: no such room, a class that does not keep its contract, or a kind that is another component's.
    """
    records.check_known([room], ROOMS, what="room of components")
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not kind.isidentifier():
        raise UsageError(f"{cls.__name__} has the kind {kind!r}; expected a name such as 'my_mask'")
    _check_contract(room, cls)
    known = _registered[room].get(kind)
    if kind in _own(room) or (known is not None and known is not cls and known.__qualname__ != cls.__qualname__):
        raise UsageError(f"{kind} is another one of the {room}; give {cls.__name__} another kind")
    _registered[room][kind] = cls
    return cls


def kinds(room: str) -> list[str]:
    """The names of a room's kinds: ours in the order of its `__init__`, then others'."""
    return list(dict.fromkeys([*_own(room), *_registered[room], *_installed(room)]))


def find(room: str, kind: str, *, package: str | None = None) -> type[Any]:
    """The class of a kind; that of an installed package is imported.

    Args:
        room: see `register`.
        kind: its name.
        package: where a file says that it comes from; never imported for that.

    Raises:
        UsageError: no such kind; the nearest ones are named. An installed package whose class cannot be imported, does
            not keep its contract or has another kind than its entry point's name.
        MissingPackage: no such kind, and its package is known.
    """
    if kind in (own := _own(room)):
        module, _, name = own[kind].rpartition(".")
        return getattr(import_module(f"mae.{room}.{module}"), name)
    if kind in _registered[room]:
        return _registered[room][kind]
    if kind in (installed := _installed(room)):
        return _loaded(room, installed[kind])
    slot = ROOMS[room]
    if package is not None:
        where = "a program" if package in _PROGRAMS else f"the package {records.shown(package)}: install that, or"
        raise MissingPackage(
            f"unknown {slot} {records.shown(kind)}; it comes from {where}"
            f"{': ' if package in _PROGRAMS else ' '}call mae.register({room!r}, ...) with its class first"
        )
    records.check_known([kind], kinds(room), what=slot)
    raise AssertionError(kind)  # every known kind was found above


def room_of(slot: str) -> str:
    """The room whose components fill a field of `MethodConfig`."""
    return next(room for room, filled in ROOMS.items() if filled == slot)


def source_of(room: str, kind: str) -> str | type[Any]:
    """Where a kind's options can be read: `module.Class` within a room of ours, else the class itself."""
    own = _own(room)
    return f"mae.{room}.{own[kind]}" if kind in own else find(room, kind)


def _loaded(room: str, entry: "EntryPoint") -> type[Any]:
    """The class of an installed package, checked as one that is registered is."""
    said = f"{entry.name} = {entry.value!r} among the entry points openmae.{room}"
    try:
        cls = entry.load()
    except Exception as error:  # whatever the import of others' code raises
        raise UsageError(f"{said} cannot be imported: {error!r}; mend or uninstall that package") from error
    if (kind := getattr(cls, "kind", None)) != entry.name:
        raise UsageError(f"{said} is of the kind {records.shown(kind)}; its package must give both the same name")
    _check_contract(room, cls)
    return cls


def _check_contract(room: str, cls: type[Any]) -> None:
    from mae.core import contracts

    name = ROOMS[room].capitalize()
    if not is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UsageError(f"{cls.__name__} is no frozen dataclass; write @dataclass(frozen=True, kw_only=True) above it")
    promised = [each for each in dir(getattr(contracts, name)) if not each.startswith("_")]
    if missing := [each for each in promised if not hasattr(cls, each)]:
        raise UsageError(
            f"{cls.__name__} has no {missing[0]}, which {room} have; inherit from mae.core.contracts.{name}, which "
            "gives the usual answers"
        )


def _own(room: str) -> dict[str, str]:
    return import_module(f"mae.{room}").KINDS


@lru_cache
def _installed(room: str) -> "dict[str, EntryPoint]":
    if not _are_announced():
        return {}
    from importlib.metadata import entry_points

    return {entry.name: entry for entry in entry_points(group=f"openmae.{room}")}


@lru_cache
def _are_announced() -> bool:
    """Whether an installed package may have components, without importing what searches them: help has no time for it.

    What is no plain folder of packages is left to that search.
    """
    if any(hasattr(finder, "find_distributions") for finder in sys.meta_path if finder is not PathFinder):
        return True
    for place in map(Path, sys.path):
        if place.is_file():
            return True
        for table in [*place.glob("*.dist-info/entry_points.txt"), *place.glob("*.egg-info/entry_points.txt")]:
            if b"[openmae." in table.read_bytes():
                return True
    return False
