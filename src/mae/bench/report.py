"""What every benchmark says: its options, the machine it ran on, and its figures as a table and as JSON."""

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from mae.evaluation.common.record import hardware, versions
from mae.records import write_json


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


def write_figures(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON; nothing without a path."""
    if path is not None:
        write_json(path, figures)
