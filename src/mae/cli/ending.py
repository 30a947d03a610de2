"""A command that is told to end takes what is half-written away first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_OF_A_SIGNAL = 128  # and its number: the exit code of what a signal ended


@contextmanager
def cleaned_up() -> Iterator[None]:
    """While entered, SIGTERM is an exception; otherwise it would end the process as it stands."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(_OF_A_SIGNAL + number)

    if threading.current_thread() is not threading.main_thread():  # elsewhere Python allows no handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
