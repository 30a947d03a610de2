"""A command that is told to end takes what is half-written away first."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from mae.errors import Stopped


@contextmanager
def cleaned_up() -> Iterator[None]:
    """While entered, SIGTERM and SIGHUP raise `Stopped`; otherwise they would end the process as it stands."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Stopped(f"told to end by {signal.Signals(number).name}", by=number)

    if threading.current_thread() is not threading.main_thread():  # elsewhere Python allows no handlers
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one
    # What is ignored stays so: `nohup` has a command outlive its terminal.
    before = {number: signal.signal(number, end) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
