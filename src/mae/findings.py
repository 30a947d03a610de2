"""What a check before a run found, in one line: of the data as of the model."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was looked at, as "channel statistics".
        level: `ok`; `note`, worth knowing; `warn`, the run begins but is likely not what is wanted; `stop`, the run
            would be worthless.
        value: what was measured, with its number, in words.
        advice: what to do about it; empty for `ok`.
    """

    name: str
    level: Literal["ok", "note", "warn", "stop"]
    value: str
    advice: str = ""
