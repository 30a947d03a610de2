"""A corpus of what may reach the tool from outside, each with the verdict it deserves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "refused", "either"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to read.

    Attributes:
        name: what it is.
        path: where it lies.
        reader: a name of `readers.READERS`.
        verdict: whether it must be read or refused; `either` for damage that may leave it readable.
        why: what the refusal must say, as a regular expression, or the line that the reader gives.
    """

    name: str
    path: Path
    reader: str
    verdict: Verdict
    why: str = ""


def write_corpus(folder: Path) -> list[Case]:
    """Write every case below a folder."""
    from hostile import containers, images, models

    cases: list[Case] = []
    for part in (images, containers, models):
        below = folder / part.__name__.rpartition(".")[2]
        below.mkdir(parents=True)
        cases += part.cases(below)
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "two cases of one name"
    return cases
