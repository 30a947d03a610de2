"""Every option that the documentation names is one: of the command it stands with, or, alone in a sentence, of any."""

import re
import shlex
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import fields
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from mae.cli import COMMANDS, main
from mae.config import CHANGEABLE, as_flag
from mae.core.kinds import ROOMS, kinds

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")])
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
BRINGING = {"--recipe", *(f"--{slot}" for slot in ROOMS.values())}
"""Options that bring others, of the kind that they choose."""
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", flags=re.DOTALL | re.MULTILINE)
OF_ALL = {"--help", "--version"}
OF_TORCHRUN = {"--max-restarts", "--nnodes"}


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[str]:
    """What is typed: in blocks of any language but Python's, and in sentences."""
    for language, block in FENCE.findall(text):
        if language not in ("python", "toml", "json"):
            for line in re.sub(r"\\\n", " ", block).splitlines():
                if found := re.match(r"\s*(?:\$ |srun )?(mae [a-z].*)", line):
                    yield found[1]
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        if re.match(r"mae [a-z]", code):
            yield " ".join(code.split())


def lone_options(text: str) -> Iterator[str]:
    """Options in code within sentences, without a command before them."""
    for code in re.findall(r"`([^`]+)`", FENCE.sub("", text)):
        if code.startswith("--"):
            yield from OPTION.findall(code)


@cache
def helped(*words: str) -> str:
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def parts(command: str) -> list[str]:
    """What may follow a command and has options of its own."""
    text = helped(command)
    if re.search(rf"'mae {command} [A-Z]+ --help' shows", text):
        return re.findall(r"^  ([a-z][\w-]*) +\S", text, flags=re.MULTILINE)
    return ["labels"] if command == "doctor" else []


def known(words: list[str]) -> set[str]:
    """The options of a command, of the kinds that it chooses too."""
    if words[:2] == ["plan", "finetune"]:  # takes the words of mae finetune
        return set(OPTION.findall(helped(*words[:3])))
    called = words[:2] if len(words) > 1 and words[1] in parts(words[0]) else words[:1]
    chosen = [
        word for name, value in pairwise(words) if name in BRINGING and "/" not in value for word in (name, value)
    ]
    if "rows" in chosen:  # a component of the reader's own
        return set(any_known())
    text = helped(*called, *chosen)
    if words[0] in ("study", "bench"):  # what these tell of is beside the options of a run
        text += helped("pretrain", *chosen)
    return set(OPTION.findall(text)) | OF_ALL


@cache
def any_known() -> frozenset[str]:
    """The options of all commands, of all kinds of components, and of the benchmarks beside the package."""
    found = OF_ALL | OF_TORCHRUN
    for program in (ROOT / "benchmarks").glob("*.py"):
        found |= set(re.findall(r'"(--[a-z][a-z0-9-]*)"', program.read_text()))
    for command in COMMANDS:
        found |= known([command]).union(*(known([command, part]) for part in parts(command)))
    for room, slot in ROOMS.items():
        for kind in kinds(room):
            out = StringIO()
            with redirect_stdout(out):
                main(["show", slot, kind])
            found |= set(OPTION.findall(out.getvalue()))
    return frozenset(found)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_options_of_commands_are_theirs(page: Path):
    for command in commands(page.read_text()):
        words = shlex.split(command, comments=True)[1:]
        if words[0] in COMMANDS:
            unknown = {word.partition("=")[0] for word in words if OPTION.match(word)} - known(words)
            assert not unknown, command


def test_what_a_resumed_run_may_change_is_named_in_full():
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text()
    named = page.partition("Options that would change the run are")[2].partition("may change: where")[0]
    changeable = {as_flag(each.name) for group in CHANGEABLE for each in fields(group)} - {"--out"}
    assert {flag.replace("--no-", "--") for flag in OPTION.findall(named)} == changeable


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent.name != "coming-from"], ids=page_id
)  # others' options stand there; tests/test_flag_tables.py looks at ours
def test_options_alone_are_of_some_command(page: Path):
    unknown = set(lone_options(page.read_text())) - any_known()
    assert not unknown
