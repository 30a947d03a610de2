"""Two directives that write the reference from docstrings: which names there are, the package itself says."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

import mae

PUBLIC = dict(mae._WHERE)
"""Where each public name lives."""


def rooms() -> dict[str, list[str]]:
    """The names of `mae` by the room that they live in."""
    found: dict[str, list[str]] = {}
    for name, where in sorted(PUBLIC.items(), key=lambda entry: entry[0].casefold()):
        found.setdefault(where.split(".")[1], []).append(name)
    return found


def own_classes(module: ModuleType) -> Iterator[str]:
    """The classes that a module defines for others, in its order, but for those that are names of `mae` already."""
    for name, value in vars(module).items():
        own = inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
        if own and PUBLIC.get(name) != module.__name__:
            yield name


def documented(path: str) -> list[str]:
    """The directive of autodoc for what stands at a path."""
    owner, _, name = path.rpartition(".")
    value = getattr(import_module(owner), name)
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}", "   :members:", ""]
    if inspect.isclass(value):
        return [f".. autoclass:: {path}", "   :members:", ""]
    return [f".. autofunction:: {path}", ""]


class _Names(Directive):
    required_arguments = 1
    final_argument_whitespace = True

    def paths(self, argument: str) -> Iterator[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = ["```{eval-rst}"]
        for argument in self.arguments[0].split():
            lines += [line for path in self.paths(argument) for line in documented(path)]
        node = nodes.Element()
        self.state.nested_parse(StringList([*lines, "```"], source=""), self.content_offset, node)
        return node.children


class PublicNames(_Names):
    """The names of `mae` that live in the given rooms."""

    def paths(self, argument: str) -> Iterator[str]:
        """Of a room."""
        yield from (f"mae.{name}" for name in rooms().get(argument, ()))


class ClassesOf(_Names):
    """The classes that the given modules define for others."""

    def paths(self, argument: str) -> Iterator[str]:
        """Of a module."""
        yield from (f"{argument}.{name}" for name in own_classes(import_module(argument)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.add_directive("classes-of", ClassesOf)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
