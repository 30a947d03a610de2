"""`tracking.json`: which run of W&B and of MLflow a run folder is, so that a resumed run continues it."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

from mae import records
from mae.errors import UsageError

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""An id becomes part of a file's name and of a URL."""


@dataclass(frozen=True, kw_only=True)
class TrackerIds:
    """The contents of `tracking.json`.

    Attributes:
        wandb: id of the run of W&B; None: not logged there yet.
        mlflow: id of the run of MLflow, likewise.

    Raises:
        UsageError: an id that neither gives.
    """

    wandb: str | None = None
    mlflow: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None and not _ID.fullmatch(value):
                raise UsageError(f"{each.name} is {records.shown(value)}; expected 1 to 64 letters, digits, '-' or '_'")


def read_ids(path: Path) -> TrackerIds:
    """The ids that were kept; none where there is no file.

    Raises:
        UsageError: the file holds what no run writes.
    """
    if not path.is_file():
        return TrackerIds()
    try:
        return records.read_record(TrackerIds, path, what="entry")
    except UsageError as error:
        raise UsageError(f"{error}; put back what was edited by hand, or delete the file to begin new runs") from error
