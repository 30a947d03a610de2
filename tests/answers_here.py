"""Exports that are read in this process: starting one, with its libraries, takes longer than a tiny model's answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from mae.interop.exports import export
from mae.interop.exports import roundtrip as answer


def answer_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is carried out, and not started; `tests/interop/exports/test_export.py` starts it."""

    def run(command: list[str], **given: Any) -> SimpleNamespace:
        assert command[1:4] == ["-P", "-m", answer.__name__]
        return SimpleNamespace(returncode=answer.main(command[4:]), stderr="")

    monkeypatch.setattr(export, "subprocess", SimpleNamespace(run=run))
