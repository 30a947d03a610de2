"""SIGINT, SIGTERM and the like: finish the step, save, then stop."""

import signal
import threading
import time
from types import FrameType

_REQUESTS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
"""SIGTERM comes from launchers and schedulers, SIGUSR1 from SLURM's `--signal`, SIGHUP from a closed terminal;
Windows has neither of the last two."""

_HANG_UP = getattr(signal, "SIGHUP", None)

_ONE_REQUEST_SECONDS = 1.0
"""A scheduler may signal every process, and the launcher passes it on again: that is no second request."""


class StopSignals:
    """While entered, the first stop signal is only recorded; a second one acts as if this were not here.

    SIGHUP stays ignored where it is, which is how `nohup` has a command outlive its terminal. What a program that holds
    this Python handles stays its own.

    Attributes:
        asked: number of the first signal; 0 where none came.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._asked_at = 0.0
        self._before: dict[int, signal.Handlers | int | None] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            for number in _REQUESTS:
                before = signal.getsignal(number)
                # None: a program that holds this Python, such as R, handles it, and only that could put it back.
                if before is None or (number == _HANG_UP and before == signal.SIG_IGN):
                    continue
                self._before[number] = signal.signal(number, self._note)  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._asked_at = number, now
        elif now - self._asked_at > _ONE_REQUEST_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
