"""What checks found, before a run or a training, as lines."""

from dataclasses import dataclass
from typing import Any

from rich.console import Console

from mae.errors import MAEError
from mae.findings import Finding
from mae.report.terminal.console import duration
from mae.text import visible

_MARKS = {"ok": "ok  ", "note": "note", "warn": "warn", "stop": "STOP"}
_STYLES = {"ok": None, "note": "cyan", "warn": "yellow", "stop": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What every check found.

    Attributes:
        findings: in the order in which they were looked at.
        seconds: how long that took.
    """

    findings: tuple[Finding, ...]
    seconds: float

    @property
    def fatal(self) -> tuple[Finding, ...]:
        """Those that make the run worthless."""
        return tuple(finding for finding in self.findings if finding.level == "stop")

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"seconds": self.seconds, "findings": [vars(finding) for finding in self.findings]}


def show_diagnosis(console: Console, diagnosis: Diagnosis, *, everything: bool) -> None:
    """One line a check; without `everything` only what is worth reading, and how many were looked at."""
    console.print(f"[bold]{len(diagnosis.findings)} checks in {duration(diagnosis.seconds)}[/bold]", highlight=False)
    shown = [finding for finding in diagnosis.findings if everything or finding.level != "ok"]
    width = max((len(finding.name) for finding in shown), default=0)
    for finding in shown:
        advice = f"; {finding.advice}" if finding.advice else ""
        line = f"{_MARKS[finding.level]} {finding.name:<{width}}  {finding.value}{advice}"
        console.print(visible(line), style=_STYLES[finding.level], highlight=False, markup=False, soft_wrap=True)


def refuse(diagnosis: Diagnosis) -> None:
    """Stop a run that would be worthless.

    Raises:
        MAEError: a check says so.
    """
    if diagnosis.fatal:
        told = "; ".join(f"{finding.name}: {finding.value} ({finding.advice})" for finding in diagnosis.fatal)
        raise MAEError(f"this run would be worthless: {told}. Put it right; --no-doctor begins it all the same")
