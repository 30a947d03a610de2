"""Which signals a run takes over."""

import signal

import pytest

from mae.training.resilience.signals import StopSignals


def test_what_the_program_around_python_handles_stays_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has no handler that could be put back, and says None of it."""
    look = signal.getsignal
    ours, others = look(signal.SIGTERM), look(signal.SIGINT)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGINT else look(number))
    with StopSignals():
        assert look(signal.SIGINT) == others and look(signal.SIGTERM) != ours
    assert look(signal.SIGTERM) == ours
