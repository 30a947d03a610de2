"""The log of a run, as JSON lines, and what else gets its rows."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mae.errors import MAEError
from mae.records import write_whole
from mae.training.run_records import wrong_row

LogRow = Mapping[str, Any]


@runtime_checkable
class Callback(Protocol):
    """Gets the rows of a run's log; given to `mae.pretrain(..., callbacks=[...])`.

    Each row is a dictionary with `step` and `samples`. One with a `loss` holds the numbers of the steps since the last
    such row, as `metrics.jsonl` does; one with an `evaluation` the numbers of an online evaluation by name; one with a
    `warning` its `name` and `text`.
    """

    def log(self, row: LogRow) -> None:
        """Take a row: the numbers of the steps since the last one, or those of an `evaluation`, without a loss."""

    def close(self) -> None:
        """The run is over, finished or not."""


class JsonLines:
    """Appends each row to a file; rows after the step that a resumed run starts from are removed first.

    Args:
        path: the file.
        start_step: steps done before this part of the run.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        # A run that starts anew evaluates before its first step again.
        kept = [row for row in read_rows(path) if row["step"] <= start_step] if start_step else []
        write_whole(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def log(self, row: LogRow) -> None:
        """Append a row."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_rows(path: Path, *, complete: bool = False) -> list[dict[str, Any]]:
    """The rows of a metrics file; none where there is no file. A last line cut short by a kill is skipped.

    Args:
        path: the file.
        complete: whether rows of losses must have all that a run writes.

    Raises:
        MAEError: a line holds what no run writes.
    """
    rows = []
    *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate([*lines, last] if last else lines, 1):
        try:
            row = json.loads(line)
            wrong = wrong_row(row, complete=complete)
        except (ValueError, RecursionError) as error:
            if number > len(lines):
                break
            wrong = f"no JSON ({error})"
        if wrong:
            raise MAEError(
                f"{path} holds what no run writes in line {number}: {wrong}; put back what was edited by hand"
            )
        rows.append(row)
    return rows


def loss_rows(rows: Iterable[LogRow]) -> list[LogRow]:
    """The rows that hold a loss, without those of evaluations."""
    return [row for row in rows if "loss" in row]
