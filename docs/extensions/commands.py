"""Two directives that show what the command line says of itself: the help of each command, and of each component."""

import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from io import StringIO
from textwrap import fill

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx.application import Sphinx

from mae.cli import COMMANDS, main
from mae.core.kinds import ROOMS, kinds

COLUMNS = 88
"""Of what is printed: as many as fit beside the contents."""


def printed(*words: str) -> str:
    """What a command prints on a terminal of a page's width."""
    width, out = os.environ.get("COLUMNS"), StringIO()
    os.environ["COLUMNS"] = str(COLUMNS)
    try:
        with redirect_stdout(out), suppress(SystemExit):
            main(words)
    finally:
        os.environ.pop("COLUMNS") if width is None else os.environ.update(COLUMNS=width)
    return "\n".join(fill(line, COLUMNS) if len(line) > COLUMNS else line for line in out.getvalue().splitlines())


def parts(command: str) -> list[str]:
    """The names below a command that have options of their own: its help lists them, or names one in an example."""
    text = printed(command, "--help")
    if re.search(rf"'mae {command} [A-Z]+ --help' shows", text):
        return re.findall(r"^  ([a-z][\w-]*) +\S", text, flags=re.MULTILINE)
    return re.findall(rf"\bmae {command} ([a-z]\w*) [A-Z]+\.", text)


class _Printed(Directive):
    def sections(self) -> Iterator[tuple[str, str]]:
        """Headings, each with what was printed."""
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        lines = []
        for heading, text in self.sections():
            lines += ["", heading, "", "```text", *text.rstrip().splitlines(), "```"]
        node = nodes.Element()
        self.state.nested_parse(StringList(lines, source=""), self.content_offset, node, match_titles=True)
        return node.children


class CommandHelp(_Printed):
    """The help of each command."""

    def sections(self) -> Iterator[tuple[str, str]]:
        """A section a command, one below it for each that it has."""
        for command in COMMANDS:
            yield f"## mae {command}", printed(command, "--help")
            for part in parts(command):
                yield f"### mae {command} {part}", printed(command, part, "--help")


class ComponentHelp(_Printed):
    """What `mae show` tells of each kind of component."""

    def sections(self) -> Iterator[tuple[str, str]]:
        """A section a slot."""
        for room, slot in ROOMS.items():
            yield f"## {room.capitalize()}", "\n".join(printed("show", slot, kind) for kind in kinds(room))


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.add_directive("component-help", ComponentHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
