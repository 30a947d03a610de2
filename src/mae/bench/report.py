"""What every benchmark says: its options, the machine it ran on, and its figures as a table and as JSON."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mae.evaluation.common.record import hardware, versions
from mae.records import check_new, write_json


def script_parser(description: str | None, *, figures: bool = True) -> argparse.ArgumentParser:
    """The parser of a script in benchmarks/.

    Args:
        description: its docstring.
        figures: whether it has `--out FILE.json`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if figures:
        parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all figures here")
    return parser


def machine(device: torch.device) -> dict[str, Any]:
    """Hardware and versions of the packages that decide the figures."""
    return {**hardware(device), **versions()}


def markdown_row(cells: Iterable[object]) -> str:
    """A row of a table for a page of docs/."""
    return f"| {' | '.join(map(str, cells))} |"


def check_figures(path: Path | None) -> None:
    """Refuse a file that `write_figures` could not write, before anything is measured; None: none is asked for.

    Raises:
        UsageError: it exists, or its folder cannot be made.
    """
    if path is not None:
        check_new(path)


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON, into a folder that is made if it is not there; nothing without a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, figures)
