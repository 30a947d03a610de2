"""What a component's class says of itself - options, types, defaults, help - read from its text.

Text, since importing most components imports PyTorch, and help must appear at once. Nothing is run: of annotations and
defaults only plain forms are understood, and a test holds what is read equal to the class itself. Classes of others are
imported when they are named, and asked themselves.
"""

import ast
import operator
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache, reduce
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from textwrap import dedent
from types import NoneType
from typing import Annotated, Any, Literal, get_type_hints

from mae.core import component
from mae.core.kinds import ROOMS, source_of

_PLAIN = {
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "tuple": tuple,
    "Literal": Literal,
    "Annotated": Annotated,
}


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option of a component.

    Attributes:
        slot: the field of `MethodConfig` that the component fills.
        name: of the dataclass's field.
        flat: its name beside all others': its flag, with dashes for underscores, and its keyword.
        type: its annotation, with range and alias.
        default: what it is when it is not given; `dataclasses.MISSING` if it must be.
        help: one line.
    """

    slot: str
    name: str
    flat: str
    type: Any
    default: Any
    help: str

    @property
    def is_measured(self) -> bool:
        """Whether the data decides it."""
        return any(isinstance(mark, component.Measured) for mark in getattr(self.type, "__metadata__", ()))


@dataclass(frozen=True, kw_only=True)
class Description:
    """A kind of component: the first line of its docstring, and its options."""

    kind: str
    summary: str
    options: tuple[Option, ...]


def describe(room: str, kind: str) -> Description:
    """What a kind says of itself.

    Raises:
        UsageError: no such kind, see `mae.core.kinds.find`.
    """
    return _described(room, kind, source_of(room, kind))  # type: ignore[arg-type]


@lru_cache  # by the class too, for one that is written anew may have other options
def _described(room: str, kind: str, source: str | type[Any]) -> Description:
    if not isinstance(source, str):  # it is imported already, and may inherit from anything
        return _of_class(source, kind)
    module, _, name = source.rpartition(".")
    tree = _parsed(module)
    node = _class(tree, name)
    options = {option.name: option for option in _options(tree, node, room, kind)}  # a redefined one keeps its place
    summary = (ast.get_docstring(node) or "").partition("\n")[0]
    return Description(kind=kind, summary=summary, options=tuple(options.values()))


def help_of(cls: type[Any]) -> dict[str, str]:
    """The string that follows each field of a dataclass, by the field's name."""
    return _helps(_class(_parsed(cls.__module__), cls.__name__))


def _helps(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = _text(following)
    return found


def _of_class(cls: type[Any], kind: str) -> Description:
    """What a class of others says of itself; the help of its options from its text and that of its bases."""
    hints, helps = get_type_hints(cls, include_extras=True), dict[str, str]()
    for base in reversed(cls.__mro__):
        # Typed into an interpreter, of Python itself, or in a file that has changed since.
        with suppress(OSError, TypeError, SyntaxError, StopIteration):
            helps |= _helps(_class(ast.parse(dedent(getsource(base))), base.__name__))
    options = tuple(
        Option(
            slot=cls.slot,
            name=each.name,
            flat=component.flat_name(cls.slot, kind, each.name, hints[each.name]),
            type=hints[each.name],
            default=each.default,
            help=helps.get(each.name, ""),
        )
        for each in fields(cls)
    )
    return Description(kind=kind, summary=(cls.__doc__ or "").partition("\n")[0], options=options)


@lru_cache
def _parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _options(tree: ast.Module, node: ast.ClassDef, room: str, kind: str) -> Iterator[Option]:
    """Those of base classes first, which stand in the same file or are imported by their names from another."""
    for base in node.bases:
        if isinstance(base, ast.Name) and (there := _tree_of(base.id, tree)) is not None:
            yield from _options(there, _class(there, base.id), room, kind)
    for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or ast.unparse(statement.annotation).startswith("ClassVar"):
            continue
        assert isinstance(statement.target, ast.Name)
        name, hint, slot = statement.target.id, _type(statement.annotation), ROOMS[room]
        yield Option(
            slot=slot,
            name=name,
            flat=component.flat_name(slot, kind, name, hint),
            type=hint,
            default=MISSING if statement.value is None else ast.literal_eval(statement.value),
            help=_text(following),
        )


def _tree_of(name: str, tree: ast.Module) -> ast.Module | None:
    """The file in which a class stands that another file defines or imports; None: neither."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return tree
        if isinstance(node, ast.ImportFrom) and node.module and any(each.name == name for each in node.names):
            return _parsed(node.module)
    return None


def _text(following: ast.stmt | None) -> str:
    """The string that follows a field."""
    if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
        return " ".join(str(following.value.value).split())
    return ""


def _type(node: ast.expr) -> Any:
    """The type that an annotation stands for."""
    match node:
        case ast.Constant():
            return NoneType if node.value is None else node.value
        case ast.Name(id=name):
            return _PLAIN[name] if name in _PLAIN else getattr(component, name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _type(left) | _type(right)
        case ast.Subscript(value=value, slice=ast.Tuple(elts=elements)):
            return reduce(operator.getitem, [tuple(map(_type, elements))], _type(value))
        case ast.Subscript(value=value, slice=single):
            return _type(value)[_type(single)]
        case ast.Call(func=function, args=arguments):
            return _type(function)(*(ast.literal_eval(argument) for argument in arguments))
    raise TypeError(f"{ast.unparse(node)} cannot be read without importing it; use the types of mae.core.component")
