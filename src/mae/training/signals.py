"""Ctrl-C and a termination request: finish the step, save, then stop."""

import signal
import threading
from types import FrameType


class StopSignals:
    """While entered, the first SIGINT or SIGTERM only sets `asked`; a second one acts as if this were not here."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.__exit__()
