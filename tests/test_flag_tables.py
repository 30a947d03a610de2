"""The tables that set other programs' flags beside ours: ours are there, and have the defaults that are told."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mae.cli import main
from mae.recipes import recipe_config

DOCS = Path(__file__).parents[1] / "docs"
WORDS = {"on": "True", "off": "False", "none": "None"}


def sections() -> Iterator[tuple[str, str, list[list[str]]]]:
    """Page, command and rows of each section whose heading ends in a command."""
    for page in sorted((DOCS / "coming-from").glob("*.md")):
        for section in page.read_text().split("\n## ")[1:]:
            heading, _, body = section.partition("\n")
            if command := re.search(r": `mae (.+)`$", heading):
                rows = re.findall(r"^\| (.*) \|$", body, re.M)[1:]  # without the header
                yield page.name, command[1], [[cell.strip() for cell in row.split(" |")] for row in rows]


def defaults(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The options of a command, and what its help or its default recipe tells of each."""
    with suppress(SystemExit):
        main([*shlex.split(command), "--help"])
    found: dict[str, str] = {}
    for entry in re.split(r"\n[│ ] (?=--)", capsys.readouterr().out)[1:]:
        names = re.findall(r"--[\w-]+", re.split(r" (?!--)", entry)[0])  # with --no-...
        told = re.search(r"\(default: ([^)]*)\)", " ".join(entry.replace("│", " ").split()))
        found |= dict.fromkeys(names, told[1] if told else "")
    if command == "pretrain":
        recipe = recipe_config("default").flat()
        found |= {f"--{name.replace('_', '-')}": typed(value) for name, value in recipe.items() if value is not None}
    return found


def typed(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def begins(text: str) -> str:
    """A default without what is said about it."""
    return re.split(r"[;:,] ", text.replace("`", ""))[0]


def same(told: str, default: str) -> bool:
    told = WORDS.get(told, told)
    with suppress(ValueError):
        return float(told) == float(default)
    return told == WORDS.get(begins(default), begins(default))


@pytest.mark.parametrize(("page", "command", "rows"), [pytest.param(*found, id=found[1]) for found in sections()])
def test_options_are_there_with_their_defaults(
    page: str, command: str, rows: list[list[str]], capsys: pytest.CaptureFixture[str]
):
    known = defaults(command, capsys)
    assert len(rows) > 10
    for _, _, here, default in rows:
        named = re.findall(r"--[a-z][\w-]*", re.sub(r"`mae [^`]*`", "", here))
        assert set(named) <= known.keys(), here
        assert here.startswith(("`--", "none", "the first argument", "a ")), here
        if here.startswith("`--") and (actual := known[named[0]]):
            assert same(begins(default), actual), (here, default, actual)
